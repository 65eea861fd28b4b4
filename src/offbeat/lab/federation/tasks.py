"""What clients learn: pictures of ten kinds, whose classes come task by task.

    digits            8 x 8, ships with offbeat
    fashion:FOLDER    Fashion-MNIST, 28 x 28; cifar10:FOLDER, 32 x 32 in colour

Folders are those of a race's tasks of the same names. Of a large data set a part is taken, drawn
by the seed. Settings were chosen before any result of a method was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from offbeat import federated as fed
from offbeat.lab import digits
from offbeat.lab.federation.resnet import resnet18
from offbeat.lab.settings import nearest
from offbeat.lab.tasks import cifar10, fashion

Samples = tuple[Tensor, Tensor, Tensor, Tensor]
"""To train on, with their labels; to test on."""
MODELS = ("small", "resnet18")
CLASSES = 10


@dataclass(frozen=True)
class Task:
    """A data set, a net for it, and how clients train it."""

    name: str
    samples: Callable[[int], Samples]
    """Of a seed."""
    model: Callable[[], nn.Module]
    settings: fed.Settings
    kept: int
    """Samples of each class that clients keep, all together, where nobody says otherwise."""

    def budget(self, tasks: int) -> int:
        """Samples of a task to keep, if there are so many tasks."""
        return self.kept * max(1, CLASSES // tasks)


def find(name: str, model: str = "small", size: int | None = None) -> Task:
    """Make a task by its name, with one of MODELS, and at most so many samples to train on.

    ValueError says what is wrong, or how to get the data.
    """
    head, _, folder = name.partition(":")
    if head not in TASKS:
        raise ValueError(
            f"no task is called {name!r}{nearest(head, [*TASKS])}\n"
            f"There are {', '.join(TASKS)}; fashion:FOLDER and cifar10:FOLDER name a folder"
        )
    if model not in MODELS:
        raise ValueError(f"model must be {' or '.join(MODELS)}, got {model!r}")
    if size is not None and size < CLASSES:
        raise ValueError(f"samples must be {CLASSES} or more, one of each class, got {size}")
    if head == "digits" and (folder or model != "small"):
        asked = f"model {model}" if model != "small" else f"folder {folder}"
        raise ValueError(f"digits take no {asked}: they ship with offbeat, and have 8 x 8 pixels")
    return TASKS[head](folder, model, size)


def _digits(folder: str, model: str, size: int | None) -> Task:
    @lru_cache(maxsize=1)  # virtual clients share a process
    def samples(seed: int) -> Samples:
        x, y, *test = digits.split(seed)
        return (*_some(x, y, size, seed), *test)  # type: ignore[return-value]

    settings = fed.Settings(rounds=10, epochs=2, batch=16, lr=0.1)
    return Task("digits", samples, partial(_perceptron, 64), settings, kept=10)


def _fashion(folder: str, model: str, size: int | None) -> Task:
    fashion.found(folder)  # what is missing is said before the first run

    @lru_cache(maxsize=1)  # virtual clients share a process
    def samples(seed: int) -> Samples:
        x, y, *test = fashion.found(folder)
        return (*_some(x, y, size or 10_000, seed), *test)  # type: ignore[return-value]

    net = partial(_perceptron, 784) if model == "small" else partial(_pictures, 1, 28)
    settings = fed.Settings(rounds=10, epochs=2, batch=64, lr=0.05)
    return Task("fashion", samples, net, settings, kept=50)


def _cifar10(folder: str, model: str, size: int | None) -> Task:
    cifar10.found(folder)

    @lru_cache(maxsize=1)  # virtual clients share a process
    def samples(seed: int) -> Samples:
        x, y, test_x, test_y = cifar10.found(folder)
        return (*_some(x, y, size or 10_000, seed), test_x[:2000], test_y[:2000])

    net = _convolutions if model == "small" else partial(resnet18, 3)
    settings = fed.Settings(rounds=15, epochs=2, batch=64, lr=0.02, momentum=0.9)
    return Task("cifar10", samples, net, settings, kept=30)


TASKS: dict[str, Callable[[str, str, int | None], Task]] = {
    "digits": _digits,
    "fashion": _fashion,
    "cifar10": _cifar10,
}


def _some(x: Tensor, y: Tensor, size: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """So many samples, drawn by the seed; all of them if None."""
    if size is None or size >= len(y):
        return x, y
    some = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:size]
    return x[some], y[some]


# --- nets ----------------------------------------------------------------------------------------


def _perceptron(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU()),
        nn.Linear(64, CLASSES),
    )


def _pictures(channels: int, side: int) -> nn.Module:
    """ResNet-18 of pictures that come as rows."""
    return nn.Sequential(nn.Unflatten(1, (channels, side, side)), resnet18(channels))
