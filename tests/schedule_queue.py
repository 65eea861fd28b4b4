"""Gradients that come by themselves, under a schedule: a worker's program, and what must hold.

Every gradient has a number of its own in the vector, as elsewhere; so each update tells exactly
which are in it, and the others must be those that the judge has dropped, or that were stopped.
"""

from __future__ import annotations

import torch
from schedule_log import Gradient, Log
from schedule_play import Member, Plain
from schedules import Plan, Schedule

from offbeat.algorithms.asgd import All
from offbeat.algorithms.ringleader import InTurn
from offbeat.algorithms.ringmaster import NotTooLate
from offbeat.asynchronous import at_once, if_longer
from offbeat.merges import Step
from offbeat.rounds import Arrival, Enough, Judge, Layout, Queue
from offbeat.worlds import World


def judge_of(plan: Plan, size: int) -> Judge:
    """The one that a plan names."""
    kind, number = _named(plan)
    if kind == "all":
        return All(size, adaptive=number > 1)
    if kind == "in turn":
        return InTurn(size)
    if kind.startswith("late"):
        return NotTooLate(size, number, stops=kind != "late")
    if kind == "topped":
        return Enough(size, workers=min(number, size))
    return Enough(size, gradients=number, stops=kind == "some")


def _named(plan: Plan) -> tuple[str, int]:
    kind, _, number = plan.judge.partition(": ")
    return kind, int(number)


def averages(plan: Plan) -> bool:
    """Whether rounds carry the means of workers' gradients, which are not told apart."""
    return _named(plan)[0] == "in turn"


class Single(Member):
    """One worker's part in an engine where every gradient comes by itself."""

    engine: Queue

    def __init__(self, world: World, schedule: Schedule, plan: Plan) -> None:
        self._world, self._plan, self._rank = world, plan, world.rank
        self._place, self._samples = plan.places[world.rank], plan.samples[world.rank]
        self._apply_s = schedule.apply_s[world.rank]
        self._parameters = torch.nn.Parameter(torch.zeros(plan.numel, dtype=torch.float64))
        self._own = self._parameters.detach()
        self._copies = [self._own]
        self._starts, self._all_starts = {}, {}  # nobody starts rounds
        self._brought: list[set[int]] = []
        self._layout = layout = Layout(["gradient"], [self._parameters])
        gives_up = if_longer if "longer" in plan.judge else at_once
        self.engine = Queue(
            judge_of(plan, world.size), gives_up, world, "schedule", layout, plan.rules, begin=False
        )
        self.merge: Plain | Step
        if plan.merge == "step":
            self._optimizer = torch.optim.SGD([self._parameters], lr=0.1, momentum=0.9)
            self.merge = Step(self._optimizer, [self._parameters], None, scheduled=False)
        else:
            self.merge = Plain(self._own)
        self.engine.merge = self.merge
        self.engine.fold = self._fold
        self.engine.judged = self._judged
        self.engine.followed = schedule.followed
        self._busy, self.log, self._applied_s = True, Log(), 0.0
        self._stopped = False
        self._piled: list[int] = []  # gradients that nobody has judged
        self.engine.begin()

    def compute(self, seconds: float) -> None:
        now = self._world.now()
        self._stopped = self.engine.compute_until(now, now + seconds)

    def _contribute(self, step: int, samples: int, version: int) -> None:
        engine, log = self.engine, self.log
        stopped, self._stopped = self._stopped, False
        given = engine.gave_rounds
        log.gradients.append(Gradient(version, "on time", self._world.now(), given))
        self._piled.append(len(log.gradients) - 1)
        if stopped:
            assert engine.abandon() == sum(self._samples[each] for each in self._piled[:-1])
            self._judged("abandoned", 0.0)
            self._take(engine.newest())
            return
        whole = engine.piles.micro_batches + 1 >= self._plan.ready
        engine.contribute(self._adding(step, samples), arrive=whole, rates=self._rates_of(step))
        if whole and (step + 1 < len(self._samples) or not self._plan.hasty[self._rank]):
            self._take(engine.results())

    def _judged(self, arrival: Arrival, dropped: float) -> None:
        """Of all that was on the pile; nothing was judged that has no samples."""
        gone = [self.log.gradients[each] for each in self._piled]
        if arrival == "dropped":
            samples = sum(self._samples[each] for each in self._piled)
            assert dropped == samples, f"{dropped} samples dropped, of {samples}"
        for each, gradient in zip(self._piled, gone, strict=True):
            if arrival in ("dropped", "abandoned"):
                arrival_now: Arrival = "dropped"
                self.log.gradients[each] = Gradient(
                    gradient.version, arrival_now, gradient.at_s, gradient.started
                )
        self._piled.clear()


def check(plan: Plan, logs: list[Log]) -> None:
    """Hold what has become of gradients against the judge's rule."""
    kind, number = _named(plan)
    rounds = logs[0].rounds
    dropped = [
        gradient
        for rank, log in enumerate(logs)
        for step, gradient in enumerate(log.gradients)
        if gradient.arrival == "dropped" and plan.samples[rank][step] > 0
    ]
    if kind in ("all", "in turn"):
        assert not dropped
    if kind.startswith("late"):
        assert all(taken.staleness_rounds < number for taken in rounds)
        assert all(gradient.version <= len(rounds) - number for gradient in dropped)
    if kind.startswith(("some", "topped")):
        assert all(taken.staleness_rounds == 0 for taken in rounds)
        assert all(gradient.version < len(rounds) for gradient in dropped)
    if kind == "in turn":
        for rank, log in enumerate(logs):
            given = sum(
                plan.samples[rank][step]
                for step, gradient in enumerate(log.gradients)
                if gradient.arrival is not None
            )
            assert sum(taken.samples_by_rank[rank] for taken in rounds) == given
        assert all(1 <= taken.divisor <= len(logs) for taken in rounds)


def check_moments(schedule: Schedule, logs: list[Log]) -> None:
    """Where messages take no time, nobody waits for anybody."""
    if any(schedule.apply_s):
        return
    for rank, log in enumerate(logs):
        assert log.waited_s < 1e-9, f"worker {rank} has waited {log.waited_s} s"
