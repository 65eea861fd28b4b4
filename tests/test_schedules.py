"""The partial all-reduce under thousands of random schedules: its promises, proved by simulation.

The protocol is the one that runs on a cluster; only the world below it is virtual. A schedule says
who computes how long, how fast the network is, who stops when, and which trigger and bound hold.
Every gradient is a vector with a single number in a place of its own, so that each round tells
exactly which gradients are in it.

    pytest tests/test_schedules.py --schedule-seed 1234        replays one schedule, with its log
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Arrival, Layout, PartialAllReduce, Pile, Round, Rules
from offbeat.rounds.rules import Start
from offbeat.worlds import World, enter_world

FAST = 300
FULL = 10_300
CHUNK = 500
Times = tuple[tuple[float, ...], ...]
Starts = dict[int, list[tuple[tuple[int, ...], Start]]]


# --- a schedule ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    seed: int
    workers: int
    quorum: str | int | float
    max_staleness_rounds: int | None
    drop_late: bool
    full_every: int | None
    latency_s: float
    bandwidth_bytes_per_s: float
    delays: str
    compute_s: tuple[tuple[float, ...], ...]
    """By rank and step; a worker leaves after its last step."""
    samples: tuple[tuple[int, ...], ...]
    apply_s: tuple[float, ...]
    """By rank: what applying a round takes."""
    hasty: tuple[bool, ...]
    """By rank: whether it leaves without waiting for the round of its last gradient."""
    pause_after: int | None
    """The number of steps after which every worker pauses, as for a checkpoint."""
    delay: int
    """Rounds that a worker does not wait for, those of its latest gradients."""

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        draw = Random(seed)
        workers = draw.randint(1, 9)
        some = draw.randint(1, workers)
        steps = draw.choice([1, 3, 5, 5, 8])
        counts = [
            draw.choice([steps, steps, steps, 0, draw.randint(0, steps)]) for _ in range(workers)
        ]
        delays = draw.choice(sorted(_DELAYS))
        bound = draw.choice([None, None, 0, 1, 2, 3, 4])
        quorums: list[str | int | float] = ["solo", "majority", "all", some, some / workers]
        return cls(
            seed=seed,
            workers=workers,
            quorum=draw.choice([*quorums, f"first:{some}", f"last:{some}"]),
            max_staleness_rounds=bound,
            drop_late=draw.random() < 0.3,
            full_every=draw.choice([None, None, None, None, 1, 2, 3, 7]),
            latency_s=draw.choice([0.0, 0.0, 0.5, 1.0, 0.01, 4.0]),
            bandwidth_bytes_per_s=draw.choice([math.inf, math.inf, 400.0, 5000.0]),
            delays=delays,
            compute_s=_DELAYS[delays](draw, counts),
            samples=tuple(tuple(draw.randint(1, 3) for _ in range(count)) for count in counts),
            apply_s=tuple(draw.choice([0.0, 0.0, 0.0, 0.5, 3.0]) for _ in counts)
            if draw.random() < 0.3
            else (0.0,) * workers,
            hasty=tuple(draw.random() < 0.2 for _ in counts),
            pause_after=draw.randint(0, min(counts)) if draw.random() < 0.2 else None,
            delay=int(draw.random() < 0.25 and bound != 0),
        )

    @property
    def free(self) -> bool:
        """Whether nothing but computing takes time."""
        instant = self.latency_s == 0.0 and self.bandwidth_bytes_per_s == math.inf
        return instant and not any(self.apply_s)

    def rule(self, round: int, active: int) -> tuple[int, int]:
        """How many of the active workers are candidates, and how many of these are needed."""
        if self.full_every is not None and (round + 1) % self.full_every == 0:
            return active, active
        match str(self.quorum).split(":"):
            case ["solo"]:
                return active, 1
            case ["majority"]:
                return 1, 1
            case ["all"]:
                return active, active
            case ["first", k]:
                return min(int(k), active), 1
            case ["last", k]:
                return min(int(k), active), min(int(k), active)
        some = self.quorum if isinstance(self.quorum, int) else self.quorum_of_fraction
        return active, min(some, active)

    @property
    def quorum_of_fraction(self) -> int:
        return next(m for m in range(1, self.workers + 1) if m / self.workers == self.quorum)


def _each(draw: Random, counts: list[int], choices: list[float]) -> Times:
    return tuple(tuple(draw.choice(choices) for _ in range(count)) for count in counts)


def _one_slow(draw: Random, counts: list[int]) -> Times:
    slow = draw.randrange(len(counts))
    return tuple((20.0 if rank == slow else 1.0,) * count for rank, count in enumerate(counts))


_DELAYS: dict[str, Callable[[Random, list[int]], Times]] = {
    "all equal": lambda draw, counts: _each(draw, counts, [1.0]),
    "no time at all": lambda draw, counts: _each(draw, counts, [0.0]),
    "ties": lambda draw, counts: _each(draw, counts, [0.0, 1.0, 2.0]),
    "bursts": lambda draw, counts: _each(draw, counts, [1.0] * 7 + [15.0]),
    "one slow": _one_slow,
    "a staircase": lambda _, counts: tuple(
        (1.0 + rank,) * count for rank, count in enumerate(counts)
    ),
    "speeds": lambda draw, counts: tuple((draw.uniform(0.5, 9.0),) * count for count in counts),
    "anything": lambda draw, counts: tuple(
        tuple(draw.expovariate(0.5) for _ in range(count)) for count in counts
    ),
}


# --- what a run leaves behind --------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """One that a worker has contributed."""

    version: int
    """Rounds in the parameters that it was computed at."""
    arrival: Arrival
    at_s: float


@dataclass(frozen=True)
class Taken:
    """A round, as one worker has taken it."""

    at_s: float
    round: int
    sum: list[float]
    samples_by_rank: tuple[float, ...]
    divisor: float
    staleness_rounds: int
    replica: list[float]
    """This worker's parameters, after applying it."""


