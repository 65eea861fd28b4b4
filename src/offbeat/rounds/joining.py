"""A worker joins: it takes part in rounds first, and gets what they have made so far meanwhile.

To the members that is a change of epoch, as a loss is (members.py). The joiner regroups with them,
and hears who must be there for the next round. From then on it takes part in all rounds, as one
that is away: it gives nothing, holds up nobody, and its log has their results. It *lacks* the state
that they are to be applied to: model, optimizer, and so on.

    worker 0   round 7 ──✗ regroups ──┐ round 8 ──┐ applies 8, copies its state ─┐ round 9 ────
               background                                           sends it ────────┐
    worker 2   joins ────✗ regroups ──┐ round 8 ──┐ ───────── (round 9) ─────────────┐ takes it,
                                                                                       applies 9

The first worker that comes to the end of a step copies its own state for it; a background sends the
copy. It is of some round, k; the joiner drops the rounds up to k from its log, applies those after,
and is here. So nobody waits for what travels.

If a worker is lost meanwhile, the one that gives among them, all regroup; then who still lacks the
state begins anew, and anyone else may give it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import EpochOver, NobodyToJoinError
from offbeat.rounds.header import AWAY
from offbeat.rounds.presence import Presence
from offbeat.worlds.base import Channel

Pack = Callable[[int], Tensor]
"""Copies all that a joiner of this rank needs, as bytes; called between two steps."""


class Joining(Presence):
    """The part of an engine that joins, and has others join."""

    __slots__ = ()

    # --- the joiner ------------------------------------------------------------------------

    def begin_to_join(self) -> None:
        """Be away, and give nothing to any round, until the state is here."""
        with self._state:
            self._lacks = self._taking = True  # nothing is to be folded onto what is not there
            self._presence, self._told_away, self._stays = AWAY, True, True
            self._away_since = self._world.now()
            self._state.notify_all()

    def await_state(self) -> Tensor:
        """Block until one of the others has given its state; what it has packed."""
        with self._state:
            self._state.wait_for(lambda: self._gift is not None or self._ended)
            gift, self._gift = self._gift, None
        if gift is None:
            raise NobodyToJoinError(
                f"worker {self._world.rank} has joined when all others had ended their loops: "
                "there is nothing left to do"
            )
        return gift

    def joined(self) -> None:
        """The program has taken over the state, and all rounds since: be here."""
        self._come_back()

    def _await_gift(self) -> None:
        """Take the state from whoever gives it; in the background."""
        world, key = self._world, self._gives(self._world.rank)
        channel_of, control = world.channel, world.control_in_epoch()
        giver = int(control.get(f"{key}/by").decode())
        channel = channel_of(key, _pair(giver, world.rank))
        told = torch.empty(2, dtype=torch.int64)
        channel.recv(told, giver).wait()
        size, taken = told.tolist()
        gift = torch.empty(size, dtype=torch.uint8)
        channel.recv(gift, giver).wait()
        with self._state:  # the giver may have come further than this worker's background
            self._state.wait_for(lambda: self.log.completed >= taken or self._over)
            if self._over:
                return
            self.log.know(taken)
            self._lacks, self._gift = False, gift
            self._state.notify_all()
        channel.close()

    # --- those who take it in --------------------------------------------------------------

    @property
    def is_asked_for_state(self) -> bool:
        """Whether a worker that joins lacks what this one could give."""
        return bool(self._lacking)

    def give_state(self, pack: Pack) -> None:
        """Give one's own state to those who lack it, unless another worker does.

        Called by the program, between two steps; the copy that it makes travels in the background.
        """
        with self.undisturbed():
            with self._state:
                if not self._may_give_state():
                    return
                lacking, self._lacking = self._lacking, ()
                taken, control = self.log.taken, self._world.control_in_epoch()
            with suppress(EpochOver):
                for rank in lacking:
                    if control.add(self._gives(rank), 1) == 1:
                        self._give_to(rank, taken, pack(rank))

    def _may_give_state(self) -> bool:
        """Whether the parameters have all rounds that a joiner's log has not; under lock."""
        return not self._over and not self.log.folded and self.log.taken >= self._lacking_since

    def _give_to(self, rank: int, taken: int, gift: Tensor) -> None:
        world, key, control = self._world, self._gives(rank), self._world.control_in_epoch()

        def give() -> None:
            channel = world.channel(key, _pair(rank, world.rank))
            control.set(f"{key}/by", str(world.rank).encode())
            channel.send(torch.tensor([gift.numel(), taken]), rank).wait()
            channel.send(gift, rank).wait()
            channel.close()

        self._spawn(f"state for worker {rank}", give)

    def _gives(self, rank: int) -> str:
        return f"{self._place}/{self._world.epoch}/state/{rank}"

    # --- regrouping ------------------------------------------------------------------------

    def _tell_new(self, channel: Channel, knows: list[int], new: list[int]) -> None:
        """Have those who are new know as much of the rounds as the others do."""
        if self._world.rank in new:
            told = torch.empty(1, dtype=torch.int64)
            channel.recv(told, knows[0]).wait()
            facts = torch.empty(int(told), dtype=torch.uint8)
            channel.recv(facts, knows[0]).wait()
            self._hear_facts(pickle.loads(bytes(facts.tolist())))
        elif self._world.rank == knows[0]:
            packed = torch.frombuffer(bytearray(pickle.dumps(self._facts())), dtype=torch.uint8)
            for rank in new:
                channel.send(torch.tensor([packed.numel()]), rank).wait()
                channel.send(packed, rank).wait()

    def _facts(self) -> dict[str, Any]:
        return {
            "completed": self.log.completed,
            "offset": self._offset,
            "following": self._following,
            "quorum": self._quorum,
            "chosen": None if self._choose is None else vars(self._choose),
            "absent": self._absent,
            "ended": self._ended,
            "marks": self._marks,
            "given_by": self._given_by,
            "missed": self._missed,
            "lost_samples": self.lost_samples,
        }

    def _hear_facts(self, facts: dict[str, Any]) -> None:
        with self._state:
            if self._given is not None:  # of a round that is another one by now
                self.piles.give_back(self._given[0])
                self._given = None
            self.log.begin_at(facts["completed"])
            self._started = self._steps = facts["completed"]
            self._offset, self._following = facts["offset"], facts["following"]
            self._quorum, self._absent = facts["quorum"], facts["absent"]
            if self._choose is not None:
                vars(self._choose).update(facts["chosen"])
            self._marks, self._given_by = facts["marks"], facts["given_by"]
            self._missed, self.lost_samples = facts["missed"], facts["lost_samples"]
            self._latest = []
            self._ended = facts["ended"]

    def _with_new(self, new: list[int]) -> None:
        """Count on those who are new, and lack the state: they are away; under lock."""
        number, active, due = self._following
        if new and not self._ended:
            self._following = number, tuple(sorted({*active, *new})), due - set(new)
            self._absent |= dict.fromkeys(new, number) if self._rules.lockstep else {}
            self._paused = tuple(rank for rank in self._paused if rank not in new)
        mine = self._lacks or self._ended
        self._lacking, self._lacking_since = () if mine else tuple(new), self.log.completed


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)
