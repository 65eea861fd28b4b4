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

A worker that joins is told what the others know at that entry: the judge, and what was added up so
far. From then on it does the same entries as they do, as one that has left, and its log has the
updates. When it has the state that these are to be applied to (joining.py), it says that it is
back, and judges count on it: from its entry on, which all hear in one order. If that comes after
the last one, since all others have left, there is nothing left to join. What was added up so far
may hold gradients of who was lost in its place: these are in a round to come, and that one's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import EpochOver, WorkerLostError
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
        channel = world.channel(place, epoch=epoch)
        mine = torch.tensor([-1, -1] if self._lacks else [self._done, self._travelled])
        all_of = torch.empty(len(channel.members), 2, dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        told = dict(zip(channel.members, all_of.tolist(), strict=True))
        new = [rank for rank, (done, _) in told.items() if done < 0]
        knows = {rank: each for rank, each in told.items() if rank not in new}
        if not knows:
            raise self._nobody_has_state()
        if world.rank in knows:
            self._catch_up(channel, knows)
        self._tell_new(channel, list(knows), new)
        with self._state:
            self._turn = self._handed = None
            # Before all meet: who is through may have heard something, when the next one is lost.
            self._bells = Bells(world, place)
            self._note_lacking(new)
        if not self._ended:
            self._exchange = self._make(channel)

    def _catch_up(self, channel: Channel, told: dict[int, list[int]]) -> None:
        """Do what any of the others has done already."""
        done = [done for done, _ in told.values()]
        if min(done) < max(done) and not self._world.remembers(self._bells.epoch):
            raise WorkerLostError(
                f"{self._world.loss}; with it are the entries that some have missed of others, who "
                f"have done {max(done) - min(done)} more: where every gradient comes by itself, go "
                "on from a checkpoint"
            )
        self._handed = self._hand_on(channel, told)
        while self._done < max(done):
            self._take_turn(self._turn or Entry.read(self._bells.told_before()))

    def _hand_on(self, channel: Channel, told: dict[int, list[int]]) -> list[Tensor] | None:
        """Give the latest gradient to those who have missed it; what this worker is given."""
        most, rank = max(travelled for _, travelled in told.values()), self._world.rank
        behind = [each for each, (_, travelled) in told.items() if travelled < most]
        assert all(told[each][1] == most - 1 for each in behind), "all have met for the one before"
        donor = max(told, key=lambda each: told[each][0])
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

    # --- joining -----------------------------------------------------------------------------

    def joined(self) -> None:
        """Be back, for the others' judges, too."""
        rank = self._world.rank
        super().joined()
        self._tell(Entry(entries.BACK, rank))
        with self._state:
            self._state.wait_for(lambda: self._ended or rank not in self._roll.absent)
            if rank in self._roll.absent:
                raise self._nobody_to_join()

    def _held(self) -> float:
        rank = self._world.rank
        return self.log.samples_of(rank) + sum(each.samples_of(rank) for each in self._sums)

    def _facts(self) -> dict[str, Any]:
        return {
            **self._books(),
            "done": (self._done, self._travelled),
            "roll": vars(self._roll),
            "judge": self._judge.state_dict(),
            "sums": [each.state_dict() for each in self._sums],
            "versions": (self._base, self._bad),
            "made_by_all": self._made_by_all,
            "ends": self._asked_to_end,
            "watches": None if self.watches is None else self.watches.state_dict(),
            "useful": self._useful,
            "paused": self._paused,
        }

    def _hear_facts(self, facts: dict[str, Any]) -> None:
        rank = self._world.rank
        with self._state:
            self._hear_books(facts)
            self._done, self._travelled = facts["done"]
            vars(self._roll).update(facts["roll"])
            self._judge.load_state_dict(facts["judge"])
            for each, its in zip(self._sums, facts["sums"], strict=True):
                if each.pile is not None:
                    self.piles.give_back(each.pile)
                each.load_state_dict(its, self.piles)
            for mean in self._means:  # of its own gradients, of which there are none
                mean.clear()
            self._base, self._bad = facts["versions"]
            self._made_by_all, self._asked_to_end = facts["made_by_all"], facts["ends"]
            self._useful = facts["useful"]
            if self.watches is not None:
                self.watches.load_state_dict(facts["watches"])
            self._paused = facts["paused"]
            # Until it is back, nobody waits for it. Perhaps nobody has said that the one before in
            # its place is lost: then this worker does.
            here = self._roll.absent.get(rank) != entries.LEFT
            self._unsaid = [Entry(entries.LEFT, rank)] if here else []