@dataclass
class Log:
    """What one worker has done and seen."""

    gradients: list[Gradient] = field(default_factory=list)
    rounds: list[Taken] = field(default_factory=list)
    away: list[tuple[int, int | None, float]] = field(default_factory=list)
    """The rounds taken when it paused, and when it went on; last, when it left; and the moment."""
    pending_samples: float = 0.0

    @property
    def left_at_s(self) -> float:
        return self.away[-1][2]

    def away_since(self, round: int) -> float | None:
        """The moment at which it had left, or paused, if it may have before the round started."""
        for knowing, knowing_after, at_s in self.away:
            if knowing <= round and (knowing_after is None or round < knowing_after):
                return at_s
        return None


@dataclass(frozen=True)
class Outcome:
    """What all workers have seen."""

    logs: list[Log]
    starts: Starts
    """By round, what each worker holds to be active, and to be needed for the round to start."""


def play(schedule: Schedule) -> Outcome:
    """Run the protocol under a schedule, in virtual time."""
    starts: Starts = defaultdict(list)
    cluster = Cluster.uniform(
        schedule.workers,
        latency_s=schedule.latency_s,
        bandwidth_bytes_per_s=schedule.bandwidth_bytes_per_s,
    )
    run = offbeat.run(
        lambda: live(enter_world(), schedule, starts), cluster, own_random_state=False
    )
    return Outcome(run.results, starts)


