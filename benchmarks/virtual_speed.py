"""Virtual events a second, without tensors, beside SimPy's; and how time grows with events.

An event is one wake-up: a worker sleeps, others run, it wakes. The same program in both: W workers
that each sleep S times, for lengths that keep them out of step. Both take turns in one run.

    python benchmarks/virtual_speed.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator
from typing import Any

import common
import simpy

import offbeat
from offbeat.clusters import Cluster
from offbeat.worlds import enter_world


def ours(workers: int, sleeps: int) -> float:
    """Return events a second of the virtual world's verbs."""

    def worker() -> None:
        world = enter_world()
        pace = 1.0 + world.rank * 1e-3
        for _ in range(sleeps):
            world.sleep_until(world.now() + pace)

    cluster = Cluster.uniform(workers)
    began = time.perf_counter()
    run = offbeat.run(worker, cluster, own_random_state=False)
    return run.events / (time.perf_counter() - began)


def simpys(workers: int, sleeps: int) -> float:
    """Return events a second of SimPy, for the same program."""
    environment = simpy.Environment()

    def worker(pace: float) -> Generator[Any, Any, None]:
        for _ in range(sleeps):
            yield environment.timeout(pace)

    began = time.perf_counter()
    for rank in range(workers):
        environment.process(worker(1.0 + rank * 1e-3))
    environment.run()
    return workers * sleeps / (time.perf_counter() - began)


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    turns, events = (5, 100_000) if arguments.quick else (11, 400_000)
    mine, theirs = [], []
    for turn in range(turns):
        for side in ((ours, mine), (simpys, theirs))[:: 1 if turn % 2 else -1]:
            side[1].append(side[0](64, events // 64))
    growth = {}
    for factor in (1, 2, 4, 8):
        began = time.perf_counter()
        ours(64, factor * events // 512)
        growth[factor] = time.perf_counter() - began
    largest = 10_000
    big = ours(largest, max(10, events // largest))

    print(f"events grow by {', '.join(map(str, growth))}; seconds by ", end="")
    print(", ".join(f"{seconds / growth[1]:.2f}" for seconds in growth.values()))
    print(f"{largest:,} workers in one run: {big:,.0f} events/s")
    print(f"offbeat {common.spread([rate / 1e3 for rate in mine])} thousand events/s")
    print(f"SimPy   {common.spread([rate / 1e3 for rate in theirs])} thousand events/s")
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    print(f"offbeat over SimPy {common.spread(ratios)}")
    common.write(
        arguments.json,
        {
            "events_per_s": statistics.median(mine),
            "simpy_events_per_s": statistics.median(theirs),
            "max_workers": largest,
            "events_per_s_at_max_workers": big,
            "seconds_by_growth": growth,
        },
    )


if __name__ == "__main__":
    main()
