"""Workers that are lost at random moments, in virtual time: tests/test_survival.py, longer.

Every run is drawn from its seed: a method, how slow messages are, who is lost, and when; in half of
them two are lost, often while the others regroup. A failure prints its seed, and the campaign goes
on; the exit code is 1 then. `--seed FIRST --count 1` replays one.

    python benchmarks/losses.py --count 10000 [--seed FIRST] [--quick] [--json FILE]
"""

from __future__ import annotations

import logging
import sys
import time
from functools import cache
from pathlib import Path
from random import Random

import common
import torch

import offbeat

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
LATENCIES_S = (1e-5, 1e-3, 0.02, 0.1)
QUICK = 300


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
    name = draws.choice([key for key in ALGORITHMS if ALGORITHMS[key].make(WORKERS).survives])
    latency_s = draws.choice(LATENCIES_S)
    begins_s, ends_s = span(name, latency_s)
    first, second = draws.sample(range(WORKERS), 2)
    crashes = [(first, draws.uniform(begins_s + 1e-6, ends_s))]
    if draws.random() < 0.5:
        soon, later = 4 * latency_s * draws.random(), draws.uniform(0, ends_s - begins_s)
        crashes.append((second, crashes[0][1] + draws.choice([0.0, soon, later])))
    return lived_through(Lives(ALGORITHMS[name].make(WORKERS)), *crashes, latency_s=latency_s)


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    count = QUICK if asked.quick else asked.count
    began, lost, failed = time.perf_counter(), 0, []
    for seed in range(asked.seed, asked.seed + count):
        try:
            lost += lived(seed)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    took_s = time.perf_counter() - began
    print(f"{count} runs in {took_s:.0f} s, {lost} workers lost, {len(failed)} failures")
    common.write(asked.json, {"rows": [{"runs": count, "lost": lost, "failed": failed}]})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