def live(world: World, schedule: Schedule, starts: Starts) -> Log:
    """Do what a worker does under a schedule, in either world."""
    log, rank = Log(), world.rank
    place = _places(schedule)[rank]
    replica = torch.zeros(max(1, sum(map(len, schedule.samples))), dtype=torch.float64)

    class Watched(PartialAllReduce):
        def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> Start:
            start = super()._start_of(round, active, due)
            starts[round].append((active, start))
            return start

    partial = Watched(
        world,
        f"schedule {schedule.seed}",
        Layout(["gradient"], [replica]),
        Rules(
            schedule.quorum,
            max_staleness_rounds=schedule.max_staleness_rounds,
            full_every=schedule.full_every,
        ),
    )

    def take(records: Iterable[Round]) -> None:
        for record in records:
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
            world.sleep_until(world.now() + schedule.apply_s[rank])
            assert total.tolist() == log.rounds[-1].sum, "a record's buffers are lent"

    def pause() -> None:
        knowing, at_s = len(log.rounds), world.now()
        take(partial.settle())
        log.away.append((knowing, len(log.rounds), at_s))
        partial.resume()

    for step, seconds in enumerate(schedule.compute_s[rank]):
        if step == schedule.pause_after:
            pause()
        version = len(log.rounds)
        world.sleep_until(world.now() + seconds)
        at_s = world.now()
        arrival = partial.contribute(
            _adding(place[step], schedule.samples[rank][step]),
            learning_rates=version + 1.0,  # alike for those on time, or it would be an error
            delay=schedule.delay,
            drop_late=schedule.drop_late,
        )
        log.gradients.append(Gradient(version, arrival, at_s))
        if step + 1 < len(place) or not schedule.hasty[rank]:
            take(partial.results())
    if len(place) == schedule.pause_after:
        pause()
    log.away.append((len(log.rounds), None, world.now()))
    take(partial.leave())
    log.pending_samples = partial.pile.samples
    return log


def _places(schedule: Schedule) -> list[range]:
    """By rank: where in the vector its gradients have their numbers."""
    ends = [sum(map(len, schedule.samples[: rank + 1])) for rank in range(schedule.workers)]
    return [range(end - len(own), end) for end, own in zip(ends, schedule.samples, strict=True)]


def _adding(place: int, samples: int) -> Callable[[Pile], None]:
    def add(pile: Pile) -> None:
        [view] = pile.flats.views
        if not pile.micro_batches:
            view.zero_()
        view[place] += samples
        pile.samples += samples
        pile.micro_batches += 1
        pile.used = [True]

    return add


# --- the promises --------------------------------------------------------------------------


def check(schedule: Schedule, outcome: Outcome, virtual: bool = True) -> None:
    """Hold what has happened against every promise of the protocol.

    Moments are compared in virtual time only: real workers have a clock each.
    """
    logs = outcome.logs
    _every_worker_takes_every_round_once_in_order_and_alike(logs)
    assert len({log.away[0][1] for log in logs}) == 1, "rounds known after a common pause"
    applied_in = _every_gradient_is_applied_once_or_dropped(schedule, logs)
    for rank, log in enumerate(logs):
        assert log.pending_samples == 0, f"worker {rank} ends with {log.pending_samples} pending"
    on_time = _staleness_is_true_and_bounded(schedule, logs, applied_in)
    _workers_agree_on_what_starts_a_round(schedule, outcome)
    _every_round_has_its_quorum(outcome, on_time)
    if virtual:
        _who_has_left_counts_no_more(outcome, applied_in)
    if virtual and schedule.free and not schedule.delay:
        _rounds_start_at_once(schedule, outcome, applied_in)


