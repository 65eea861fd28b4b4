"""Survivors: a DistributedSampler that divides the data among those who are left.

    sampler = offbeat.Survivors(DistributedSampler(data))    # the rest of the script as it is

For scripts that stay with fixed shares. A lost worker's share of the epoch that it died in is not
computed; from the next epoch on the others have all of the data between them. `offbeat.Deal` does
better: nothing is left out, and nobody waits for the slowest share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from offbeat.data.seat import next_number
from offbeat.worlds import World
from offbeat.worlds.current import present_world


class Survivors(Sampler[Any]):
    """Wraps a `DistributedSampler`: each iteration divides the data among the members there are.

    Every worker makes one. Where losses are survived, all meet when they begin to iterate, inside
    the attached block, so that all divide alike; the others' rounds do not wait for that.
    Elsewhere it is the sampler that it wraps.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(f"Survivors wraps a DistributedSampler, got {type(sampler).__name__}")
        self.sampler = sampler
        self._number: int | None = None
        self._turns = 0

    def set_epoch(self, epoch: int) -> None:
        """As ever: say which epoch comes next, so that it has an order of its own."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this worker, as the data were divided last."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        world = present_world()
        if world is not None and world.survives and world.size > 1:
            self._divide(self._members(world), world.rank)
        return iter(self.sampler)

    def _members(self, world: World) -> tuple[int, ...]:
        if self._number is None:
            self._number = next_number(world)
        self._turns += 1
        name = f"survivors/{self._number}/{self._turns}"
        with world.elsewhere("the first batch of an epoch"):
            return world.meet(name, act=lambda: world.members) or ()

    def _divide(self, members: tuple[int, ...], rank: int) -> None:
        sampler, count = self.sampler, len(members)
        sampler.num_replicas, sampler.rank = count, members.index(rank)
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        short = sampler.drop_last and samples % count
        sampler.num_samples = math.ceil((samples - count if short else samples) / count)
        sampler.total_size = sampler.num_samples * count
