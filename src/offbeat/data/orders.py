"""In which order the data come in an epoch: the same list of batches on every worker.

Nothing is sent for that. Each worker draws the whole list itself, from the seed and the epoch, and
leaves every random generator of the program as it found it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any

import torch

from offbeat.worlds.generators import Generators

_LEVELS = 4  # a sampler in a batch sampler in a batch sampler: deep enough


class Batches(ABC):
    """The batches of one epoch, by number."""

    mark = ""
    """What differs, almost surely, between lists that differ, if seed and epoch do not say it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> list[Any]: ...


class Chopped(Batches):
    """A row of indices, cut into batches of one size; the last one is short, or left out."""

    def __init__(
        self, indices: torch.Tensor | Sequence[Any], batch_size: int, drop_last: bool
    ) -> None:
        self._indices = indices
        self._batch_size = batch_size
        self._count = batches_of(len(indices), batch_size, drop_last)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> list[Any]:
        first = number * self._batch_size
        batch = self._indices[first : first + self._batch_size]
        return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


class Listed(Batches):
    """Batches as somebody else's batch sampler has made them."""

    def __init__(self, batches: list[list[Any]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> list[Any]:
        return self._batches[number]


def batches_of(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches there are in so many samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def mixed(seed: int, epoch: int) -> int:
    """One seed for this epoch; `seed + 1` in epoch 0 is not `seed` in epoch 1."""
    return int.from_bytes(blake2b(f"{seed}/{epoch}".encode(), digest_size=7).digest(), "little")


def in_order(samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor | range:
    """The indices of a data set: one permutation, or as they are."""
    if not shuffle:
        return range(samples)
    return torch.randperm(samples, generator=torch.Generator().manual_seed(mixed(seed, epoch)))


def drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that a sampler gives in this epoch: the same on every worker."""
    with _seeded(sampler, seed, epoch):
        return list(sampler)


def mark(drawn: list[Any]) -> str:
    """What differs, almost surely, between two lists that differ."""
    return f"{zlib.crc32(repr(drawn).encode()):08x}"


def count(sampler: Iterable[Any]) -> int | None:
    """How many things a sampler gives, if it says so."""
    return len(sampler) if isinstance(sampler, Sized) else None


@contextmanager
def _seeded(sampler: object, seed: int, epoch: int) -> Iterator[None]:
    """Have a sampler draw from this seed and epoch, in this block; then all is as it was.

    It may draw from the global generators, or from one of its own, named `generator` as in torch.
    """
    with ExitStack() as stack:
        outside = Generators.now()
        stack.callback(outside.put_back)
        Generators.seeded(mixed(seed, epoch)).put_back()
        for each in _levels(sampler):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
            if isinstance(own := getattr(each, "generator", None), torch.Generator):
                stack.callback(own.set_state, own.get_state())
                own.manual_seed(mixed(seed, epoch))
        yield


def _levels(sampler: object) -> Iterator[object]:
    """A sampler, and those that it takes its own indices from."""
    for _ in range(_LEVELS):
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
