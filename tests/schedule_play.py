"""A worker's program under a schedule: what it does, and what it sees; in either world."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from schedule_log import Gradient, Log, Outcome, Same, Starts, Stay
from schedules import SILENT, Plan, Schedule

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import StuckWarning
from offbeat.merges import Mix, Outer, Public, Shift, Step
from offbeat.rounds import Engine, Groups, Layout, Pile, Round, SumInGroups, SumOverAll
from offbeat.rounds.start import Start
from offbeat.worlds import World, enter_world

ENDLESS = 3000  # rounds


def play(schedule: Schedule) -> list[Outcome]:
    """Run the protocol under a schedule, in virtual time; by engine."""
    starts: list[Starts] = [defaultdict(list) for _ in schedule.plans]
    cluster = Cluster.uniform(
        schedule.workers,
        latency_s=schedule.latency_s,
        bandwidth_bytes_per_s=schedule.bandwidth_bytes_per_s,
    )
    with warnings.catch_warnings():  # a pause may take long here: latencies of seconds
        warnings.simplefilter("ignore", StuckWarning)
        results = offbeat.run(
            lambda: live(enter_world(), schedule, starts), cluster, own_random_state=False
        ).results
    by_engine = zip(*results, strict=True)
    return [Outcome(list(logs), seen) for logs, seen in zip(by_engine, starts, strict=True)]


def live(world: World, schedule: Schedule, starts: list[Starts]) -> list[Log]:
    """Do what a worker does under a schedule, in either world."""
    from schedule_neighbours import Neighbour  # which is a Member
    from schedule_queue import Single

    rank = world.rank
    members = [
        Neighbour(world, schedule, plan)
        if plan.graph
        else Single(world, schedule, plan)
        if plan.judge
        else Member(world, schedule, plan, seen)
        for plan, seen in zip(schedule.plans, starts, strict=True)
    ]
    metric = world.channel("metric")
    positions, stays = schedule.positions[rank], dict(schedule.stays[rank])

    @contextmanager
    def away(but: Member | None = None, elsewhere: bool = True) -> Iterator[None]:
        """From every engine, or from all but one."""
        with ExitStack() as stack:
            for member in members:
                if member is not but:
                    stack.enter_context(member.away(elsewhere))
            yield

    def between(step: int) -> None:
        for event, position in zip(schedule.events, positions, strict=True):
            if position != step:
                continue
            if event == "metric":
                with away():
                    total = torch.ones(1)
                    metric.all_reduce(total).wait()
                    assert total.item() == schedule.workers
                continue
            for member in members:
                with away(but=member):
                    member.settle()
                member.engine.resume()
        if step in stays:
            with away(elsewhere=False):
                world.sleep_until(world.now() + stays[step])
        if step in schedule.looks[rank]:
            for member in members:
                with away(but=member):
                    member.look()

    for step, seconds in enumerate(schedule.compute_s[rank]):
        between(step)
        versions = [member.engine.knows_rounds for member in members]
        if len(members) == 1:
            members[0].compute(seconds)
        else:
            world.sleep_until(world.now() + seconds)
        for member, version in zip(members, versions, strict=True):
            with away(but=member):
                member.step(step, version)
    between(len(schedule.compute_s[rank]))
    for member in members:
        with away(but=member):
            member.leave()
    return [member.log for member in members]


MOVES: dict[str, Callable[[Layout, bool], Shift]] = {
    "shift": Shift,
    "outer": lambda layout, alone: Outer(layout, alone, lr=LR, momentum=MOMENTUM),
}
LR, MOMENTUM = 0.5, 0.75


class Plain:
    """A merge that costs nothing to run: w <- 0.9 w - mean."""

    own = False
    counts = True

    def __init__(self, parameters: torch.Tensor) -> None:
        self._parameters = parameters
        self._shadow: torch.Tensor | None = None

    @property
    def state(self) -> torch.Tensor:
        return self._parameters if self._shadow is None else self._shadow

    def begin(self, round: Round) -> bool:
        self.state.mul_(0.9).sub_(round.sum.views[0] / round.divisor)
        return False

    def end(self, round: Round) -> None: ...

    def skip(self, round: Round) -> None: ...

    def fold(self, round: Round) -> None:
        if self._shadow is None:
            self._shadow = self._parameters.clone()
        self.begin(round)

    def adopt(self) -> None:
        if self._shadow is not None:
            self._parameters.copy_(self._shadow)
            self._shadow = None


class Member:
    """One worker's part in one engine."""

    def __init__(self, world: World, schedule: Schedule, plan: Plan, starts: Starts) -> None:
        mine: dict[int, tuple[tuple[int, ...], Start]] = {}
        passed: list[int] = []  # rounds without a number

        class Watched(Engine):
            def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> Start:
                start = super()._start_of(round, active, due)
                mine[round - len(passed)] = (active, start)
                assert round < ENDLESS, "rounds without end"
                return start

            def _log_round(self, round: int, *what: Any) -> None:
                offset = self._offset
                super()._log_round(round, *what)
                number = round - len(passed)
                if self._offset < offset:
                    passed.append(round)
                    if number + 1 in mine:
                        mine[number] = mine.pop(number + 1)

        self._starts, self._all_starts = mine, starts
        self._world = world
        self._plan = plan
        self._rank = world.rank
        self._place = plan.places[world.rank]
        self._samples = plan.samples[world.rank]
        self._apply_s = schedule.apply_s[world.rank]
        copies = [
            torch.nn.Parameter(torch.zeros(plan.numel, dtype=torch.float64))
            for _ in range(plan.fragments)
        ]
        self._parameters = copies[0]
        self._own = self._parameters.detach()
        self._copies = [copy.detach() for copy in copies]
        layout = Layout([f"gradient {n}" for n in range(len(copies))], copies, bucket_bytes=1)
        self._layout = layout
        if plan.merge == "step":
            self._optimizer = torch.optim.SGD([self._parameters], lr=0.1, momentum=0.9)
        groups = Groups(world.size, plan.group, plan.rules.period or 1)
        public = plan.merge == "public"
        self.engine = Watched(
            world,
            "schedule",
            layout,
            plan.rules,
            rates=0 if plan.moves else 4,
            exchange=partial(SumInGroups, groups=groups) if public else SumOverAll,
            begin=False,
        )
        self.merge: Plain | Step | Shift
        if plan.merge == "public":
            self.merge = Public(layout, world.size == 1, world, statistics=0)
            self.engine.land = self.merge.land
        elif plan.moves:
            self.merge = MOVES[plan.merge](layout, world.size == 1)
        if plan.moves:
            self.engine.write = self.merge.give
            self.engine.piles.written_late = True
            if plan.rules.at_arrival:
                self.engine.weight = lambda pile: 1.0
        elif plan.merge == "step":
            self.merge = Step(self._optimizer, [self._parameters], None, scheduled=False)
        else:
            self.merge = Plain(self._own)
        if isinstance(self.merge, Step):
            assert len(self.merge.rates) == 4, "lr, momentum, weight decay, dampening"
        self.engine.merge = self.merge
        self.engine.fold = self._fold
        self.engine.followed = schedule.followed
        self._busy = True  # in nothing but waiting
        self.log = Log()
        self._applied_s = 0.0
        self._own_steps: list[int] = []  # that have moved this worker
        # Of them, those in rounds that it knows, for each copy.
        self._brought: list[set[int]] = [set() for _ in copies]
        self.engine.begin()

    # --- what the program does ---------------------------------------------------------------

    def compute(self, seconds: float) -> None:
        self._world.sleep_until(self._world.now() + seconds)

    def step(self, step: int, version: int) -> None:
        samples, log = self._samples[step], self.log
        if samples == SILENT:
            gave = self.engine.gave_rounds
            log.gradients.append(Gradient(version, None, self._world.now(), gave))
            return
        began_s, self._applied_s = self._world.now(), 0.0
        self._contribute(step, samples, version)
        log.waited_s += self._world.now() - began_s - self._applied_s

    def _contribute(self, step: int, samples: int, version: int) -> None:
        engine, plan = self.engine, self._plan
        if isinstance(self.merge, Shift) and samples:
            self.merge.moves()
            for copy in self._copies:
                copy[self._place[step]] += 1
            self._own_steps.append(self._place[step])
        given, patience_s = engine.gave_rounds, math.inf
        if plan.patience_s:
            patience_s = plan.patience_s[step % len(plan.patience_s)]
        arrival = engine.contribute(
            self._counting(samples) if plan.moves else self._adding(step, samples),
            arrive=engine.piles.micro_batches + 1 >= plan.ready and not plan.rules.at_arrival,
            delay=0 if plan.patience_s and patience_s and not engine.behind else plan.delay,
            rates=self._rates_of(step),
            drop_late=plan.drop_late,
        )
        self.log.gradients.append(Gradient(version, arrival, self._world.now(), given))
        if plan.rules.at_arrival:
            self._arrive()
            return
        if not plan.rules.at_boundary:
            if plan.full is not None and engine.piles.micro_batches >= plan.full:
                engine.await_call()
            if step + 1 < len(self._samples) or not plan.hasty[self._rank]:
                self._take(engine.results(at_most_s=patience_s))
            return
        if plan.full is not None and engine.piles.micro_batches >= plan.full:
            engine.await_call()
        if engine.called:
            if plan.moves:
                self._take(engine.results(delay=0))
            engine.hand_over()
        if plan.at_once and engine.gave_rounds > given:
            engine.arrive()
        self._take(engine.results() if plan.waits else engine.results(delay=plan.delay))

    def _arrive(self) -> None:
        """Wait for what was given some steps ago, if it has to be there by now; give the next."""
        engine, plan = self.engine, self._plan
        piled = engine.piles.micro_batches
        if not engine.under_way:
            self._take(engine.newest())
        elif piled >= plan.after:
            self._take(engine.results())
        if piled >= plan.ready:
            engine.arrive()
            if not plan.after:
                self._take(engine.results())

    def look(self) -> None:
        self._take(self.engine.newest())

    @contextmanager
    def away(self, elsewhere: bool) -> Iterator[None]:
        knowing, at_s = self._knowing, self._world.now()
        with self.engine.away(elsewhere=elsewhere):
            self._busy = not elsewhere
            yield
            self._busy = True
            until = self.engine._offset + self.engine.log.completed + 1
        if not self.log.ended:
            self.log.stays.append(Stay(knowing, until, at_s, "away"))

    def settle(self) -> None:
        knowing, at_s = self._knowing, self._world.now()
        self._take(self.engine.settle())
        self.log.paused_at.append(self._knowing)
        if isinstance(self.merge, Public):
            self.log.publics.append(tuple(self.merge._base.views[0].tolist()))
            self.log.steps_at.append(len(self.log.gradients))
        self.log.stays.append(Stay(knowing, self._knowing, at_s, "paused"))

    def leave(self) -> None:
        log = self.log
        log.stays.append(Stay(self._knowing, None, self._world.now(), "left"))
        self._take(self.engine.leave())
        if isinstance(self.merge, Shift):
            self.merge.settled()
        for round, start in self._starts.items():
            self._all_starts[round].append(start)
        log.pending_samples = self.engine.piles.samples
        log.ended = self.engine._ended and not self.engine.more
        log.parameters = tuple(torch.cat(self._copies).tolist())

    @property
    def _knowing(self) -> int:
        return self.engine.knows_rounds

    def _rates_of(self, step: int) -> tuple[float, ...]:
        if self._plan.moves:
            return ()
        mine = 0.1 if self._plan.rates_alike else 0.1 / (1 + step + self._rank)
        return mine, 0.9, 0.0, 0.0

    # --- what comes of rounds ------------------------------------------------------------------

    def _take(self, rounds: Iterable[Round]) -> None:
        for each in rounds:
            sum = self._sum(each)
            if each.samples and self.merge.begin(each):
                self._optimizer.step()
                self.merge.end(each)
            self._note(each, sum, folded=False)
            if each.samples and self._apply_s:
                lent = self._sum(each)
                self._world.sleep_until(self._world.now() + self._apply_s)
                self._applied_s += self._apply_s
                assert self._sum(each) == lent, "lent buffers"
        self._check_place()

    def _check_place(self) -> None:
        """A worker is at the base and its own moves that no round which it knows has brought."""
        merge = self.merge
        if isinstance(merge, Public | Mix):
            return
        if isinstance(merge, Shift) and merge._owed is None:
            for copy, base, brought in zip(
                self._copies, merge._base.views, self._brought, strict=True
            ):
                expected = base.clone()
                for index in self._own_steps:
                    expected[index] += index not in brought
                assert torch.allclose(copy, expected, rtol=0, atol=1e-9), "moves are lost"

    def _sum(self, each: Round) -> tuple[float, ...]:
        """What a round brings, copy by copy: zeros for those that it does not carry.

        Nothing where it has landed, and other groups have other sums.
        """
        if each.group:
            return ()
        carried = [
            view
            if each.buckets is None or self._layout.slots[n].bucket in each.buckets
            else torch.zeros_like(view)
            for n, view in enumerate(each.sum.views)
        ]
        return tuple(torch.cat(carried).tolist())

    def _fold(self, rounds: Iterable[Round]) -> None:
        for each in rounds:
            assert not (self.engine.followed and self._busy), "the program's own time"
            sum = self._sum(each)
            if each.samples:
                self.merge.fold(each)
            self._note(each, sum, folded=True)

    def _note(self, each: Round, sum: tuple[float, ...], folded: bool) -> None:
        log = self.log
        if each.samples and sum:
            for n, brought in enumerate(self._brought):
                first = n * self._plan.numel
                brought.update(index for index in self._place if sum[first + index] > 0.5)
        log.rounds.append(
            Same(
                each.round,
                sum,
                each.samples_by_rank,
                each.divisor,
                each.staleness_rounds,
                each.mean_staleness_rounds,
                each.micro_batches,
                each.rates,
                () if isinstance(self.merge, Public) else tuple(self._replica.tolist()),
            )
        )
        log.at_s.append(self._world.now())
        log.ended_s.append(each.ended_s)
        log.folded.append(folded)
        log.most_buffers = max(log.most_buffers, self._buffers)

    @property
    def _replica(self) -> torch.Tensor:
        if isinstance(self.merge, Plain):
            return self.merge.state
        if isinstance(self.merge, Shift):
            return torch.cat(list(self.merge._base.views))
        shadow = self.merge._shadow
        return self._own if shadow is None else shadow._parameters[0]

    @property
    def _buffers(self) -> int:
        """Gradient-sized ones that this engine keeps alive."""
        engine = self.engine
        log, piles = engine.log, engine.piles
        kept = sum(pile is not None for _, pile, _ in list(log._rounds))  # a copy at once
        kept += (log._lent is not None) + (engine._given is not None)
        kept += len(piles._spare) + (piles._growing is not None)
        if isinstance(self.merge, Shift):
            kept += 1 + len(self.merge._places) + len(self.merge._spare)
            kept += self.merge._owed is not None
            kept += isinstance(self.merge, Outer)
        if isinstance(self.merge, Public):
            kept += self.merge._given is not None and self.merge._given is not self.merge._base
        return kept

    # --- what is contributed -------------------------------------------------------------------

    def _adding(self, step: int, samples: int) -> Callable[[Pile], None]:
        def add(pile: Pile) -> None:
            [view] = pile.flats.views
            if not pile.micro_batches:
                view.zero_()
            view[self._place[step]] += samples
            self._count(pile, samples)

        return add

    def _counting(self, samples: int) -> Callable[[Pile], None]:
        def count(pile: Pile) -> None:
            if isinstance(self.merge, Shift):
                self.merge.made()
            self._count(pile, samples)

        return count

    def _count(self, pile: Pile, samples: int) -> None:
        pile.samples += samples
        pile.micro_batches += 1
        pile.used = [True] * len(self._copies)
