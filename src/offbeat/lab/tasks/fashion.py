"""Fashion-MNIST, whole, at 28 x 28 pixels, by a small net: near the accuracy that it ends with.

    offbeat race --task fashion:~/data/fashion-mnist

The folder holds the data set's four files (train-images-idx3-ubyte.gz, ...), as Debian's package
dataset-fashion-mnist installs them; there they are looked for, if neither the task nor
$OFFBEAT_FASHION_MNIST names another place.

`fashion-skewed` has the same net and images, but each worker has its own: every class is split
among the workers by a Dirichlet(0.1), another one for every seed.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Batch, Task, classified, drawn, sgd

_DEBIAN = "/usr/share/datasets/fashion-mnist"
_BATCH = 32
_TESTS = 2500
_CLASSES = 10
_ALPHA = 0.1


def task(folder: str = "") -> Task:
    """Tell ten kinds of clothes apart."""
    train_x, train_y, *_ = found(folder)
    return _task("fashion", folder, drawn(train_x, train_y, _BATCH), 0.85)


def skewed(folder: str = "") -> Task:
    """The same, from images that differ by worker."""
    train_x, train_y, *_ = found(folder)

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        mine = shards(train_y, world_size, seed)[rank]
        return drawn(train_x[mine], train_y[mine], _BATCH)(rank, world_size, seed)

    return _task("fashion-skewed", folder, batches, 0.8)


def _task(
    name: str, folder: str, batches: Callable[[int, int, int], Iterator[Batch]], accuracy: float
) -> Task:
    *_, test_x, test_y = found(folder)
    return Task(
        name,
        model=lambda: nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, _CLASSES)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        evaluate=lambda model: classified(model, test_x[:_TESTS], test_y[:_TESTS]),
        optimizer=sgd(lr=0.1),
        target=Target("accuracy", accuracy),
        budget_steps=1000,
        draws=False,
    )


def shards(labels: Tensor, workers: int, seed: int, alpha: float = _ALPHA) -> list[Tensor]:
    """By worker, which samples are its own; nobody is left without any."""
    draw = torch.Generator().manual_seed(seed)
    mine: list[list[Tensor]] = [[] for _ in range(workers)]
    for kind in range(_CLASSES):
        its = (labels == kind).nonzero().flatten()
        its = its[torch.randperm(len(its), generator=draw)]
        gammas = torch._standard_gamma(torch.full((workers,), alpha).double(), draw)
        ends = ((gammas / gammas.sum()).cumsum(0) * len(its)).long().tolist()
        places = [0, *ends[:-1], len(its)]
        for worker, (begin, end) in enumerate(pairwise(places)):
            mine[worker].append(its[begin:end])
    owned = [torch.cat(each) for each in mine]
    largest = max(owned, key=len)
    return [each if len(each) else largest[:_BATCH] for each in owned]


# --- the files ---------------------------------------------------------------------------------


def found(folder: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images to train on with their labels, and to test on; ValueError says how to get them."""
    named = folder or os.environ.get("OFFBEAT_FASHION_MNIST", _DEBIAN)
    return _loaded(Path(named).expanduser())


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (train_x, train_y), (test_x, test_y) = (_part(folder, name) for name in ("train", "t10k"))
    return train_x, train_y, test_x, test_y


def _part(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images and labels: an idx file is a header of 16 or 8 bytes, then bytes."""
    pixels = _bytes(folder / f"{name}-images-idx3-ubyte.gz", 16)
    labels = _bytes(folder / f"{name}-labels-idx1-ubyte.gz", 8)
    if len(pixels) != 784 * len(labels) or not len(labels):
        raise ValueError(
            f"{folder}: {len(pixels)} bytes of {name} images do not go with {len(labels)} labels: "
            "get the files again"
        )
    return (pixels.view(-1, 784).float() / 255 - 0.286) / 0.353, labels.long()


def _bytes(path: Path, header: int) -> Tensor:
    try:
        content = gzip.decompress(path.read_bytes())[header:]
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; Fashion-MNIST is in Debian's package dataset-fashion-mnist, "
            "and --task fashion:FOLDER or $OFFBEAT_FASHION_MNIST names another folder"
        ) from None
    except OSError as error:  # gzip.BadGzipFile is one
        raise ValueError(f"{path}: cannot be read: {error}") from None
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole file: {error}") from None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
