"""Whether a profile gives back the cluster that its workers were paced by.

Three real processes are paced by a known cluster, and `offbeat profile` measures them. Printed is
what it found over what is known: each worker's speed, and its mean time for a micro-batch. The
machine's own hiccups are in it, so times above 1 say how noisy it was.

    python benchmarks/profile_round_trip.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common

from offbeat import Cluster

KNOWN = """
workers = 3
speed = [1.0, 0.8, 0.5]
[compute]
step_s = 0.03
[[noise]]
kind = "lognormal"
sigma = 0.1
"""


def mean_s(cluster: Cluster) -> list[float]:
    """Each worker's time for a micro-batch, over many."""
    devices = [cluster.device(rank, seed=5) for rank in range(cluster.workers)]
    steps = range(2000)
    return [statistics.fmean(each.seconds(step, 1.0, 0.0) for step in steps) for each in devices]


def round_trip(steps: int) -> dict[str, Any]:
    """Profile once; return found over known, by worker."""
    with tempfile.TemporaryDirectory() as folder:
        known, found = Path(folder) / "known.toml", Path(folder) / "found.toml"
        known.write_text(KNOWN)
        os.environ["OFFBEAT_PACE"] = str(known)
        common.torchrun("-m", 3, "offbeat", "profile", "-o", str(found), "--steps", str(steps))
        before, after = Cluster.load(known), Cluster.load(found)
    return {
        "speed": [b / a for a, b in zip(before.speeds, after.speeds, strict=True)],
        "time": [b / a for a, b in zip(mean_s(before), mean_s(after), strict=True)],
        "noise": [noise.kind for noise in after.noise],
    }


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    turns, steps = (2, 100) if arguments.quick else (7, 200)
    rows = [round_trip(steps) for _ in range(turns)]
    for what in ("speed", "time"):
        for rank, found in enumerate(zip(*(row[what] for row in rows), strict=True)):
            print(f"worker {rank}, {what:5} found over known: {common.spread(found)}")
    print("kinds of noise found:", [row["noise"] for row in rows])
    common.write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
