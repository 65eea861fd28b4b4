"""Rounds that take a pile between two micro-batches, under thousands of random schedules.

In the spirit of test_schedules.py, for what ABSSGD and NonblockingSGD are made of: programs that
hand over their pile and go on, deadlines, bounds on the samples of a round, full piles. Some steps
are silent, as when a GradScaler has skipped them, and some bring no samples.

    pytest tests/test_hold_schedules.py --schedule-seed 1234        replays one schedule
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from test_schedules import _DELAYS, Gradient, Log, Taken, Times, _adding, _places

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Layout, PartialAllReduce, Round, Rules
from offbeat.worlds import World, enter_world

FAST = 200
FULL = 3_000
CHUNK = 350


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    seed: int
    workers: int
    quorum: str | int
    delay: int
    waits: bool
    """Wait for the round that a pile was ready for, as NonblockingSGD does."""
    on_arrival: bool
    """Take what is there, even in the middle of a batch."""
    at_once: bool
    """Be ready for the next round as soon as the pile is handed over."""
    ready: int
    """Micro-batches that make a worker ready."""
    full: int | None
    """With so many it waits until a round takes them."""
    overdue_s: float | None
    alarm_s: float | None
    """After so long since its pile was taken a worker arrives, whatever is on the pile."""
    least: float
    most: float
    latency_s: float
    bandwidth_bytes_per_s: float
    compute_s: Times
    samples: tuple[tuple[int, ...], ...]
    silent: tuple[frozenset[int], ...]
    """By rank: the steps after which the program says nothing."""
    apply_s: tuple[float, ...]
    pause_after: int | None

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        draw = Random(f"hold {seed}")
        workers = draw.choice([1, 2, 2, 3, 3, 4, 5, 8])
        steps = draw.choice([1, 4, 8, 8, 14])
        counts = [
            draw.choice([steps, steps, steps, 0, draw.randint(0, steps)]) for _ in range(workers)
        ]
        ready = draw.choice([1, 1, 1, 2, 3])
        least = draw.choice([0.0, 0.0, 0.0, 1.0, 2.5, 5.0, 12.0, 1000.0])
        on_arrival = draw.random() < 0.2
        waits = not on_arrival and draw.random() < 0.2
        none_at_times = [0, 1, 2, 3] if draw.random() < 0.3 else [1, 2, 3]
        return cls(
            seed=seed,
            workers=workers,
            quorum=draw.choice(["all", "all", "all", "all", "solo", draw.randint(1, workers)]),
            delay=1 if on_arrival else 0 if waits else draw.choice([0, 1, 1]),
            waits=waits,
            on_arrival=on_arrival,
            at_once=draw.random() < 0.2,
            ready=ready,
            full=ready + draw.choice([0, 0, 1, 2]) if draw.random() < 0.3 else None,
            overdue_s=draw.choice([0.5, 1.0, 2.5, 6.0]) if draw.random() < 0.3 else None,
            alarm_s=draw.choice([0.0, 1.0, 2.5]) if draw.random() < 0.2 else None,
            least=least,
            most=least + draw.choice([0, 1, 4, 10]) or 1 if draw.random() < 0.3 else math.inf,
            latency_s=draw.choice([0.0, 0.0, 0.3, 1.0, 0.01, 4.0]),
            bandwidth_bytes_per_s=draw.choice([math.inf, math.inf, 400.0, 5000.0]),
            compute_s=_DELAYS[draw.choice(sorted(_DELAYS))](draw, counts),
            samples=tuple(
                tuple(draw.choice(none_at_times) for _ in range(count)) for count in counts
            ),
            silent=tuple(
                frozenset(step for step in range(count) if draw.random() < 0.2)
                if draw.random() < 0.2
                else frozenset()
                for count in counts
            ),
            apply_s=tuple(draw.choice([0.0, 0.0, 0.5, 3.0]) for _ in counts)
            if draw.random() < 0.2
            else (0.0,) * workers,
            pause_after=draw.randint(0, min(counts)) if draw.random() < 0.2 else None,
        )

    @property
    def rules(self) -> Rules:
        return Rules(
            self.quorum,
            hold=True,
            overdue_s=self.overdue_s,
            least_samples=self.least,
            most_samples=self.most,
            alarms=self.alarm_s is not None,
        )

    @property
    def held(self) -> bool:
        """Whether a round takes a pile only when the program hands it over, or waits."""
        return self.overdue_s is None and self.alarm_s is None

    @property
    def free(self) -> bool:
        """Whether messages take no time."""
        return self.latency_s == 0.0 and self.bandwidth_bytes_per_s == math.inf


@dataclass
class HoldLog(Log):
    """What one worker has done and seen, and how long its program was held up."""

    waited_s: float = 0.0
    mean_staleness: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    arrives_at: dict[int, float] = field(default_factory=dict)


def play(schedule: Schedule) -> list[HoldLog]:
    """Run the protocol under a schedule, in virtual time."""
    cluster = Cluster.uniform(
        schedule.workers,
        latency_s=schedule.latency_s,
        bandwidth_bytes_per_s=schedule.bandwidth_bytes_per_s,
    )
    logs: list[HoldLog] = offbeat.run(
        lambda: live(enter_world(), schedule), cluster, own_random_state=False
    ).results
    return logs


def live(world: World, schedule: Schedule) -> HoldLog:
    """Do what a worker does under a schedule."""
    log, rank = HoldLog(), world.rank
    place = _places(schedule)[rank]  # type: ignore[arg-type]  # it has samples and workers
    replica = torch.zeros(max(1, sum(map(len, schedule.samples))), dtype=torch.float64)
    partial = PartialAllReduce(
        world, f"schedule {schedule.seed}", Layout(["gradient"], [replica]), schedule.rules
    )
    applied_s = 0.0

    def take(records: Iterable[Round]) -> None:
        nonlocal applied_s
        for record in records:
            assert record.round < 20_000, "rounds without end"
            [total] = record.sum.views
            if record.samples:
                replica.mul_(0.9).sub_(total / record.divisor)
            log.rounds.append(
                Taken(
                    world.now(),
                    record.round,
                    total.tolist(),
                    record.samples_by_rank,
                    record.divisor,
                    record.staleness_rounds,
                    replica.tolist(),
                )
            )
            log.mean_staleness.append(record.mean_staleness_rounds)
            log.ended_s.append(record.ended_s)
            if record.samples:
                world.sleep_until(world.now() + schedule.apply_s[rank])
                applied_s += schedule.apply_s[rank]
            assert total.tolist() == log.rounds[-1].sum, "a record's buffers are lent"

    def pause() -> None:
        knowing, at_s = len(log.rounds), world.now()
        take(partial.settle())
        assert partial.pile.micro_batches == 0, "nothing is pending when all have paused"
        log.away.append((knowing, len(log.rounds), at_s))
        partial.resume()

    def contribute(step: int, version: int) -> None:
        given = partial.gave_rounds
        arrival = partial.contribute(
            _adding(place[step], schedule.samples[rank][step]),
            arrive=partial.pile.micro_batches + 1 >= schedule.ready,
            delay=schedule.delay,
            learning_rates=version + 1.0,  # alike for those on time, or it would be an error
        )
        log.gradients.append(Gradient(version, arrival, world.now()))
        if schedule.alarm_s is not None:
            partial.arrive_at(partial.gave_s + schedule.alarm_s)
        if schedule.full is not None and partial.pile.micro_batches >= schedule.full:
            partial.await_call()
        if partial.called:
            partial.hand_over()
        if schedule.at_once and partial.gave_rounds > given:
            partial.arrive()
        if schedule.waits:
            take(partial.results())
        elif schedule.on_arrival:
            take(partial.results(wait=False))
        else:
            take(partial.results(delay=schedule.delay))

    for step, seconds in enumerate(schedule.compute_s[rank]):
        if step == schedule.pause_after:
            pause()
        version = len(log.rounds)
        world.sleep_until(world.now() + seconds)
        if step in schedule.silent[rank]:
            log.gradients.append(Gradient(version, "dropped", world.now()))
            continue
        began_s, applied_s = world.now(), 0.0
        contribute(step, version)
        log.waited_s += world.now() - began_s - applied_s
    if len(place) == schedule.pause_after:
        pause()
    log.away.append((len(log.rounds), None, world.now()))
    take(partial.leave())
    log.pending_samples = partial.pile.samples
    return log


# --- the promises --------------------------------------------------------------------------

Inside = list[dict[int, list[int]]]  # by rank and round: the steps whose gradients are in it


def check(schedule: Schedule, logs: list[HoldLog]) -> None:
    """Hold what has happened against every promise of the protocol."""
    _every_worker_takes_every_round_once_in_order_and_alike(logs)
    inside = _every_gradient_is_applied_once(schedule, logs)
    for rank, log in enumerate(logs):
        assert log.pending_samples == 0, f"worker {rank} ends with {log.pending_samples} pending"
    _staleness_is_true(schedule, logs, inside)
    if schedule.held:
        _a_round_holds_no_gradient_but_of_its_own_parameters(schedule, logs, inside)
        _everyone_in_the_quorum_was_ready(schedule, logs, inside)
    _no_round_has_too_few_samples(schedule, logs, inside)
    if schedule.delay == 1 and schedule.full is None:
        for rank, log in enumerate(logs):
            assert log.waited_s < 1e-9, f"worker {rank} has waited {log.waited_s} s"
    if schedule.free and schedule.pause_after is None:
        if schedule.overdue_s is not None:
            _nobody_holds_up_the_others(schedule, logs)
        if (
            schedule.held
            and schedule.quorum == "all"
            and not (any(schedule.silent) or _any_without_samples(schedule))
        ):
            _rounds_start_as_soon_as_they_can(schedule, logs, inside)


def _every_worker_takes_every_round_once_in_order_and_alike(logs: list[HoldLog]) -> None:
    for rank, log in enumerate(logs):
        assert [taken.round for taken in log.rounds] == list(range(len(logs[0].rounds))), (
            f"rounds that worker {rank} has taken"
        )
        for mine, first in zip(log.rounds, logs[0].rounds, strict=True):
            assert replace(mine, at_s=first.at_s) == first, (
                f"round {first.round} is not the same, or not applied alike, on worker {rank} "
                f"and on worker 0: {mine}, {first}"
            )
        assert log.mean_staleness == logs[0].mean_staleness
    assert len({log.away[0][1] for log in logs}) == 1, "rounds known after a common pause"


def _every_gradient_is_applied_once(schedule: Schedule, logs: list[HoldLog]) -> Inside:
    inside: Inside = [defaultdict(list) for _ in logs]
    for rank, place in enumerate(_places(schedule)):  # type: ignore[arg-type]
        found = []
        for taken in logs[0].rounds:
            steps = [step for step, index in enumerate(place) if taken.sum[index]]
            for step in steps:
                assert taken.sum[place[step]] == schedule.samples[rank][step], (
                    f"the gradient of worker {rank}, step {step} in round {taken.round}"
                )
            assert taken.samples_by_rank[rank] == sum(schedule.samples[rank][s] for s in steps)
            inside[rank][taken.round] = steps
            found += steps
        brought = [
            step
            for step, gradient in enumerate(logs[rank].gradients)
            if gradient.arrival != "dropped" and schedule.samples[rank][step]
        ]
        assert found == brought, f"steps of worker {rank} that were applied, in order"
    for taken in logs[0].rounds:
        assert taken.divisor == sum(taken.samples_by_rank)
    return inside


def _staleness_is_true(schedule: Schedule, logs: list[HoldLog], inside: Inside) -> None:
    for taken, mean in zip(logs[0].rounds, logs[0].mean_staleness, strict=True):
        ages = [
            (taken.round - logs[rank].gradients[step].version, schedule.samples[rank][step])
            for rank in range(schedule.workers)
            for step in inside[rank][taken.round]
        ]
        assert all(age >= 0 for age, _ in ages)
        if not _any_without_samples(schedule):  # one without samples is not seen in the sum
            assert taken.staleness_rounds == max((age for age, _ in ages), default=0)
        samples = sum(weight for _, weight in ages)
        if samples:
            assert mean * samples == pytest.approx(sum(age * weight for age, weight in ages))


def _any_without_samples(schedule: Schedule) -> bool:
    return any(0 in samples for samples in schedule.samples)


def _a_round_holds_no_gradient_but_of_its_own_parameters(
    schedule: Schedule, logs: list[HoldLog], inside: Inside
) -> None:
    resumed = logs[0].away[0][1] or 0  # a pause lets everyone take every round
    for rank, log in enumerate(logs):
        for round, steps in inside[rank].items():
            for step in steps:
                version, arrival = log.gradients[step].version, log.gradients[step].arrival
                known = resumed if round >= resumed else 0
                oldest = max(round - schedule.delay, known)
                assert version == oldest or (schedule.on_arrival and version == round), (
                    f"worker {rank}, step {step}: of the parameters after round {version}, "
                    f"in round {round}"
                )
                assert arrival == "on time"


def _everyone_in_the_quorum_was_ready(
    schedule: Schedule, logs: list[HoldLog], inside: Inside
) -> None:
    if schedule.at_once or schedule.most < math.inf or _any_without_samples(schedule):
        return  # others may be counted
    needed = {"all": schedule.workers, "solo": 1}.get(str(schedule.quorum), schedule.quorum)
    for taken in logs[0].rounds:
        ready = sum(
            len(steps[taken.round]) >= schedule.ready or log.away_since(taken.round) is not None
            for steps, log in zip(inside, logs, strict=True)
        )
        away = sum(log.away_since(taken.round) is not None for log in logs)
        assert ready >= int(needed) or ready == schedule.workers or away, (
            f"round {taken.round} started with {ready} of {needed}"
        )


def _no_round_has_too_few_samples(schedule: Schedule, logs: list[HoldLog], inside: Inside) -> None:
    if schedule.waits:
        return  # who waits adds nothing
    for taken in logs[0].rounds:
        if any(log.away_since(taken.round) is not None for log in logs):
            continue
        if schedule.full is not None and (
            _any_without_samples(schedule)
            or all(len(steps[taken.round]) >= schedule.full for steps in inside)
        ):
            continue
        assert taken.divisor >= schedule.least, (
            f"round {taken.round} has {taken.divisor} samples, and everybody is here"
        )


def _nobody_holds_up_the_others(schedule: Schedule, logs: list[HoldLog]) -> None:
    if schedule.least:
        return
    ended = [0.0, *(min(times) for times in zip(*(log.ended_s for log in logs), strict=True))]
    for round, (before, after) in enumerate(itertools.pairwise(ended)):
        assert after - before <= (schedule.overdue_s or 0.0) + 1e-9, (
            f"round {round} ended {after - before} s after the one before"
        )


def _rounds_start_as_soon_as_they_can(
    schedule: Schedule, logs: list[HoldLog], inside: Inside
) -> None:
    """Where messages take no time, a round ends when each has noticed that it can start."""
    ended_s = 0.0
    for taken in logs[0].rounds:
        mine = [
            [
                (log.gradients[step].at_s, schedule.samples[rank][step])
                for step in steps[taken.round]
            ]
            for rank, (log, steps) in enumerate(zip(logs, inside, strict=True))
        ]
        away = [at for log in logs if (at := log.away_since(taken.round)) is not None]
        ready = [each[schedule.ready - 1][0] for each in mine if len(each) >= schedule.ready]
        everyone_s = max([*ready, *away]) if len(ready) + len(away) >= len(logs) else math.inf
        least_s = min([_reached(mine, schedule.least), *away])
        call_s = max(ended_s, min(max(everyone_s, least_s), _reached(mine, schedule.most)))
        notices = [
            next((g.at_s for g in log.gradients if g.at_s > call_s), log.left_at_s) for log in logs
        ]
        ended_s = min(log.ended_s[taken.round] for log in logs)
        assert ended_s <= max(call_s, *notices) + 1e-9, (
            f"round {taken.round} could start at {call_s}, and ended at {ended_s}"
        )


def _reached(mine: list[list[tuple[float, int]]], samples: float) -> float:
    """The moment at which all together had so many samples."""
    total = 0
    for at_s, each in sorted(pair for pairs in mine for pair in pairs):
        total += each
        if total >= samples:
            return at_s
    return math.inf if samples > total else 0.0


# --- the tests -----------------------------------------------------------------------------


def keeps_every_promise(seed: int) -> None:
    schedule = Schedule.drawn(seed)
    try:
        check(schedule, play(schedule))
    except Exception as error:
        error.add_note(
            f"{schedule}\nreplay: pytest tests/test_hold_schedules.py --schedule-seed {seed}"
        )
        raise


def test_every_schedule_keeps_every_promise(seeds: range) -> None:
    for seed in seeds:
        keeps_every_promise(seed)
