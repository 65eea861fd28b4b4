"""Among neighbours the members change: all call the roll, and go on from one number.

Neighbours are some rounds apart, and no two have the same result of one. So there is nothing to be
handed on. When the epoch is over, those who are left tell how far they are, and all count on from
the most:

    worker 0   round 7 ─┐ gives to 8 ──✗ 9: gives the same again ──┐
    worker 1   round 7 ─┐ round 8 ─────✗ computes ── 9 ────────────┐
    worker 2   gives to 7 ──✗ lost

Who was in the middle of a round gives to the next one what it had given. What a neighbour has heard
of it before stays in that one's model. Who is absent had no gradient to give: it gives its model
anew. All know who is absent from what all have told, and no bell of the epoch before is heard.

A worker that joins is given the mean of the others' models when all meet, which so stays what it
is. It is in the graph at once, as one that is absent: it makes all rounds, without a gradient. When
it has the rest of its state (joining.py), it is back.

Nobody hears all that a worker gives. So each says itself, after every step and every round of its
own, how much it has given to no round yet, and which of its data it has given: what is lost with
it, and what is dealt again (data/again.py).
"""

from __future__ import annotations

from contextlib import suppress
from typing import cast

import torch

from offbeat.errors import EpochOver
from offbeat.rounds import roll
from offbeat.rounds.bells import Bells
from offbeat.rounds.gossip import Mixed, Rumours
from offbeat.rounds.header import AWAY, LEFT, PAUSED, Shares


class Gossip(Rumours):
    """The rounds of one layout among neighbours."""

    __slots__ = ()

    def _begin_anew(self, epoch: int) -> None:
        """Meet the others who are left, and count as they do."""
        world, place = self._world, f"{self._place}/{epoch}"
        channel = world.channel(place, epoch=epoch)
        with self._state:
            self._take_back()
            mine = torch.tensor(self._told())
            self._to_ring = []  # it has been told
        all_of = torch.empty(len(channel.members), len(mine), dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        told = dict(zip(channel.members, all_of.tolist(), strict=True))
        new = [rank for rank, (completed, *_) in told.items() if completed < 0]
        knows = {rank: each for rank, each in told.items() if rank not in new}
        if not knows:
            raise self._nobody_has_state()
        self._tell_new(channel, list(knows), new)
        # Perhaps only some know that already: a joiner finds nobody then.
        over = all(presence == LEFT for _, presence, *_ in knows.values())
        if new and not over:
            cast(Mixed, self.merge).take_in(channel, new, world.rank in new)
        exchange = None if over else self._make(channel)
        with self._state:
            self._call_roll(knows if over else told)
            self._ended |= over and self._lacks
            self._note_lacking([] if over else new)
            if exchange is not None:
                self._exchange = exchange
                self._bells = Bells(world, place)
                given = None if self._given is None else self._given[0].flats
                cast(Mixed, self.merge).regrouped(given)

    # --- what is lost --------------------------------------------------------------------------

    def _word(self) -> str:
        """What this worker has given to no round that it has made, and which data it has given.

        Not all hear what it gives: so it says that itself.
        """
        turn, batch = self._marks[self._world.rank]
        return f"{self.kept_samples!r} {turn} {batch}"

    def _lost_with(self, rank: int, word: str) -> float:
        kept, turn, batch = word.split()
        self._marks[rank] = int(turn), int(batch)
        return float(kept)

    def _note_given(self, shares: Shares) -> None:
        super()._note_given(shares)
        if shares.samples[self._world.rank]:
            self._leave_word()

    # --- the roll ------------------------------------------------------------------------------

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
        completed = -1 if self._lacks else self.log.completed
        return [completed, int(presence), self._roll.pauses, paused, ends_with]

    def _call_roll(self, told: dict[int, list[int]]) -> None:
        """Count rounds as all do from here on, and know who is absent; under lock."""
        completed, presences, pauses, paused, ends_with = zip(*told.values(), strict=True)
        for _ in range(max(completed) - self.log.completed):
            self.log.pass_by()
            self.piles.pass_by()
            self._started += 1
        if self._given is not None:  # to the next round, which may have another matrix
            self._given[1].round = self._offset + self.log.completed
        self._ends_with = min((each for each in ends_with if each >= 0), default=None)
        most, absent, over = max(pauses), {}, []
        for rank, presence, times, waits in zip(told, presences, pauses, paused, strict=True):
            if presence == PAUSED and (times < most or not waits):
                over.append(rank)  # somebody knows that all have paused
            elif presence in _WORDS:
                absent[rank] = _WORDS[presence]
        self._roll = roll.Roll(len(told))
        self._roll.paused = tuple(over)
        self._roll.call(absent, self.log.completed, most)

    def _say_again(self) -> None:
        """All have told what they are; what was to be rung since is rung now."""
        with self._state, suppress(EpochOver):
            self._stir()


_WORDS = {AWAY: roll.AWAY, PAUSED: roll.PAUSED, LEFT: roll.LEFT}
