"""A worker is lost among neighbours: the others call the roll, and go on from one number.

Neighbours are some rounds apart, and no two have the same result of one. So there is nothing to be
handed on. When the epoch is over, those who are left tell how far they are, and all count on from
the most:

    worker 0   round 7 ─┐ gives to 8 ──✗ 9: gives the same again ──┐
    worker 1   round 7 ─┐ round 8 ─────✗ computes ── 9 ────────────┐
    worker 2   gives to 7 ──✗ lost

Who was in the middle of a round gives to the next one what it had given. What a neighbour has heard
of it before stays in that one's model. Who is absent had no gradient to give: it gives its model
anew. All know who is absent from what all have told, and no bell of the epoch before is heard.
"""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import torch

from offbeat.errors import EpochOver
from offbeat.rounds import roll
from offbeat.rounds.bells import Bells
from offbeat.rounds.gossip import Mixed, Rumours
from offbeat.rounds.header import AWAY, LEFT, PAUSED
from offbeat.worlds.base import Channel


class Gossip(Rumours):
    """The rounds of one layout among neighbours."""

    __slots__ = ()

    def _begin_anew(self, epoch: int) -> None:
        """Meet the others who are left, and count as they do."""
        world, place = self._world, f"{self._place}/{epoch}"
        channel = world.channel(place)
        if channel.epoch != epoch:
            raise EpochOver("another worker was lost meanwhile")
        with self._state:
            self._take_back()
            mine = torch.tensor(self._told())
            self._to_ring = []  # it has been told
        all_of = torch.empty(len(channel.members), len(mine), dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        exchange = None if self._ended else self._make(channel)
        with self._state:
            self._call_roll(channel, all_of.tolist())
            if exchange is not None:
                self._exchange = exchange
                self._bells = Bells(world, place)
                given = None if self._given is None else self._given[0].flats
                cast(Mixed, self.merge).regrouped(given)

    def _take_back(self) -> None:
        """Give nothing to a round that was served for others; under lock."""
        if self._given is not None and not self._in_round:
            self.piles.give_back(self._given[0])
            self._given = None
            self._started = self.log.completed

    def _told(self) -> list[int]:
        """How far this worker is, and whether it is there; under lock."""
        presence = self._presence
        if presence == AWAY and not self._told_away:
            presence = 0
        paused = self._roll.pauses == self._pauses  # all have not yet, as far as it knows
        ends_with = -1 if self._ends_with is None else self._ends_with
        return [self.log.completed, int(presence), self._roll.pauses, paused, ends_with]

    def _call_roll(self, channel: Channel, told: list[list[int]]) -> None:
        """Count rounds as all do from here on, and know who is absent; under lock."""
        completed, presences, pauses, paused, ends_with = zip(*told, strict=True)
        for _ in range(max(completed) - self.log.completed):
            self.log.pass_by()
            self.piles.pass_by()
            self._started += 1
        if self._given is not None:  # to the next round, which may have another matrix
            self._given[1].round = self._offset + self.log.completed
        self._ends_with = min((each for each in ends_with if each >= 0), default=None)
        most, absent, over = max(pauses), {}, []
        for rank, presence, times, waits in zip(
            channel.members, presences, pauses, paused, strict=True
        ):
            if presence == PAUSED and (times < most or not waits):
                over.append(rank)  # somebody knows that all have paused
            elif presence in _WORDS:
                absent[rank] = _WORDS[presence]
        self._roll = roll.Roll(len(channel.members))
        self._roll.paused = tuple(over)
        self._roll.call(absent, self.log.completed, most)

    def _say_again(self) -> None:
        """All have told what they are; what was to be rung since is rung now."""
        with self._state, suppress(EpochOver):
            self._stir()


_WORDS = {AWAY: roll.AWAY, PAUSED: roll.PAUSED, LEFT: roll.LEFT}
