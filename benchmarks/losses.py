"""Workers that are lost, freeze or join at random moments: tests/test_faults.py, longer.

Every run is drawn from its seed: a method, how slow messages are, who is lost, freezes or joins,
and when. A failure prints its seed and how to replay it, and the campaign goes on; the exit code is
1 then.

    python benchmarks/losses.py --count 100000 [--seed FIRST] [--jobs 2] [--quick] [--json FILE]

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
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import common
import torch
from schedules import chunks

if TYPE_CHECKING:
    from crashes import Schedule

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
QUICK = 300


def tried(seeds: range) -> tuple[int, int, list[tuple[int, str]]]:
    """Play these runs; how many faults were drawn, how many happened, and the seeds that failed."""
    from faults import survived

    torch.set_num_threads(1)
    logging.disable()
    drawn, happened, failed = 0, 0, []
    for seed in seeds:
        try:
            faults = survived(seed)
        except Exception as error:
            failed.append((seed, f"{type(error).__name__}: {error}".splitlines()[0]))
        else:
            drawn, happened = drawn + faults.drawn, happened + faults.happened
    return drawn, happened, failed


def campaign(first: int, count: int, jobs: int) -> dict[str, Any]:
    """Play all of them."""
    began, runs, drawn, happened = time.perf_counter(), 0, 0, 0
    failed: list[int] = []
    with ProcessPoolExecutor(jobs) as pool:
        parts = list(chunks(first, count))
        for seeds, (more, some, failures) in zip(parts, pool.map(tried, parts), strict=True):
            runs, drawn, happened = runs + len(seeds), drawn + more, happened + some
            for seed, how in failures:
                failed.append(seed)
                print(f"seed {seed}: {how}")
                print(
                    f"  replay it: pytest tests/test_faults.py --schedule-seed {seed}", flush=True
                )
            if runs % 5000 == 0:
                rate = runs / (time.perf_counter() - began)
                print(f"{runs} runs, {len(failed)} failed, {rate:.0f} a second", flush=True)
    return {
        "first_seed": first,
        "runs": runs,
        "drawn": drawn,
        "happened": happened,
        "failed": failed,
        "seconds": time.perf_counter() - began,
        "jobs": jobs,
    }


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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--exhaustive", action="store_true", help="after every event")
    parser.add_argument("--schedules", type=int, default=0, help="more of them, drawn")
    parser.add_argument("--pairs", type=int, default=2, help="second crashes after each event")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if asked.exhaustive:
        exhaustive(asked)
    count = QUICK if asked.quick else asked.count
    found = campaign(asked.seed, count, asked.jobs)
    print(
        "{runs} runs in {seconds:.0f} s: {happened} of {drawn} faults happened".format(**found),
        f"{len(found['failed'])} failures",
        sep="; ",
    )
    common.write(asked.json, found)
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
