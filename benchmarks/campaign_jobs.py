"""How much faster a campaign is with two jobs than with one, on two cores. Wall time.

    python benchmarks/campaign_jobs.py [--quick] [--json FILE]

A small campaign, from the command's start to its end, with one job and with two. To start a process
that has torch takes some seconds, once: a campaign of an hour does not notice, this one does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

CAMPAIGN = """
algorithms = ["sync", "eager", "local", "dpsgd"]
clusters = ["two-slow-of-eight", "uniform-8"]
tasks = ["quadratic"]
rates = "1"
until = "{rounds}rounds"
seeds = 5
"""


def seconds(jobs: int, rounds: int) -> float:
    """Of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "campaign.toml"
        file.write_text(CAMPAIGN.format(rounds=rounds))
        began = time.monotonic()
        command = [sys.executable, "-m", "offbeat", "campaign", str(file), "--jobs", str(jobs)]
        subprocess.run(command, check=True, capture_output=True)
        return time.monotonic() - began


def main() -> None:
    arguments = common.options(__doc__ or "").parse_args()
    rounds = 40 if arguments.quick else 400
    one, two = seconds(1, rounds), seconds(2, rounds)
    print(f"one job {one:.1f} s, two {two:.1f} s: {one / two:.2f} times as fast")
    rows = [{"jobs": 1, "seconds": one}, {"jobs": 2, "seconds": two}]
    common.write(arguments.json, {"rounds": rounds, "rows": rows, "gain": one / two})


if __name__ == "__main__":
    main()
