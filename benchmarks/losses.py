"""Workers that are lost at random moments, in virtual time: tests/test_survival.py, longer.

Every run is drawn from its seed: a method, how slow messages are, who is lost, and when; in half of
them two are lost, often while the others regroup. A failure prints its seed, and the campaign goes
on; the exit code is 1 then. `--seed FIRST --count 1` replays one.

    python benchmarks/losses.py --count 100000 [--seed FIRST] [--joins] [--jobs 2] [--quick]
        [--json FILE]

`--joins`: a worker joins at a random moment, while others are lost: tests/test_joining.py, longer.

`--exhaustive`: one small schedule of every method that survives (tests/crashes.py), and of
`--schedules` drawn ones, in which each worker crashes after each event of the virtual clock. Then
pairs: after each event one worker crashes, and another `--pairs` times after one of the events that
follow, while the others regroup.

    python benchmarks/losses.py --exhaustive [--schedules N] [--pairs N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import common
import torch
from schedules import chunks

import offbeat

if TYPE_CHECKING:
    from crashes import Schedule

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
LATENCIES_S = (1e-5, 1e-3, 0.02, 0.1)
QUICK = 300


@cache
def surviving() -> list[str]:
    """The methods that go on without a worker."""
    from test_survival import ALGORITHMS, WORKERS

    return [name for name in ALGORITHMS if ALGORITHMS[name].make(WORKERS).survives]


@cache
def span(name: str, latency_s: float) -> tuple[float, float]:
    """When all are attached, and when a run without losses ends."""
    from test_survival import ALGORITHMS, WORKERS, Lives, cluster

    lives = Lives(ALGORITHMS[name].make(WORKERS))
    ended = offbeat.run(lives, cluster(latency_s=latency_s))
    return lives.attached_s, ended.seconds


def lived(seed: int) -> int:
    """One run; how many were lost."""
    from test_survival import ALGORITHMS, WORKERS, Lives, lived_through

    draws = Random(f"loss {seed}")
    name = draws.choice(surviving())
    latency_s = draws.choice(LATENCIES_S)
    begins_s, ends_s = span(name, latency_s)
    first, second = draws.sample(range(WORKERS), 2)
    crashes = [(first, draws.uniform(begins_s + 1e-6, ends_s))]
    if draws.random() < 0.5:
        soon, later = 4 * latency_s * draws.random(), draws.uniform(0, ends_s - begins_s)
        crashes.append((second, crashes[0][1] + draws.choice([0.0, soon, later])))
    return lived_through(Lives(ALGORITHMS[name].make(WORKERS)), *crashes, latency_s=latency_s)


def joined(seed: int) -> int:
    """One run; how many have joined, and stayed."""
    from test_joining import METHODS, drawn

    draws = Random(f"join {seed}")
    return int(drawn(draws.choice(list(METHODS)), draws))


def tried(seeds: range, joins: bool) -> tuple[int, list[tuple[int, str]]]:
    """Play these runs; return how many were lost or have joined, and the seeds that failed."""
    torch.set_num_threads(1)
    logging.disable()
    counted, failed = 0, []
    for seed in seeds:
        try:
            counted += joined(seed) if joins else lived(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}".splitlines()[0]))
    return counted, failed


def campaign(first: int, count: int, joins: bool, jobs: int) -> tuple[int, list[int]]:
    """Play all; return how many were lost or have joined, and the seeds that failed."""
    began, counted, failed, done = time.perf_counter(), 0, [], 0
    with ProcessPoolExecutor(jobs) as pool:
        parts = list(chunks(first, count))
        for seeds, (some, failures) in zip(
            parts, pool.map(partial(tried, joins=joins), parts), strict=True
        ):
            counted, done = counted + some, done + len(seeds)
            for seed, how in failures:
                failed.append(seed)
                print(f"seed {seed}: {how}", flush=True)
            if done % 5000 == 0:
                rate = done / (time.perf_counter() - began)
                print(f"{done} runs, {len(failed)} failed, {rate:.0f} a second", flush=True)
    return counted, failed


# --- after every event ---------------------------------------------------------------------------

SOON = 60  # events after the first crash in which the second one comes
QUICK_STRIDE = 10


class Tally:
    """What the runs of one schedule have come to."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.runs = self.crashes = 0
        self.failed: list[str] = []

    def run(self, *crashes: tuple[int, int]) -> None:
        """One run, in which these workers crash after these events."""
        self.runs += 1
        try:
            self.crashes += self.schedule.lived_through(*crashes)
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failed.append(f"{self.schedule} {crashes}: {words}")
            print(self.failed[-1], flush=True)


def exhaust(schedule: Schedule, pairs: int, stride: int) -> tuple[Tally, Tally]:
    """Every crash of one worker, and some of two."""
    ones, twos = Tally(schedule), Tally(schedule)
    ranks, draws = range(len(schedule.steps)), Random(str(schedule))
    for event in schedule.events()[::stride]:
        for rank in ranks:
            ones.run((event, rank))
        for _ in range(pairs if len(ranks) > 2 else 0):
            first, second = draws.sample(ranks, 2)
            twos.run((event, first), (event + draws.randrange(SOON), second))
    return ones, twos


def all_events(schedules: int, first: int, pairs: int, quick: bool) -> list[dict[str, Any]]:
    """A row for every schedule."""
    from crashes import Schedule, names

    chosen = [Schedule(name) for name in names(3)]
    chosen += [Schedule.drawn(seed) for seed in range(first, first + schedules)]
    rows = []
    for schedule in chosen:
        ones, twos = exhaust(schedule, pairs, QUICK_STRIDE if quick else 1)
        counts = f"{ones.runs} runs, {ones.crashes} crashes"
        counts += f"; pairs {twos.runs} runs, {twos.crashes} crashes"
        failed = ones.failed + twos.failed
        print(f"{schedule}: {counts}; {len(failed)} failures", flush=True)
        facts = {"runs": ones.runs, "crashes": ones.crashes}
        facts |= {"pair_runs": twos.runs, "pair_crashes": twos.crashes}
        rows.append({"schedule": str(schedule), **facts, "failed": failed})
    return rows


def exhaustive(asked: argparse.Namespace) -> None:
    began = time.perf_counter()
    rows = all_events(asked.schedules, asked.seed, asked.pairs, asked.quick)
    total = {
        key: sum(row[key] for row in rows)
        for key in ("runs", "crashes", "pair_runs", "pair_crashes")
    }
    failed = sum(len(row["failed"]) for row in rows)
    took_s = time.perf_counter() - began
    print(f"{len(rows)} schedules in {took_s:.0f} s: {total}, {failed} failures")
    common.write(asked.json, {"rows": rows})
    sys.exit(bool(failed))


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--joins", action="store_true", help="a worker joins meanwhile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--exhaustive", action="store_true", help="after every event")
    parser.add_argument("--schedules", type=int, default=0, help="more of them, drawn")
    parser.add_argument("--pairs", type=int, default=2, help="second crashes after each event")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if asked.exhaustive:
        exhaustive(asked)
    count, what = QUICK if asked.quick else asked.count, "joined" if asked.joins else "lost"
    began = time.perf_counter()
    counted, failed = campaign(asked.seed, count, asked.joins, asked.jobs)
    took_s = time.perf_counter() - began
    print(f"{count} runs in {took_s:.0f} s, {counted} workers {what}, {len(failed)} failures")
    common.write(
        asked.json,
        {"rows": [{"first_seed": asked.seed, "runs": count, what: counted, "failed": failed}]},
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
