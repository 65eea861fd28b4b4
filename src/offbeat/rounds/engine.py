"""The engine: round after round, from arrivals to the log.

A round starts (start.py), takes what every worker's pile holds at that moment, be it fresh, late or
nothing, exchanges it (exchange.py) and appends the result to the log (log.py), on every worker. The
worker's program only adds to its pile and takes results; its background does the rest.

    worker 0   compute ──┐ on time: arrives, starts round 7 ────┐ applies 7
    worker 1   compute ──────┐ on time: waits ──────────────────┐ applies 7
    worker 2   compute ──────────────────────────────────────────────┐ late: adds to its pile,
               background takes part in round 7 with what was there    applies 7, goes on

The log is *replicated*: every worker takes every round, once and in order. So replicas that apply
them stay bit-identical, however late some are.

All that workers must agree on for round r they know from the header of round r-1: who is still
active, who is a candidate, who is *due* (its gradient would become too stale by missing round r).

A worker is *here*, *away* (in a collective of its own, evaluating, saving), *paused* (all make a
checkpoint) or has *left*. Whoever is not here holds up nobody: its background gives what the pile
holds. The round in which all have left is the last.

With `at_boundary`, a round that has started takes a worker's pile only between two micro-batches:
when the program hands it over, or waits. The program need not wait: it hands over, and goes on.

    worker 0   compute ──┐ ready ─ compute ──┐ hands over, applies 6, goes on ───────────
    worker 1   compute ──────────────┐ ready: round 7 starts; hands over, applies 6 ─────
               background                    └── exchange of 7 ──┘

With `at_arrival`, a worker sets its pile aside when it arrives, and goes on at once. The next round
that starts takes that; who has not arrived gives nothing to it, and is not disturbed.

    worker 0   compute ──┐ arrives ─ compute ─────────── applies 7 when it likes ────────
    worker 1   compute ──────┐ arrives: round 7 starts ── compute ───────────────────────
    worker 2   compute ────────────────── gives nothing ────┐ arrives: for round 8 ──────

In lockstep there is nothing to wait for but the exchange, so the program itself runs the round, and
the background only where the program is away (bells.py).

This file is what a program does in its loop. presence.py is what it does elsewhere, background.py
what its backgrounds do, service.py what they all share, under one lock, and members.py what happens
when a worker is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict
from math import inf
from typing import Literal

from offbeat.errors import ClosedError
from offbeat.rounds.agreement import agree
from offbeat.rounds.exchange import MakeExchange, SumOverAll
from offbeat.rounds.header import HERE, LEFT, PAUSED
from offbeat.rounds.layout import Layout
from offbeat.rounds.members import Members
from offbeat.rounds.pile import Pile
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Round
from offbeat.rounds.start import Measured, Rules
from offbeat.worlds.base import World

Arrival = Literal["on time", "late", "dropped", "abandoned"]


class Engine(Members):
    """The rounds of one layout, from the first to the last, as a worker's program sees them."""

    __slots__ = ()

    def __init__(
        self,
        world: World,
        name: str,
        layout: Layout,
        rules: Rules,
        *,
        notes: int = 0,
        rates: int = 0,
        choose: Callable[[Measured], int] | None = None,
        exchange: MakeExchange = SumOverAll,
        begin: bool = True,
    ) -> None:
        """Without `begin`, that is left to the caller, who has more to set up before."""
        Quorum.of(rules.quorum, world.size)
        Quorum.of(rules.period_quorum, world.size, "period_quorum")
        # Not the name: a name may be used again, or be another one on some workers.
        place = f"rounds/{next(world.numbers)}"
        settings = {
            rule.replace("quorum", "the quorum"): str(it) for rule, it in asdict(rules).items()
        }
        tensors = [
            f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}"
            for name, tensor in zip(layout.names, layout.parameters, strict=True)
        ]
        agree(world, place, {"the name": name, **settings, "tensors": tensors})
        super().__init__(world, name, place, layout, rules, notes, rates, choose, exchange)
        if begin:
            self.begin()

    @property
    def lockstep(self) -> bool:
        """Whether everybody waits for everybody in every round."""
        return self._rules.lockstep

    @property
    def repeats(self) -> bool:
        """Whether a round can be made again, if a worker is lost in the middle of it."""
        return self._exchange.repeats

    @property
    def known_share(self) -> float:
        """Of all workers, how many this one hears of in a round."""
        return 1.0

    @property
    def drifts(self) -> bool:
        """Whether workers that make own steps make several between two rounds."""
        return True

    @property
    def even(self) -> bool:
        """Whether workers come to every round after as many steps."""
        return self._rules.even

    # --- contributing ----------------------------------------------------------------------

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
        """Have `add` put a gradient of the newest taken parameters on the pile, and arrive or not.

        Does not wait. It is late if a round has started since this worker went on to compute it;
        `at_boundary`, if more rounds than `delay` have started since those parameters. With
        `drop_late` it is then not added. With a `delay`, and not `at_boundary`, the others hear of
        the arrival when `results` is through, or when the round before ends, if that is later: so
        that the background does not work while the program applies the round before. `at_arrival`,
        nothing is late, and `arrive` follows.
        """
        with self._state:
            if self._presence in (PAUSED, LEFT):
                raise ClosedError(f"a contribution to {self._name!r} after leaving it")
            limit = self._rules.max_staleness_rounds
            # Only a worker that was away can have come to that.
            too_stale = limit is not None and self._started - self.log.taken > limit
            late = too_stale or self._is_late(delay)
            dropped = too_stale or (late and drop_late)
            made = dropped
            if not dropped:
                pile = self.piles.growing
                before = pile.samples
                add(pile)
                made = pile.samples > before
                self._computed += pile.samples - before
                pile.known_samples += (pile.samples - before) * self.log.taken
                if pile.oldest_round is None:
                    pile.oldest_round = self.log.taken
                self._seconds = seconds
            self._rates, self._notes = rates, notes
            self._steps += 1
            self._made += made
            self.made += made
            if self._world.survives:
                self.tell_step()
            if self._rules.at_arrival:
                return "on time"
            # On time: wait for the round that will take this. Late: only for one under way. With a
            # delay: for one that is so much older; but who is late does not know how old its next
            # gradient will be, so where staleness has a bound it waits.
            on_time = arrive and not late
            self._went_on_for = self._started + on_time
            self._resumes_after = self._went_on_for - (delay if on_time or limit is None else 0)
            self._on_time_for = self._started if on_time else -1
            self._comes = arrive
            if on_time and self._completes():
                self._outbox.append((self._arrivals.start, self._arrives()))
                self._called = True
            self._says_later = bool(delay) and not self._rules.at_boundary
            nothing = self._arrivals, self._arrivals.start, 0
            said = nothing if self._says_later else self._to_say()
        self._say(said)
        return "dropped" if dropped else "late" if late else "on time"

    def _completes(self) -> bool:
        """Whether the next round starts as soon as this worker arrives, and not between epochs."""
        hints = self._rules.hints and not self._over
        return hints and self._knows_start() and self._arrivals.completes

    def _is_late(self, delay: int) -> bool:
        if self._rules.at_arrival:
            return False
        # Where nothing may be stale, all wait for the round that takes what they give.
        if self._rules.lateness == "step" and self._rules.max_staleness_rounds != 0:
            return self._started > self._steps
        in_time_for = self.log.taken + delay if self._rules.at_boundary else self._went_on_for
        return self._started > max(self.log.taken, in_time_for)

    def abandon(self) -> float:
        """Forget what is on the pile, and a micro-batch that was stopped; the pile's samples."""
        with self._state:
            samples = self.piles.samples
            self._computed -= samples
            self.piles.growing.clear()
            self._made += 1
            if self._world.survives:
                self._leave_word()
        return samples

    def stops(self, began_s: float) -> bool:
        """Say whether a program is to leave a micro-batch that it is in the middle of."""
        return False

    def arrive(self) -> None:
        """Count as there for the next round, with whatever will be on the pile.

        `at_arrival`, with what is on it now; one may wait for that round afterwards.
        """
        with self._state:
            self._on_time_for = self._started
            if self._rules.at_arrival:
                assert not self.under_way, "the round before has to be taken first"
                self._set_aside(arrives=True)
                self._resumes_after = self._started + 1
            said = self._to_say()
        self._say(said)

    @property
    def under_way(self) -> bool:
        """Whether this worker has given to a round that its program does not know yet."""
        return self.log.taken < self._resumes_after

    @property
    def kept_samples(self) -> float:
        """What this worker has computed that no round holds, as far as it knows."""
        return max(self._computed - self._given_by[self._world.rank], 0.0)

    @property
    def gave_rounds(self) -> int:
        """Rounds that have taken this worker's pile, those before a checkpoint included."""
        return self._offset + self._started

    @property
    def called(self) -> bool:
        """Whether a round has started and waits for this worker to hand over its pile."""
        with self._state:
            return self._called and self._given is None

    def await_call(self) -> None:
        """Arrive with a full pile, and wait until a round has taken it."""
        with self._state:
            given = self._on_time_for = self._started
            self._awaits = given + 1
            self._stir()
            self._state.wait_for(lambda: self._started > given)

    def hand_over(self) -> None:
        """Give the pile to the round that waits for it; go on with an empty one."""
        with self._state:
            if self._called and self._given is None:
                self._give()
                self._resumes_after = self._started
                self._state.notify_all()

    def compute_until(self, began_s: float, ends_s: float) -> bool:
        """Let a modelled device compute until then; say whether it was stopped before its end."""
        self._world.sleep_until(ends_s)
        return False

    # --- before the round ------------------------------------------------------------------

    @property
    def may_launch(self) -> bool:
        """Whether buckets of the next round may be launched by the program."""
        return self._rules.lockstep and self._presence == HERE and not self._serving

    @property
    def launched(self) -> int:
        """How many have been."""
        return len(self._exchange.launches or ())

    def apart(self) -> Pile:
        """The pile to launch buckets of, which can be filled anew."""
        return self.piles.apart()

    def launch(self, not_before: float | None) -> None:
        """Launch the next bucket of the pile."""
        assert self._exchange.launches is not None, "opened with early=True"
        self._exchange.launches.launch(self.piles.growing, not_before)

    # --- results ---------------------------------------------------------------------------

    def results(
        self, *, delay: int | None = None, at_most_s: float = inf
    ) -> Generator[Round, None, None]:
        """Wait for what `contribute` said to wait for; yield every round not taken, in order.

        With a `delay`, all rounds but the latest so many that this worker has given to. A round's
        buffers are lent until the next one is asked for. Where all must be there, but nobody has to
        wait for that, it can be `at_most_s`.
        """
        began = self._world.now()
        if self._rules.lockstep and self._comes:
            self._comes = False
            self._run_in_lockstep()
        elif self._rules.lockstep and self._world.survives:
            self._make_broken_round()
        with self._state:
            last = self._resumes_after if delay is None else self._started - delay
            if self.log.completed < last:
                until = began + at_most_s if at_most_s < inf else None
                if until is None:  # else it goes on then, and piles up more
                    self._awaits = last
                self._waits_since = began
                if self._wants_room:  # the background need not wait for it: the program does
                    self._state.notify_all()
                # Who has arrived on time for the very round that it waits for has no more to say.
                if self._rules.by_messenger or not self._has_arrived() or last > self._started + 1:
                    self._stir()
                self._state.wait_for(lambda: self.log.completed >= last or self._ended, until=until)
                self._waits_since = None
            waited_s = self._world.now() - began
            adopts = self._begin_taking()
        yield from self._taken(adopts, waited_s, None if delay is None else last)
        if self._says_later:
            self._says_later = False
            with self._state:
                said = self._to_say()
            self._say(said)

    def newest(self) -> Generator[Round, None, None]:
        """Wait for nothing; yield every completed round not taken, in order."""
        return self._take(0.0)

    @property
    def held_back(self) -> tuple[int, float]:
        """Rounds that have come and that the program is not given, and their samples."""
        return 0, 0.0

    @property
    def more(self) -> bool:
        """Whether the log holds rounds that the program has not taken."""
        return bool(self.log)
