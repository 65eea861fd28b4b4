"""What a worker's background does where every gradient comes by itself: it hears entries, in order.

A gradient's turn: the judge says what becomes of it. If it counts, it travels and is added up; and
if the sum is to be an update, it goes into the log. All workers do the same, each at its own time.

If a worker is lost while a gradient travels, its turn is undone, and has not been (revisions.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from offbeat.errors import EpochOver
from offbeat.rounds import entries, roll
from offbeat.rounds.bells import Bells
from offbeat.rounds.engine import Arrival, Engine
from offbeat.rounds.entries import Entry
from offbeat.rounds.exchange import MakeExchange
from offbeat.rounds.judge import Judge, Verdict
from offbeat.rounds.layout import Layout
from offbeat.rounds.one_to_all import FromOneToAll
from offbeat.rounds.pile import Pile
from offbeat.rounds.revisions import Before
from offbeat.rounds.round import Round
from offbeat.rounds.start import Rules
from offbeat.rounds.sums import Mean, Sum
from offbeat.worlds.base import World

GivesUp = Callable[[float, float | None, float], bool]
"""Gets the seconds that a micro-batch has taken so far, those that it still takes, if known, and
those that one usually takes; says whether to leave it, though it is not done."""


class Watches(Protocol):
    """Measures gradients as they come."""

    def see(self, gradient: Sequence[Tensor], samples: float) -> float:
        """Take one, the mean over so many samples; how many are worth being averaged, or 0."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""


