"""The partial all-reduce on real processes: the same promises as in virtual time.

A worker that computes long is late, and the others go on. A process that is stopped takes part in
nothing, so rounds wait for it; one that dies ends the run. Each fault proves that it happened.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from schedule_log import Log, Outcome, Starts
from schedule_play import live
from schedule_promises import check
from schedules import Plan, Schedule

import offbeat
from offbeat.errors import WorkerLostError
from offbeat.rounds import Rules
from offbeat.testing import processes
from offbeat.worlds import enter_world, leave_world

pytestmark = pytest.mark.real


# --- random schedules ----------------------------------------------------------------------

TRIGGERS: list[tuple[str | int, int | None, bool, str]] = [
    ("solo", None, False, ""),
    ("majority", None, False, ""),
    ("first:2", 3, False, ""),
    ("last:2", None, True, ""),
    (2, 1, False, ""),
    ("solo", None, True, ""),
    ("solo", 2, False, ""),
    ("all", 0, False, ""),
    ("all", None, False, "lockstep"),
    ("all", None, False, "lockstep"),
    ("all", None, False, "at boundary"),
    ("all", None, False, "at boundary"),
]
JUDGES = [
    "all: 1",
    "late: 2",
    "late stops: 2",
    "late longer: 1",
    "some: 5",
    "topped: 2",
    "in turn: 1",
]


def _schedule(seed: int, workers: int) -> Schedule:
    """Sleeps of milliseconds; one worker has little data, one has none, one is slow."""
    draw = Random(seed)
    quorum, bound, drop_late, how = TRIGGERS[seed % len(TRIGGERS)]
    lockstep, at_boundary = how == "lockstep", how == "at boundary"
    counts = [15] * workers
    counts[draw.randrange(workers)] = 5
    counts[draw.randrange(workers)] = 0
    slow = draw.randrange(workers)
    metrics = seed % 2 * 3
    return Schedule(
        seed=seed,
        workers=workers,
        latency_s=0.0,
        bandwidth_bytes_per_s=math.inf,
        compute_s=tuple(
            tuple(draw.choice([0.0, 0.002, 0.02 if rank == slow else 0.004]) for _ in range(count))
            for rank, count in enumerate(counts)
        ),
        apply_s=tuple(draw.choice([0.0, 0.0, 0.003]) for _ in counts),
        events=("metric",) * metrics,
        positions=tuple(
            tuple(sorted(draw.randint(0, count) for _ in range(metrics))) for count in counts
        ),
        stays=((),) * workers,
        looks=((),) * workers,
        followed=False,
        plans=(
            Plan(
                "real",
                Rules(
                    quorum,
                    lockstep=lockstep,
                    max_staleness_rounds=bound,
                    at_boundary=at_boundary,
                ),
                drop_late=drop_late,
                delay=int(at_boundary),
                waits=not at_boundary,
                samples=tuple(tuple(draw.randint(1, 3) for _ in range(count)) for count in counts),
                hasty=tuple(draw.random() < 0.2 for _ in counts),
            ),
        ),
    )


def _live_all(schedules: list[Schedule]) -> list[tuple[Log, Starts]]:
    world, results = enter_world(), []
    for schedule in schedules:
        starts: Starts = defaultdict(list)
        [log] = live(world, schedule, [starts])
        results.append((log, dict(starts)))
    leave_world(world)
    return results


@pytest.mark.parametrize("workers", [4, 8])
def test_random_sleeps_keep_every_promise(workers: int) -> None:
    schedules = [_schedule(seed, workers) for seed in range(len(TRIGGERS))]
    ended = processes(_live_all, workers, schedules)
    for number, schedule in enumerate(schedules):
        [plan], logs = schedule.plans, [each.result[number][0] for each in ended]
        starts: Starts = defaultdict(list)
        for each in ended:
            for round, seen in each.result[number][1].items():
                starts[round] += seen
        try:
            check(schedule, plan, Outcome(logs, starts), virtual=False)
        except AssertionError as error:
            error.add_note(f"{schedule}")
            raise
        if plan.rules.quorum == "solo" and plan.rules.max_staleness_rounds is None:
            late = [g for log in logs for g in log.gradients if g.arrival != "on time"]
            assert late, "nobody was late: the schedule proves nothing"


@pytest.mark.parametrize("workers", [4, 8])
def test_gradients_that_come_by_themselves_keep_every_promise(workers: int) -> None:
    schedules = []
    for seed, judge in enumerate(JUDGES):
        schedule = _schedule(seed, workers)
        [plan] = schedule.plans
        plan = Plan("queue", Rules("solo"), judge=judge, samples=plan.samples, hasty=plan.hasty)
        schedules.append(replace(schedule, plans=(plan,)))
    ended = processes(_live_all, workers, schedules)
    for number, schedule in enumerate(schedules):
        logs = [each.result[number][0] for each in ended]
        try:
            check(schedule, schedule.plans[0], Outcome(logs, {}), virtual=False)
        except AssertionError as error:
            error.add_note(f"{schedule}")
            raise


# --- slow, stopped, lost -------------------------------------------------------------------

HELD_S = 1.5
Seen = tuple[float, int, tuple[float, ...]]
"""The moment, by the machine's clock; the round; the samples of each rank."""
Held = tuple[list[Seen], float, float]
"""What a worker has seen; from when until when it was held."""


