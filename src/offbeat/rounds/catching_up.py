"""A worker is lost where every gradient comes by itself: the others come to the same entry.

Workers hear the entries of an epoch in one order, each at its own time. When the epoch is over,
those who are left tell how many they have done; who is behind does those that another one has done
already, from the store. Of these one at most is a gradient that has travelled: its worker may be
dead, so one who has it hands it on.

    worker 0   entries 0 to 7 ─────────────✗ hands on the gradient of 7 ──┐ says its own again ──
    worker 1   entries 0 to 6, receives 7 ─✗ does 7 ──────────────────────┐ hears 0 of the new ones
    worker 2   says 7, and 8 ──✗ lost      entry 8 is void: nobody has done it

What nobody has done is void. Who lives says its entries of that kind again, in the new epoch. For
who is lost, somebody says that it has left; from then on judges do not wait for it.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from offbeat.errors import EpochOver
from offbeat.rounds import entries
from offbeat.rounds.bells import Bells
from offbeat.rounds.entries import Entry
from offbeat.rounds.turns import Turns
from offbeat.worlds.base import Channel


class CatchingUp(Turns):
    """The part of a queue of gradients that lives through a loss."""

    __slots__ = ()

    def _begin_anew(self, epoch: int) -> None:
        """Meet the others who are left, and be as far as they are."""
        world, place = self._world, f"{self._place}/{epoch}"
        channel = world.channel(place)
        if channel.epoch != epoch:
            raise EpochOver("another worker was lost meanwhile")
        mine = torch.tensor([self._done, self._travelled])
        all_of = torch.empty(len(channel.members), 2, dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        done, travelled = all_of.T.tolist()
        self._handed = self._hand_on(channel, done, travelled)
        while self._done < max(done):
            self._take_turn(self._turn or Entry.read(self._bells.told_before()))
        with self._state:
            self._turn = self._handed = None
            # Before all meet: who is through may have heard something, when the next one is lost.
            self._bells = Bells(world, place)
        if not self._ended:
            self._exchange = self._make(channel)

    def _hand_on(
        self, channel: Channel, done: list[int], travelled: list[int]
    ) -> list[Tensor] | None:
        """Give the latest gradient to those who have missed it; what this worker is given."""
        most, rank = max(travelled), self._world.rank
        assert min(travelled) >= most - 1, "who is through with a gradient has met all others"
        donor = channel.members[done.index(max(done))]
        behind = [each for each, n in zip(channel.members, travelled, strict=True) if n < most]
        if rank in behind:
            missed = [torch.empty_like(body) for body in self.piles.growing.flats.bodies]
            for body in missed:
                channel.recv(body, donor).wait()
            return missed
        if rank == donor:
            works = [channel.send(body, each) for each in behind for body in self._latest]
            for work in works:
                work.wait()
        return None

    def _say_again(self) -> None:
        """Say what nobody has heard in the epoch before, and that who is lost has left."""
        world = self._world
        with self._state:
            (bells, unsaid), resaid, self._resaid = self._said_again, self._resaid, True
        if self._ended or resaid:
            return
        with suppress(EpochOver):
            if world.rank == world.members[0]:
                for rank in set(range(world.size)) - set(world.members):
                    if self._roll.absent.get(rank) != entries.LEFT:
                        bells.tell(Entry(entries.LEFT, rank).written())
            while unsaid:  # the program may add to it
                bells.tell(unsaid[0].written())
                with self._state:
                    unsaid.pop(0)
