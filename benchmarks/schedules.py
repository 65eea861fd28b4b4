"""The engine under as many random schedules as you have time for: tests/test_schedules.py, longer.

Every schedule is played in virtual time and held against all promises. A failure prints its seed
and how to replay it, and the campaign goes on; the exit code is 1 then.

    python benchmarks/schedules.py --count 1000000 [--seed FIRST] [--jobs 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
CHUNK = 200
SECONDS = 60  # of the processor, for one schedule: a hundredth is usual, so it spins


def _too_long(*_: object) -> None:
    raise TimeoutError(f"no end after {SECONDS} s of the processor")


def tried(seeds: range) -> list[tuple[int, str]]:
    """Play these schedules; return the seeds of those that broke a promise, and how."""
    from schedule_promises import keeps_every_promise

    failures = []
    signal.signal(signal.SIGPROF, _too_long)
    for seed in seeds:
        # A failed run leaves generators behind, which complain when they are thrown away.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                keeps_every_promise(seed)
            except Exception as error:
                failures.append((seed, f"{type(error).__name__}: {error}".splitlines()[0]))
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return failures


def chunks(first: int, count: int) -> Iterator[range]:
    """The seeds, a few hundred at a time."""
    for begin in range(first, first + count, CHUNK):
        yield range(begin, min(begin + CHUNK, first + count))


def campaign(first: int, count: int, jobs: int) -> tuple[list[int], float]:
    """Try all; return the seeds that failed, and the seconds it took."""
    began, failed, done = time.perf_counter(), [], 0
    with ProcessPoolExecutor(jobs) as pool:
        for seeds, failures in zip(
            chunks(first, count), pool.map(tried, chunks(first, count)), strict=True
        ):
            done += len(seeds)
            for seed, how in failures:
                failed.append(seed)
                print(f"schedule {seed} failed: {how}")
                print(f"  replay it: pytest tests/test_schedules.py --schedule-seed {seed}")
            if done % (50 * CHUNK) == 0:
                rate = done / (time.perf_counter() - began)
                print(f"{done} schedules, {len(failed)} failed, {rate:.0f} a second", flush=True)
    return failed, time.perf_counter() - began


def main() -> int:
    parser = common.options(__doc__ or "")
    parser.add_argument("--count", type=int, default=1_000_000, help="schedules to try")
    parser.add_argument("--seed", type=int, default=0, help="the first one's number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    count = min(options.count, 2000) if options.quick else options.count
    failed, seconds = campaign(options.seed, count, options.jobs)
    print(f"{count} schedules from {options.seed} on, {len(failed)} failed, in {seconds:.0f} s:")
    print(f"{count / seconds:.1f} a second with {options.jobs} processes")
    common.write(
        options.json,
        {
            "first_seed": options.seed,
            "schedules": count,
            "failed": failed,
            "seconds": seconds,
            "jobs": options.jobs,
        },
    )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
