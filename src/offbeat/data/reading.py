"""Shards that a worker reads itself: dealt as the batches of a Deal are, each a batch of one.

So a position can be saved, and what a lost worker had in hand is dealt again. A shard is *given*
when it has been read to its end. Of those in the middle of which a worker is, or was when it was
saved, it is remembered how many samples its loop has seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import PurePath
from typing import Any

from offbeat.data.deal import Deal
from offbeat.data.loaders import Loading


class Reading(Loading):
    """One iteration of one worker: whether it is in the middle of a shard, and how far."""

    def __init__(self, seen: Iterable[tuple[int, int]] = ()) -> None:
        """From where a state was saved, if that is where this goes on: shards, samples seen."""
        super().__init__(None)
        self._skips = dict(seen)
        self._within: int | None = None
        self._read = 0

    @property
    def read(self) -> dict[int, int]:
        """Shards in hand of which the loop has seen samples: how many."""
        return self._skips if self._within is None else {**self._skips, self._within: self._read}

    def samples(
        self,
        numbers: Iterator[list[int]],
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
    ) -> Iterator[Any]:
        """Those of one shard after the other, but for what was seen before."""
        for (number,) in numbers:
            self._read = self._skips.pop(number, 0)
            self._within = number
            for sample in islice(read(shards[number]), self._read, None):
                self._read += 1
                yield sample
            self._within = None

    def given_so_far(self, drawn: int) -> int:
        """How many of the shards drawn so far have been read to their end."""
        return drawn - (self._within is not None)


class ShardDeal(Deal):
    """A deal of shards: its workers say what differs in the words of DealShards."""

    def __init__(self, shards: Sequence[Any], shuffle: bool, seed: int) -> None:
        super().__init__(range(len(shards)), 1, shuffle=shuffle, seed=seed)
        self._shards = shards

    def come_to(self, turn: int, epoch: int) -> None:
        """The next turn has this number, and is this epoch."""
        self._seat().come_to(turn)
        self.set_epoch(epoch)

    @property
    def joins(self) -> bool:
        """Whether this worker has joined others, and begins in their epoch."""
        return self._seat().counts

    @cached_property
    def _names(self) -> str:
        named = all(isinstance(shard, str | int | PurePath) for shard in self._shards)
        names = repr(list(map(str, self._shards))) if named else ""
        return f"{zlib.crc32(names.encode()):08x}"

    def _alike(self) -> dict[str, Any]:
        return {
            "the number of shards": self._samples,
            "the names of the shards, or their order": self._names,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def alike(self, epoch: int) -> dict[str, Any]:
        """What must be the same on all workers."""
        return {**self._alike(), "the epoch": epoch}
