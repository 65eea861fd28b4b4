"""Which gradient is late: by the version of its parameters, or by the worker's own step number?

eager-SGD's paper counts steps: a worker's t-th gradient is for round t, and late once that round
has started. Ours counts versions: it is late if a round has started since its parameters. Both with
three quorums, on clusters that differ in kind: always slow workers, workers that are slow in turns,
noise. Digits, each with the best of the same learning rates, by `offbeat.lab`'s race in virtual
time: seconds to 90 % accuracy on the held-out part.

    python benchmarks/lateness.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common

CLUSTERS = ("two-slow-of-eight", "eager-cifar-8", "noisy-neighbours-16")
QUORUMS = ("0.5", "majority", "solo")
TARGET = "accuracy=0.9"
SEEDS = 5
RATES = "1,2,4"


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    clusters, seeds = (CLUSTERS[:1], 1) if arguments.quick else (CLUSTERS, SEEDS)
    results: dict[str, dict[str, object]] = {}
    for cluster in clusters:
        contestants = [
            f"eager:quorum={quorum},lateness={lateness}"
            for quorum in (QUORUMS[:1] if arguments.quick else QUORUMS)
            for lateness in ("version", "step")
        ]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "race.json"
            command = [sys.executable, "-m", "offbeat", "race", *contestants]
            command += ["--cluster", cluster, "--target", TARGET, "--rates", RATES]
            command += ["--seeds", str(seeds), "--json", str(out)]
            subprocess.run(command, check=True)
            results[cluster] = json.loads(out.read_text())
    common.write(arguments.json, {"target": TARGET, "seeds": seeds, "races": results})


if __name__ == "__main__":
    main()