def _hold(how: str) -> tuple[float, float]:
    """Be busy for a while, or be stopped for a while; return from when until when."""
    began = time.monotonic()
    if how == "busy":
        time.sleep(HELD_S)
    else:
        stop, go = (f"os.kill({os.getpid()}, {n})" for n in (signal.SIGSTOP, signal.SIGCONT))
        code = f"import os, time; {stop}; time.sleep({HELD_S}); {go}"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    return began, time.monotonic()


def _held(how: str) -> Held:
    rank, seen, held = offbeat.rank(), [], (0.0, 0.0)

    def note(record: offbeat.Round) -> None:
        seen.append((time.monotonic(), record.round, record.samples_by_rank))

    with offbeat.partial_all_reduce(f"held {how}", torch.zeros(4), quorum="solo") as partial:
        for step in range(_steps(rank)):
            if step == 10 and rank == 1:
                held = _hold(how)
            time.sleep(0.01)
            tensor = torch.zeros(4)
            tensor[rank] = 1
            for record in partial.rounds(tensor):
                assert record.sum.views[0].tolist() == list(record.samples_by_rank)
                note(record)
        for record in partial._partial.leave():
            note(record)
    return seen, *held


def _steps(rank: int) -> int:
    return 20 if rank == 1 else 120


def _held_both() -> dict[str, Held]:
    return {how: _held(how) for how in ("busy", "stopped")}


@pytest.fixture(scope="module")
def both_held() -> list[dict[str, Held]]:
    return [ended.result for ended in processes(_held_both, 4)]


def _kept(how: str, both_held: list[dict[str, Held]]) -> tuple[list[Seen], float, float]:
    """Check the promises; return what worker 0 saw, and from when until when worker 1 was held."""
    _, began, ended = both_held[1][how]
    assert ended - began >= HELD_S, "worker 1 was not held"
    logs = [[seen[1:] for seen in held[how][0]] for held in both_held]
    for rank, log in enumerate(logs):
        assert log == logs[0]
        assert [round for round, _ in log] == list(range(len(log)))
        assert sum(samples[rank] for _, samples in log) == _steps(rank)
    return both_held[0][how][0], began, ended


def test_a_busy_worker_is_not_waited_for(both_held: list[dict[str, Held]]) -> None:
    seen, _, ended = _kept("busy", both_held)
    taken = {round: moment for moment, round, _ in both_held[1]["busy"][0]}
    missed = [each for each in seen if each[0] < ended <= taken[each[1]]]
    assert len(missed) > 5
    assert sum(samples[1] for *_, samples in missed) <= 1  # what it had given before


def test_a_stopped_worker_is_waited_for_and_not_given_up(both_held: list[dict[str, Held]]) -> None:
    # Its background activity is stopped as well, and a round is an all-reduce of everyone.
    seen, began, ended = _kept("stopped", both_held)
    moments = [moment for moment, *_ in seen]
    pauses = [b - a for a, b in pairwise(moments) if a < ended and b > began]
    assert max(pauses) > HELD_S / 2, "rounds went on without it"


def _lose(quorum: str, died: str) -> tuple[int | None, str, float, int]:
    """Make rounds until worker 2 is lost; return who, in which words, how late, after how many."""
    rank, rounds = offbeat.rank(), 0
    try:
        with offbeat.partial_all_reduce("lost", torch.zeros(4), quorum=quorum) as partial:
            while True:
                time.sleep(0.002 * (1 + rank))
                records = partial.rounds(torch.ones(4))
                if rank == 2 and rounds > 12:
                    Path(died).write_text(f"{time.monotonic()}")
                    os.kill(os.getpid(), signal.SIGKILL)
                rounds += len(list(records))
    except WorkerLostError as lost:
        told_s = time.monotonic() - float(Path(died).read_text())
        leaked = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        assert not leaked, leaked
        return lost.rank, str(lost), told_s, rounds
    raise AssertionError("worker 2 was not lost")


@pytest.mark.parametrize("quorum", ["solo", "all"])
def test_a_worker_killed_in_the_middle_of_rounds_ends_every_other_and_is_named(
    quorum: str, tmp_path: Path
) -> None:
    for ended in processes(_lose, 4, quorum, str(tmp_path / "died"), check=False):
        if ended.rank == 2:
            assert ended.exit_code == -signal.SIGKILL
            continue
        assert ended.error is None
        assert ended.exit_code == 0
        rank, message, told_s, rounds = ended.result
        assert rank == 2
        assert "worker 2 was lost" in message
        assert told_s < 20  # 0.1 s on a quiet machine; time-outs take minutes
        assert rounds > 5
