"""Every gradient comes by itself, and nobody waits: a queue of them, the same for all workers.

A worker that has a gradient says so to all, by an entry (entries.py). All hear the entries in one
order, and ask their judges (judge.py), which come to the same verdicts: does it count, do the
parameters change now? If it counts, the gradient travels, from its worker to all (one_to_all.py).
An update is a round, and goes into the log.

    worker 0   compute ──┐ says so, hears its own entry ─┐ applies 3, 4 ── compute ──
    worker 1   compute ──────────────────────────────────────────────┐ says so ──
               background: hears 3, 4, and receives, and logs them

A program waits until its own gradient has had its turn, which is no longer than the gradients
before it need to travel; for no other worker. So being away costs nobody anything, either: the
background goes on receiving.

The *version* of a worker's parameters is how many updates they have. It stands in the entry, and so
all know the delay of a gradient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from math import inf
from sys import maxsize
from typing import Any, cast

from offbeat.errors import ClosedError
from offbeat.rounds import entries, header, roll
from offbeat.rounds.engine import Arrival, Engine
from offbeat.rounds.entries import Entry
from offbeat.rounds.exchange import MakeExchange
from offbeat.rounds.judge import Judge, Verdict
from offbeat.rounds.layout import Layout
from offbeat.rounds.one_to_all import FromOneToAll
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Round
from offbeat.rounds.start import Rules
from offbeat.rounds.sums import Mean, Sum
from offbeat.worlds.base import World

GivesUp = Callable[[float, float | None, float], bool]
"""Gets the seconds that a micro-batch has taken so far, those that it still takes, if known, and
those that one usually takes; says whether to leave it, though it is not done."""


class Queue(Engine):
    """The gradients of one layout, in the order of their entries."""

    __slots__ = (
        *("_asked_to_end", "_bad", "_base", "_fresh", "_gives_up", "_judge", "_made_by_all"),
        *("_means", "_outcome", "_recent_s", "_roll", "_sent", "_stopped_at", "_sums", "judged"),
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
        self._roll = roll.Roll(world.size)
        self._sums = [Sum(world.size) for _ in range(judge.sums)]
        self._means = [Mean(layout) for _ in range(judge.sums)] if judge.averages else []
        self._base = 0  # the version in which the log began
        self._bad: list[int] = []  # of its rounds, those that are no updates
        self._sent: Pile | None = None  # its gradient, which has had no turn yet
        self._outcome: tuple[Arrival, float] | None = None  # of the latest one
        self._fresh = True  # whether the program goes on from the newest parameters
        self._made_by_all = 0  # steps of all workers that no round tells of
        self._asked_to_end = False  # somebody has
        self._stopped_at = 0  # rounds that a program must know, or leave what it computes
        one_to_all = cast(MakeExchange, FromOneToAll)  # no exchange of rounds, but of gradients
        super().__init__(world, name, layout, rules, **{**settings, "exchange": one_to_all})

    def begin(self) -> None:
        """Start the background: the others' gradients may come from here on."""
        self._activities = [self._world.spawn(f"gradients of {self._name}", self._serve)]

    def _version(self, taken: int) -> int:
        """The updates in parameters that have so many rounds of the log."""
        return self._base + taken - bisect_left(self._bad, taken)

    # --- the program ---------------------------------------------------------------------------

    def contribute(
        self,
        add: Callable[[Pile], None],
        *,
        arrive: bool = True,
        delay: int = 0,
        rates: tuple[float, ...] = (),
        notes: tuple[float, ...] = (),
        seconds: float = 0.0,
        drop_late: bool = False,
    ) -> Arrival:
        """Have `add` put a gradient on the pile, and say to all that the pile is there, or not.

        `results` waits until it has had its turn, and tells what has become of it.
        """
        with self._state:
            if self._presence in (header.PAUSED, header.LEFT):
                raise ClosedError(f"a contribution to {self._name!r} after leaving it")
            pile = self.piles.growing
            before = pile.samples
            add(pile)
            self._rates = rates
            self._steps += 1
            self._made += pile.samples > before
            if pile.oldest_round is None:
                pile.oldest_round = self.log.taken
        if arrive:
            self._send()
        return "on time"

    def _send(self) -> None:
        """Say to all that the pile is there, if anything is on it."""
        if not self.piles.samples:
            return
        with self._state:
            pile = self.piles.take()
            assert pile.oldest_round is not None
            version = self._version(pile.oldest_round)
            made, self._made = self._made, 0
            self._sent = pile
            now = self._world.now()
            seconds, self.gave_s = now - self.gave_s, now
        pile.look_for_bad()
        entry = Entry(
            why=entries.GRADIENT,
            worker=self._world.rank,
            version=version,
            samples=pile.samples,
            seconds=seconds,
            micro_batches=pile.micro_batches,
            made=made,
            ends=self._ends,
            bad=pile.bad_parameter,
            rates=self._rates,
            unused=tuple(number for number, used in enumerate(pile.used) if not used),
        )
        self._bells.tell(entry.written())

    def results(self, *, delay: int | None = None) -> Generator[Round, None, None]:
        """Wait until this worker's gradient has had its turn; yield every round not taken.

        Or none, if it is to go on from the parameters that it has.
        """
        began = self._world.now()
        with self._state:
            self._await_turn()
            fresh, waited_s = self._fresh, self._world.now() - began
        self._tell_outcome()
        if fresh:
            yield from self._take(waited_s)

    def _await_turn(self) -> None:
        """Under lock."""
        if self._sent is not None:
            self._awaits = maxsize  # so the background does not wait for this program
            self._state.notify_all()
            self._state.wait_for(lambda: self._sent is None)
            self._awaits = 0

    # --- stopping ------------------------------------------------------------------------------

    @property
    def _stop_asked(self) -> bool:
        """Whether what the program computes would come too late, as the judge has said."""
        return self._stopped_at > self.log.taken

    def compute_until(self, began_s: float, ends_s: float) -> bool:
        """Let a modelled device compute until then, or until it is told to stop; say which."""
        now = self._world.now
        with self._state:
            if self._state.wait_for(lambda: self._stop_asked, until=ends_s):
                if self._gives_up(now() - began_s, max(ends_s - now(), 0.0), self._usual_s):
                    return True
                self._state.wait_for(lambda: False, until=ends_s)
            self._recent_s.append(now() - began_s)
        return False

    def stops(self, began_s: float) -> bool:
        """Say whether a program is to leave a micro-batch that it is in the middle of."""
        if not self._stop_asked:
            return False
        return self._gives_up(self._world.now() - began_s, None, self._usual_s)

    @property
    def _usual_s(self) -> float:
        """What a micro-batch has taken lately; for ever, if none has ended yet."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else inf

    def _tell_outcome(self) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is not None and self.judged is not None:
            self.judged(*outcome)

    # --- the background ------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended:
            entry = Entry.read(self._bells.told())
            if entry.why == entries.GRADIENT:
                with self._state:
                    self._await_room()
                self._hear_gradient(entry)
            else:
                self._hear_presence(entry)
            self._keep_short()

    def _hear_gradient(self, entry: Entry) -> None:
        """Have it judged, and what follows done."""
        mine = entry.worker == self._world.rank
        pile = self._sent if mine else None
        self._made_by_all += entry.made
        self._asked_to_end |= entry.ends
        if entry.bad is not None:
            self._log_bad(entry, entry.bad, pile)
            self._had_its_turn(entry, Verdict(), dropped=False)
            return
        late = self._judge.delay(entry.ticket) > 0
        verdict = self._judge.judge(entry.ticket)
        began_s = self._world.now()
        if verdict.into is not None:
            if pile is None:
                with self._state:
                    pile = self.piles.nothing()
            elif self._means:
                self._means[verdict.into].add(pile)
            if self._world.size > 1:
                cast(FromOneToAll, self._exchange).exchange(pile, entry.worker)
            with self._state:
                self._sums[verdict.into].add(entry, pile, self.piles)
        self._carry_out(verdict, began_s)
        self._had_its_turn(entry, verdict, dropped=verdict.into is None, late=late)

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
        self.log.append(told, kept, began_s, self._world.now())
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
            self._outcome = arrival, entry.samples if dropped else 0.0
            # A round that makes the program raise must not be overlooked for long.
            self._fresh = verdict.fresh or bool(self._bad and self._bad[-1] >= self.log.taken)
            self._state.notify_all()

    # --- pausing and leaving -------------------------------------------------------------------

    def _hear_presence(self, entry: Entry) -> None:
        with self._state:
            self._roll.hear(entry.why, 0, entry.worker)
        if entry.why == entries.LEFT:
            for verdict in self._judge.leaves(entry.worker):
                self._carry_out(verdict, self._world.now())
        with self._state:
            self._paused = self._roll.paused
            self._ended = self._roll.over
            self._state.notify_all()

    def _served(self, presence: int) -> Generator[Round, None, None]:
        leaves = presence == header.LEFT
        with self._state:
            self._presence, pauses = presence, self._roll.pauses
        if leaves:
            self._send()  # what is left on the pile
        why = entries.LEFT if leaves else entries.PAUSED
        self._bells.tell(Entry(why, self._world.rank).written())

        def over() -> bool:
            return self._ended or (not leaves and self._roll.pauses > pauses)

        done = False
        while not done:
            with self._state:
                self._state.wait_for(lambda: bool(self.log) or over())
                done = over()
            yield from self._take(0.0)
        self._tell_outcome()

    def _pause_key(self) -> str:
        return f"{self._place}/resume/{self._roll.pauses}"

    def _come_back(self) -> None:
        with self._state:
            self._presence = header.HERE
            if self._away_since is not None:  # it has not computed meanwhile
                self.gave_s += self._world.now() - self._away_since
            self._away_since = None
            self._state.notify_all()

    def _join_backgrounds(self) -> None:
        for activity in self._activities:
            activity.join()

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`."""
        return {
            **super().state_dict(),
            "judge": self._judge.state_dict(),
            "sums": [each.state_dict() for each in self._sums],
            "means": [each.state_dict() for each in self._means],
            "made_by_all": self._made_by_all,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rounds of a checkpoint; before the first contribution."""
        super().load_state_dict(state)
        with self._state:
            self._judge.load_state_dict(state["judge"])
            self._base = self._judge.version
            for each, saved in zip(self._sums, state["sums"], strict=True):
                each.load_state_dict(saved, self.piles)
            for mean, saved in zip(self._means, state["means"], strict=True):
                mean.load_state_dict(saved)
            self._made_by_all = state["made_by_all"]