def _every_worker_takes_every_round_once_in_order_and_alike(logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        assert [taken.round for taken in log.rounds] == list(range(len(logs[0].rounds))), (
            f"rounds that worker {rank} has taken"
        )
        for mine, first in zip(log.rounds, logs[0].rounds, strict=True):
            assert replace(mine, at_s=first.at_s) == first, (
                f"round {first.round} is not the same, or not applied alike, on worker {rank} "
                f"and on worker 0: {mine}, {first}"
            )


def _every_gradient_is_applied_once_or_dropped(
    schedule: Schedule, logs: list[Log]
) -> list[dict[int, int]]:
    """Return, by rank, the round that each step's gradient is in."""
    applied_in: list[dict[int, int]] = [{} for _ in logs]
    for taken in logs[0].rounds:
        by_rank = [0.0] * len(logs)
        for rank, place in enumerate(_places(schedule)):
            for step, index in enumerate(place):
                if not (found := taken.sum[index]):
                    continue
                assert found == schedule.samples[rank][step], (
                    f"round {taken.round} holds {found} of the gradient of worker {rank}, "
                    f"step {step}, which was {schedule.samples[rank][step]}"
                )
                assert step not in applied_in[rank], (
                    f"the gradient of worker {rank}, step {step} is in rounds "
                    f"{applied_in[rank][step]} and {taken.round}"
                )
                applied_in[rank][step] = taken.round
                by_rank[rank] += found
        assert tuple(by_rank) == taken.samples_by_rank, f"the samples of round {taken.round}"
        assert taken.divisor == sum(by_rank), f"the divisor of round {taken.round}"
    for rank, log in enumerate(logs):
        kept = [n for n, each in enumerate(log.gradients) if each.arrival != "dropped"]
        assert list(applied_in[rank]) == kept, (
            f"steps of worker {rank} that were applied, in order, and those not dropped"
        )
    return applied_in


def _staleness_is_true_and_bounded(
    schedule: Schedule, logs: list[Log], applied_in: list[dict[int, int]]
) -> dict[int, set[int]]:
    """Return who is on time, by round."""
    stale: dict[int, int] = defaultdict(int)
    on_time: dict[int, set[int]] = defaultdict(set)
    for rank, log in enumerate(logs):
        for step, gradient in enumerate(log.gradients):
            who = f"the gradient of worker {rank}, step {step}"
            if gradient.arrival == "dropped":
                assert schedule.drop_late, f"{who} was dropped against the policy"
                continue
            staleness = applied_in[rank][step] - gradient.version
            as_told = staleness <= schedule.delay if gradient.arrival == "on time" else staleness
            assert as_told, f"{who} was called {gradient.arrival} and is {staleness} rounds late"
            assert staleness >= 0, f"{who} was applied in a round before its parameters"
            assert gradient.arrival == "on time" or not schedule.drop_late, f"{who} was not dropped"
            stale[applied_in[rank][step]] = max(stale[applied_in[rank][step]], staleness)
            if gradient.arrival == "on time":
                on_time[applied_in[rank][step]].add(rank)
    bound = schedule.max_staleness_rounds
    for taken in logs[0].rounds:
        assert taken.staleness_rounds == stale[taken.round], f"staleness of round {taken.round}"
        assert bound is None or stale[taken.round] <= bound, (
            f"round {taken.round} holds a gradient {stale[taken.round]} rounds late"
        )
    return on_time


def _workers_agree_on_what_starts_a_round(schedule: Schedule, outcome: Outcome) -> None:
    """And it is what the settings say, among those who have not left."""
    logs, rounds = outcome.logs, len(outcome.logs[0].rounds)
    assert sorted(outcome.starts) == list(range(rounds))
    for round, seen in outcome.starts.items():
        active, start = seen[0]
        assert seen == [seen[0]] * len(logs), f"workers disagree about the start of round {round}"
        assert start.round == round
        assert start.candidates | start.due <= set(active)
        assert (len(start.candidates), start.needed) == schedule.rule(round, len(active))
        assert not start.due or schedule.max_staleness_rounds is not None
        for rank in set(range(len(logs))) - set(active):
            assert logs[rank].away_since(round - 1) is not None, (
                f"worker {rank} does not count in round {round}"
            )


def _who_has_left_counts_no_more(outcome: Outcome, applied_in: list[dict[int, int]]) -> None:
    """A round ends after the last arrival in it. Whoever leaves before then says so in the next
    round at the latest, and counts no more in the one after that.
    """
    arrived = [
        (in_round[step], log.gradients[step].at_s)
        for log, in_round in zip(outcome.logs, applied_in, strict=True)
        for step in in_round
        if log.gradients[step].arrival == "on time"
    ]
    for round, seen in outcome.starts.items():
        heard_s = max((at_s for number, at_s in arrived if number <= round - 2), default=0.0)
        for rank in seen[0][0]:
            assert outcome.logs[rank].left_at_s >= heard_s, (
                f"worker {rank} left at {outcome.logs[rank].left_at_s} and counts in round {round}"
            )


def _every_round_has_its_quorum(outcome: Outcome, on_time: dict[int, set[int]]) -> None:
    for round, seen in outcome.starts.items():
        start = seen[0][1]
        there = start.candidates & on_time[round]
        missing = start.candidates - there
        assert len(there) >= start.needed or all(
            outcome.logs[rank].away_since(round) is not None for rank in missing
        ), f"round {round} has {sorted(there)} on time and not {sorted(missing)}: {start}"


def _rounds_start_at_once(
    schedule: Schedule, outcome: Outcome, applied_in: list[dict[int, int]]
) -> None:
    """Where messages take no time, a round ends with the arrival that completes what it needs."""
    logs, ended_s = outcome.logs, [-math.inf, 0.0]
    for round, seen in sorted(outcome.starts.items()):
        start = seen[0][1]
        came: list[float] = []  # candidates on time
        gone: list[float] = []  # candidates that were away
        due: list[float] = []
        for rank, log in enumerate(logs):
            mine = [g for n, g in enumerate(log.gradients) if applied_in[rank].get(n) == round]
            away_s = log.away_since(round)
            if rank in start.candidates:
                on_time = [g.at_s for g in mine if g.arrival == "on time"]
                came += on_time
                gone += [] if on_time or away_s is None else [away_s]
            if rank in start.due:
                due.append(min([g.at_s for g in mine] or [away_s or 0.0]))
        quorum_s = math.inf if len(came) < start.needed else sorted(came)[start.needed - 1]
        everyone = len(came) + len(gone) == len(start.candidates)
        starts_s = max(ended_s[-1], min(quorum_s, max(came + gone) if everyone else math.inf), *due)
        if round > 0 and ended_s[-2] < ended_s[-1]:
            _the_due_are_those_who_must_be_there(schedule, logs, seen[0], ended_s[-1])
        ended_s.append(min(log.rounds[round].at_s for log in logs))
        assert ended_s[-1] == starts_s, (
            f"round {round} ended at {ended_s[-1]}, could have at {starts_s}"
        )


def _the_due_are_those_who_must_be_there(
    schedule: Schedule, logs: list[Log], seen: tuple[tuple[int, ...], Start], began_s: float
) -> None:
    """What a worker computes at `began_s`, when the round is the next, is due if it is so old."""
    active, start = seen
    for rank, log in enumerate(logs):
        busy = [g for g in log.gradients if g.at_s >= began_s]
        tie = any(g.at_s == began_s and g.version != start.round - 1 for g in log.gradients)
        if schedule.max_staleness_rounds is None or rank not in active or not busy or tie:
            continue
        if busy[0].at_s == began_s:  # on time for the round before
            busy = busy[1:]
        if busy and log.away_since(start.round) is None:
            old = start.round - busy[0].version >= schedule.max_staleness_rounds
            assert (rank in start.due) == old, (
                f"worker {rank} computes {busy[0]}, and the due are {sorted(start.due)} in {start}"
            )


# --- the tests -----------------------------------------------------------------------------


def keeps_every_promise(seed: int) -> None:
    schedule = Schedule.drawn(seed)
    try:
        check(schedule, play(schedule))
    except Exception as error:
        error.add_note(
            f"{schedule}\nreplay it alone: pytest tests/test_schedules.py --schedule-seed {seed}"
        )
        raise


def test_every_schedule_keeps_every_promise(seeds: range) -> None:
    for seed in seeds:
        keeps_every_promise(seed)
