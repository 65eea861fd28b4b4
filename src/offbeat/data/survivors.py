"""Survivors: a DistributedSampler that divides the data among those who are left.

    sampler = offbeat.Survivors(DistributedSampler(data))    # the rest of the script as it is

For scripts that stay with fixed shares. Who comes first to an epoch writes down, for all, among
whom its data are divided: the members there are. Nobody waits for anybody, and a worker that has
left its loop is not missed. A lost worker's share of the epochs that were begun before its loss is
not computed; from the next one on the others have all of the data between them. A worker that joins
has no share of the epochs that the others have begun without it: it passes them at once, and its
loop counts as theirs from the next one on. `offbeat.Deal` does better: nothing is left out, and
nobody waits for the slowest share at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch.utils.data import DistributedSampler, Sampler

from offbeat.data.seat import next_number
from offbeat.errors import ExpelledError
from offbeat.worlds import World
from offbeat.worlds.current import come_back, present_world


class Survivors(Sampler[Any]):
    """Wraps a `DistributedSampler`: each iteration divides the data among the members there are.

    Every worker makes one, and iterates inside the attached block. Where losses are not survived,
    it is the sampler that it wraps.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(f"Survivors wraps a DistributedSampler, got {type(sampler).__name__}")
        self.sampler = sampler
        self._number: int | None = None
        self._since = 0  # the epoch of members that this process came with, to this block
        self._block: ref[World] | None = None
        self._turns = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_block": None}

    def set_epoch(self, epoch: int) -> None:
        """As ever: say which epoch comes next, so that it has an order of its own."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this worker, as the data were divided last."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        world = present_world()
        if world is None or not world.survives or world.size == 1:
            return iter(self.sampler)
        if self._number is None:
            self._number, self._since = next_number(world), world.entered
        elif self._block is None or (self._block() is not world and not world.returns):
            self._since = world.entered  # who has joined in a block before is there from the start
        self._block = ref(world)
        self._turns += 1
        try:
            epoch, members = _written(world, f"survivors/{self._number}/{self._turns}")
        except ExpelledError as error:
            come_back(error)
            self._turns -= 1
            return iter(self)
        if world.rank not in members or epoch < self._since:  # or a lost one of its rank was
            return iter(())
        self._divide(members, world.rank)
        return iter(self.sampler)

    def _divide(self, members: list[int], rank: int) -> None:
        sampler, count = self.sampler, len(members)
        sampler.num_replicas, sampler.rank = count, members.index(rank)
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        short = sampler.drop_last and samples % count
        sampler.num_samples = math.ceil((samples - count if short else samples) / count)
        sampler.total_size = sampler.num_samples * count


def _written(world: World, name: str) -> tuple[int, list[int]]:
    """Who divides the data of a turn, and in which epoch of members the first one came to it."""
    told = json.dumps(world.among).encode()  # at once: another thread may change both meanwhile
    epoch, members = json.loads(world.control.kept().set_once(name, told))
    return epoch, members
