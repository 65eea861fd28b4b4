"""Lockstep among neighbours: in a round nobody waits but for those whom it hears in the graph.

There is no header of all workers, so nobody knows how far the others are, nor that they are there.
A worker that is slow is noticed by its neighbours in this round, by theirs in the next:

    worker 0   round 7 ─┐ round 8 ─┐ round 9 ───────────────────┐
    worker 1   round 7 ─┐ round 8 ────────────────────┐ round 9 ┐      waits for 2
    worker 2   computes ──────────────────────────────┐ round 8 ┐

Who is away, pauses or has left rings a bell for all to hear (roll.py). Whoever is in a round while
somebody is absent rings, too, and those who are absent make all rounds that are wanted so: with the
model that they have, and without a gradient. Every worker makes every round, so that the weights of
a round are those of the graph, whoever is there.

A worker's model changes when a round ends, whoever has made it: the next one needs it. The program
has it in its parameters when it comes for the round. So the log only tells what was in them.

To end together, a worker says in its header with which round all shall: the first that all can know
of it before.

gossip_lost.py is what happens when a worker is lost, or joins.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Protocol, cast

from offbeat.errors import EpochOver
from offbeat.rounds import roll, told
from offbeat.rounds.engine import Engine
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED, Shares
from offbeat.rounds.layout import Flats
from offbeat.rounds.neighbours import Neighbours
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Merge, Round
from offbeat.rounds.state import GRACE_S
from offbeat.worlds.base import Channel


class Mixed(Merge, Protocol):
    """What a worker sends, and what it does with what it hears: see merges/mix.py."""

    def send(self, into: Flats, moved: bool) -> int | None:
        """Write what the neighbours get, with one's own step in it or not; what was not finite."""

    def receive(self, mixed: Flats) -> None:
        """Make one's model of what all neighbours have sent."""

    def regrouped(self, given: Flats | None) -> None:
        """The members are others; what this one had `given` to a round is given again."""

    def take_in(self, channel: Channel, new: Sequence[int], mine: bool) -> None:
        """Have those who are new, perhaps this worker, begin with the mean of the others."""


