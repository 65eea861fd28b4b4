"""DropCompute's effective speed-up, predicted from times alone and measured in virtual time.

The paper's delay environment (cluster dropcompute-64, at 8 to 200 workers), 12 micro-batches a
round. Three figures for each number of workers, medians over seeds:

    paper      S_eff of the best threshold, if a worker stops on the spot, as the paper has it
    predicted  the same where the micro-batch that passes the threshold is computed to its end, as
               here: from drawn times, with the overhead of an exchange
    measured   samples a second of DropCompute with that threshold, over those of SyncSGD, in runs
               of other seeds without anything to learn (task `timing`)

    python benchmarks/dropcompute_gain.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
from typing import Any

import common

from offbeat.clusters import Cluster
from offbeat.lab.progress import Progress
from offbeat.lab.race import Race
from offbeat.lab.runners import Virtual
from offbeat.thresholds import Times, best_threshold, effective_speedup

CLUSTER = "dropcompute-64"
MICRO_BATCHES = 12
WORKERS = (8, 16, 32, 64, 112, 200)
PAPER = {8: 1.115, 16: 1.172, 32: 1.217, 64: 1.267, 112: 1.304, 200: 1.341}
"""What the paper's own rule comes to in its environment, by drawing (no network)."""
ROUNDS = 16
SEEDS = (1, 2, 3)


def drawn(workers: int, seed: int, rounds: int) -> Times:
    """By worker and round, when its micro-batches end."""
    cluster = Cluster.load(CLUSTER).resized(workers)
    found = []
    for rank in range(workers):
        device, mine = cluster.device(rank, seed), []
        for round_ in range(rounds):
            at, ends = 0.0, []
            for number in range(MICRO_BATCHES):
                at += device.seconds(round_ * MICRO_BATCHES + number, 1.0, 0.0)
                ends.append(at)
            mine.append(ends)
        found.append(mine)
    return found


def pace(spec: str, workers: int, seed: int, rounds: int) -> float:
    """Samples a second, of those that are not dropped."""
    race = Race.of(
        [spec], cluster=CLUSTER, task="timing", workers=workers, until=f"{rounds}rounds", seeds=1
    )
    with Virtual() as runner:
        result = race.one(runner, race.contestants[0], seed, Progress(), None)
    assert result.samples is not None, result.error
    assert result.seconds is not None
    return (result.samples - (result.dropped_samples or 0.0)) / result.seconds


def compared(workers: int, seed: int, rounds: int) -> dict[str, Any]:
    """The three figures for one number of workers and one seed."""
    times = drawn(workers, 100 + seed, 2 * rounds)
    serial_s = Cluster.load(CLUSTER).network.all_reduce_s(range(workers), 64)
    threshold_s = best_threshold(times, serial_s)
    stops_s = best_threshold(times, serial_s, completes=False)
    sync = pace(f"sync:micro_batches={MICRO_BATCHES}", workers, seed, rounds)
    settings = f"micro_batches={MICRO_BATCHES},threshold_s={threshold_s:.4f}"
    ours = pace(f"dropcompute:{settings}", workers, seed, rounds)
    return {
        "workers": workers,
        "seed": seed,
        "threshold_s": threshold_s,
        "paper": effective_speedup(times, stops_s, serial_s, completes=False),
        "predicted": effective_speedup(times, threshold_s, serial_s),
        "measured": ours / sync,
    }


def main() -> None:
    arguments = common.options(__doc__ or "").parse_args()
    counts, seeds = (WORKERS[:2], SEEDS[:1]) if arguments.quick else (WORKERS, SEEDS)
    rows = []
    for workers in counts:
        mine = [compared(workers, seed, ROUNDS) for seed in seeds]
        rows += mine
        shown = (
            f"{name} {statistics.median(row[name] for row in mine):.3f} "
            f"({min(row[name] for row in mine):.3f} to {max(row[name] for row in mine):.3f})"
            for name in ("paper", "predicted", "measured")
        )
        print(f"{workers:4} workers: {', '.join(shown)}; drawn by others {PAPER[workers]}")
    common.write(arguments.json, {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