class Turns(Engine):
    """The background's half of a queue of gradients."""

    __slots__ = (
        *("_asked_to_end", "_bad", "_base", "_fresh", "_gives_up", "_judge", "_made_by_all"),
        *("_means", "_outcomes", "_recent_s", "_roll", "_sent", "_stopped_at", "_sums", "judged"),
        *("_done", "_handed", "_loads", "_resaid", "_said_again", "_travelled", "_turn", "_unsaid"),
        *("_useful", "watches"),
    )

    def __init__(
        self,
        judge: Judge,
        gives_up: GivesUp,
        world: World,
        name: str,
        layout: Layout,
        rules: Rules,
        **settings: Any,
    ) -> None:
        """`gives_up` says whether a worker that is told to stop does."""
        self._judge = judge
        self._gives_up = gives_up
        self._recent_s: deque[float] = deque(maxlen=16)  # what micro-batches have taken
        self.judged: Callable[[Arrival, float], None] | None = None
        """Hears what has become of a gradient of so many samples; called by the program."""
        self.watches: Watches | None = None
        """Sees every gradient that counts; its numbers go into checkpoints."""
        self._useful = 0.0  # what it has said last
        self._roll = roll.Roll(world.size)
        self._sums = [Sum(world.size) for _ in range(judge.sums)]
        self._means = [Mean(layout) for _ in range(judge.sums)] if judge.averages else []
        self._base = 0  # the version in which the log began
        self._bad: list[int] = []  # of its rounds, those that are no updates
        self._sent: Pile | None = None  # its gradient, which has had no turn yet
        self._outcomes: list[tuple[Arrival, float]] = []  # that the program has not heard of
        self._fresh = True  # whether the program goes on from the newest parameters
        self._made_by_all = 0  # steps of all workers that no round tells of
        self._asked_to_end = False  # somebody has
        self._stopped_at = 0  # rounds that a program must know, or leave what it computes
        self._loads = 0  # checkpoints that were loaded
        self._done = 0  # entries that have had their turn
        self._travelled = 0  # of them, gradients that were exchanged
        self._turn: Entry | None = None  # whose turn it is
        self._unsaid: list[Entry] = []  # what this worker has to say, or has said and not heard yet
        self._said_again: tuple[Bells, list[Entry]]  # of these, those to be said in a new epoch
        self._resaid = False  # somebody sees to that
        self._handed: list[Tensor] | None = None  # a gradient that this worker has missed
        one_to_all = cast(MakeExchange, FromOneToAll)  # no exchange of rounds, but of gradients
        super().__init__(world, name, layout, rules, **{**settings, "exchange": one_to_all})

    def begin(self) -> None:
        """Start the background: the others' gradients may come from here on."""
        for rank in set(range(self._world.size)) - set(self._began_among):  # lost before
            self._hear_presence(Entry(entries.LEFT, rank))
        super().begin()

    def _begin_backgrounds(self) -> None:
        """Under lock, in an epoch that is not the first."""
        self._said_again, self._resaid = (self._bells, list(self._unsaid)), False
        self._activities = [self._spawn(f"gradients of {self._name}", self._serve)]

    def _version(self, taken: int) -> int:
        """The updates in parameters that have so many rounds of the log."""
        return self._base + taken - bisect_left(self._bad, taken)

    def _serve(self) -> None:
        while not self._ended:
            self._turn = Entry.read(self._bells.told())
            self._take_turn(self._turn)
            self._world.round_over()
            self._keep_short()

    @property
    def makes_rounds(self) -> bool:
        """Whether it is somebody's turn: a gradient may travel."""
        return self._turn is not None and not self._over

    def _take_turn(self, entry: Entry) -> None:
        """It is this entry's turn: do what follows from it."""
        if entry.why == entries.GRADIENT:
            with self._state:
                self._await_room()
            self._hear_gradient(entry)
        else:
            self._hear_presence(entry)
        with self._state:
            self._turn = None
            self._done += 1
            if entry.why == entries.GRADIENT:  # whatever becomes of it
                self._given_by[entry.worker] += entry.samples
                self._marks[entry.worker] = entry.mark
            if entry.worker == self._world.rank:
                self._unsaid.pop(0)

    def _tell(self, entry: Entry) -> None:
        """Say something to all; in the next epoch, if this one is over before it is heard."""
        with self._state:
            self._unsaid.append(entry)
            bells = None if self._over else self._bells
            _, before = self._said_again
            if before:  # in order: what comes before it has not been said yet
                before.append(entry)
                bells = None
        if bells is not None:
            with suppress(EpochOver):
                bells.tell(entry.written())

    def _hear_gradient(self, entry: Entry) -> None:
        """Have it judged, and what follows done."""
        mine = entry.worker == self._world.rank
        pile = self._sent if mine else None
        if entry.bad is not None:
            self._note_steps(entry)
            self._log_bad(entry, entry.bad, pile)
            self._had_its_turn(entry, Verdict(), dropped=False)
            return
        before = Before(self._judge) if self._world.survives else None
        if entry.useful:  # one worker's word, heard by all: they need not measure the same bits
            self._judge.learn(entry.useful)
        late = self._judge.delay(entry.ticket) > 0
        verdict = self._judge.judge(entry.ticket)
        began_s = self._world.now()
        if verdict.into is not None:
            if pile is None:
                with self._state:
                    pile = self.piles.nothing()
            elif self._means:
                if before is not None:
                    before.keep(self._means[verdict.into], pile)
                self._means[verdict.into].add(pile)
            self._travel(pile, entry, before)
            if self.watches is not None:
                share = entry.samples / pile.unit
                mean = [body / share for body in pile.flats.bodies]
                self._useful = self.watches.see(mean, entry.samples)
            with self._state:
                self._sums[verdict.into].add(entry, pile, self.piles)
        self._note_steps(entry)
        self._carry_out(verdict, began_s)
        self._had_its_turn(entry, verdict, dropped=verdict.into is None, late=late)

    def _travel(self, pile: Pile, entry: Entry, before: Before | None) -> None:
        """Have a worker's gradient in the pile; if that ends with the epoch, undo its turn."""
        mine = entry.worker == self._world.rank
        if self._handed is not None:
            if not mine:
                torch._foreach_copy_(list(pile.flats.bodies), self._handed)
                pile.blank = False
            self._handed = None
        elif self._world.size > 1:
            try:
                cast(FromOneToAll, self._exchange).exchange(pile, entry.worker)
            except EpochOver:
                assert before is not None, "an epoch ends only where that is survived"
                before.restore(self._judge)
                if not mine:
                    with self._state:
                        self.piles.give_back(pile)
                raise
        self._travelled += 1
        if before is not None:
            self._keep_gradient(pile)

    def _keep_gradient(self, pile: Pile) -> None:
        """Have the latest one, for who may have missed it."""
        if not self._latest:
            self._latest = [torch.empty_like(body) for body in pile.flats.bodies]
        torch._foreach_copy_(self._latest, list(pile.flats.bodies))

    def _note_steps(self, entry: Entry) -> None:
        self._made_by_all += entry.made
        self._asked_to_end |= entry.ends

    def _carry_out(self, verdict: Verdict, began_s: float) -> None:
        """Make an update of the first sum, if the verdict says so, and have the next one there."""
        if not verdict.update and verdict.then != "next":
            return
        sums, judge = self._sums, self._judge
        with self._state:
            if verdict.update:
                number = self._offset + self.log.completed
                told = sums[0].told(number, judge.version, verdict.divisor, verdict.scale)
                kept = sums[0].copied(self.piles) if verdict.then == "keep" else sums[0].pile
                self._append(told, kept, began_s)
                if self._world.rank in verdict.stopped:
                    self._stopped_at = self.log.completed
            if verdict.then != "keep":
                self._empty(verdict)

    def _empty(self, verdict: Verdict) -> None:
        """The first sum begins anew, perhaps as the second one; under lock."""
        first = self._sums[0]
        assert not first.is_new, "a judge forgets what no round has held"
        if not verdict.update and first.pile is not None:
            self.piles.give_back(first.pile)
        first.pile = None
        if self._means:
            self._means[0].clear()
        if verdict.then == "next":
            self._sums.reverse()
            self._means.reverse()

    def _append(self, told: Round, kept: Pile | None, began_s: float) -> None:
        """Under lock."""
        made, self._made_by_all = self._made_by_all, 0
        absent = list(self._roll.absent.values())
        told = told.but(
            made=made, ends=self._asked_to_end, here=self._world.size - absent.count(roll.LEFT)
        )
        self.log.append(told, kept, began_s=began_s, ended_s=self._world.now())
        self._state.notify_all()

    def _log_bad(self, entry: Entry, bad: int, pile: Pile | None) -> None:
        """A gradient that is not finite is a round that changes nothing, or makes all raise."""
        one = Sum(self._world.size)
        with self._state:
            one.add(entry, pile or self.piles.nothing(), self.piles)
            number = self._offset + self.log.completed
            told = one.told(number, entry.version + 1, entry.samples, 1.0)
            self._bad.append(self.log.completed)
            self._append(told.but(bad=(entry.worker, bad)), one.pile, self._world.now())

    def _had_its_turn(
        self, entry: Entry, verdict: Verdict, *, dropped: bool, late: bool = False
    ) -> None:
        if entry.worker != self._world.rank:
            return
        with self._state:
            if dropped and self._sent is not None:
                self.piles.give_back(self._sent)
            self._sent = None
            arrival: Arrival = "dropped" if dropped else "late" if late else "on time"
            self._outcomes.append((arrival, entry.samples if dropped else 0.0))
            # A round that makes the program raise, or end, must not be overlooked for long: others
            # have ended, and may wait for this worker in another attachment.
            bad = bool(self._bad and self._bad[-1] >= self.log.taken)
            self._fresh = verdict.fresh or bad or self.log.ends
            self._state.notify_all()

    def _hear_presence(self, entry: Entry) -> None:
        with self._state:
            self._roll.hear(entry.why, 0, entry.worker)
            self._made_by_all += entry.made
        if entry.why == entries.BACK:
            self._judge.left.discard(entry.worker)
        if entry.why == entries.LEFT:
            self._judge.left.add(entry.worker)
            for verdict in self._judge.leaves(entry.worker):
                self._carry_out(verdict, self._world.now())
        with self._state:
            if self._roll.over and self._made_by_all:
                self._log_rest()
            self._paused = self._roll.paused
            self._ended = self._roll.over
            self._state.notify_all()

    def _log_rest(self) -> None:
        """Have schedules hear of steps whose gradients were dropped after the last update."""
        pile, nobody = self.piles.nothing(), (0.0,) * self._world.size
        for body in pile.flats.bodies:
            body.zero_()
        number, unused = self._offset + self.log.completed, (False,) * len(pile.used)
        nothing = Round(number, pile.flats, samples_by_rank=nobody, divisor=0.0, used=unused)
        self._bad.append(self.log.completed)
        self._append(nothing, pile, self._world.now())