class Rumours(Engine):
    """The rounds of one layout among neighbours, as long as nobody is lost."""

    __slots__ = ("_ends_with", "_pauses", "_roll", "_to_ring")

    def begin(self) -> None:
        """Start the backgrounds: the others' rounds may come from here on."""
        self._roll = roll.Roll(len(self._began_among))
        self._pauses = 0  # how often all had paused, when this worker did so last
        self._to_ring: list[tuple[str, int]] = []  # what the messenger has to ring
        self._ends_with: int | None = None  # the number of the last round
        super().begin()

    @property
    def _graph(self) -> Neighbours:
        return cast(Neighbours, self._exchange)

    @property
    def known_share(self) -> float:
        """Of all workers, how many this one hears of in a round."""
        graph = self._graph.graph
        return graph.heard_by(self._world.rank) / graph.size

    @property
    def drifts(self) -> bool:
        """Every own step is a round."""
        return False

    # --- one round ---------------------------------------------------------------------------

    def _set_aside(self, arrives: bool = False) -> None:
        """Take the pile, and what goes to the neighbours; under lock."""
        pile = self.piles.take()
        pile.bad_parameter = cast(Mixed, self.merge).send(pile.flats, bool(pile.samples))
        pile.written = True
        number = self._offset + self._started
        if self._ends and self._ends_with is None:
            self._ends_with = number + self._graph.graph.flood_rounds - 1
        self._notes = (0.0 if self._ends_with is None else self._ends_with + 1.0,)
        self._given = pile, self._share_of(pile, self._started, keeps=False)
        self._made = 0
        self.gave_s = self._world.now()

    def _log_round(
        self, round: int, pile: Pile, shares: Shares, began_s: float, ended_s: float
    ) -> None:
        """Make a model of what was heard, and append the round."""
        cast(Mixed, self.merge).receive(pile.flats)
        number, mine = self._offset + round, pile.bad_parameter
        asked = [int(note[0]) - 1 for note in shares.notes if note[0]]
        with self._state:
            self._ends_with = min(asked, default=self._ends_with)
            completed = told.round_of(shares, number, 1.0).but(
                here=len(self._world.members) - list(self._roll.absent.values()).count(roll.LEFT),
                bad=None if mine is None else (self._world.rank, mine),
                made=self._world.size,  # a tick is a round: nobody knows who was in it
                ends=self._ends_with is not None and number >= self._ends_with,
            )
            self.log.append(completed, pile, began_s=began_s, ended_s=ended_s)
            self._in_round = False
            self._state.notify_all()

    def _begin_taking(self) -> bool:
        """The program has the newest model in its parameters before it hears of rounds."""
        super()._begin_taking()
        return True

    def newest(self) -> Generator[Round, None, None]:
        """Wait for nothing but a round that the background is in; yield what is not taken."""
        if self._joining:  # which may begin another one at any time
            return
        with self._state:
            self._state.wait_for(lambda: not self._serving)
        yield from self._take(0.0)

    # --- who is there ------------------------------------------------------------------------

    def _run_in_lockstep(self) -> None:
        """The program comes to its next round, and runs it; again, if a worker is lost in it."""
        while not self._run_once(None):
            pass

    def _run_once(self, number: int | None) -> bool:
        """The program runs its next round, or that one, if it still is; False if it must again."""
        with self._state:
            self._state.wait_for(lambda: not (self._serving or self._folding or self._over))
            following = self.log.completed
            if number not in (None, following):
                return True
            self._in_round = number is None
            asks = self._in_round and bool(self._roll.absent)
            self._running += 1
        try:
            if asks:
                self._ring_for(following)
            self._take_part(following)
        except EpochOver:
            return number is not None
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()
        return True

    def _ring_for(self, number: int) -> None:
        self._bells.want(number + 1)

    def _answer_bells(self) -> None:
        """Hear who is absent; take part in rounds while the program is away."""
        while not self._roll.over:
            why, rounds, rank = self._bells.hear()
            with self._state:
                self._roll.hear(why, rounds, rank)
                number = self.log.completed
                asks = self._in_round and why != roll.WANTED and bool(self._roll.absent)
                self._state.notify_all()
            if asks:
                self._ring_for(number)
            while self._may_serve():
                try:
                    self._take_part(self.log.completed)
                finally:
                    with self._state:
                        self._serving = False
                        self._state.notify_all()
                self._keep_short()

    def _may_serve(self) -> bool:
        with self._state:
            wanted = self._presence == AWAY and self._is_behind()
            # The program may have come and made the round, and be away again.
            self._serving = wanted and self._stays_away() and self._is_behind()
            return self._serving

    def _is_behind(self) -> bool:
        """Whether rounds are wanted that this worker has not made; under lock."""
        return self._roll.rounds > self.log.completed

    def _carry_messages(self) -> None:
        """Ring, in order, for a program that never waits for the control plane."""
        while not (self._ended or self._over):
            with self._state:
                self._state.wait_for(
                    lambda: self._stirred or self._ended or self._over, until=self._deadline()
                )
                self._stirred, since = False, self._away_since
                if since is not None and self._world.now() >= since + GRACE_S:
                    if not self._told_away:
                        self._to_ring.append((roll.AWAY, self.log.completed))
                    self._told_away = True
                ringing, self._to_ring = self._to_ring, []
            for why, rounds in ringing:
                self._bells.ring(why, rounds)

    def _come_back(self) -> None:
        with self._state:
            self._presence = HERE
            self._away_since = None
            if self._told_away:
                self._to_ring.append((roll.BACK, self.log.completed))
            self._told_away = False
            self._steps = max(self._steps, self._started)
            self._stir()

    # --- pausing and leaving -------------------------------------------------------------------

    def _served(self, presence: int) -> Generator[Round, None, None]:
        with self._state:
            self._state.wait_for(lambda: not (self._serving or self._folding))
            self._presence, self._pauses = presence, self._roll.pauses
            why = roll.LEFT if presence == LEFT else roll.PAUSED
            self._to_ring.append((why, self.log.completed))
            self._stir()

        def over() -> bool:
            paused = presence == PAUSED and self._roll.pauses > self._pauses
            return not self._over and (self._roll.over or paused)

        yield from self._take(0.0)
        while True:
            self._give_if_asked()
            with self._state:
                self._state.wait_for(lambda: self._is_behind() or self._is_asked() or over())
                number, behind = self.log.completed, self._is_behind()
                if not behind and over():
                    self._paused = self._roll.paused
                    self._ended = self._roll.over
                    self._state.notify_all()
                    return
            if behind:
                self._run_once(number)
            yield from self._take(0.0)

    def _pause_key(self) -> str:
        return f"{self._place}/resume/{self._roll.pauses}"

    def _join_backgrounds(self) -> None:
        with suppress(EpochOver):
            self._bells.want_nothing()
        for activity in self._activities:
            activity.join()
        with self._state:
            self._state.wait_for(lambda: not self._over)
