"""Is the ranking of `make demo` the same whatever the seeds?

The race of `make demo` with five times as many seeds. Tuning has a seed of its own, so five at a
time of them are what five demos with other seeds would show. By time to the target: the median of
each five, who comes first, second and third, and whether those three stay the first three.

    python benchmarks/demo.py [--quick] [--json FILE] [--race FILE]

--race takes the figures (`--json`) of that race instead of running it.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

SEEDS, DEMOS = 5, 5
MAKEFILE = Path(__file__).parents[1] / "Makefile"


def arguments_of_the_demo() -> list[str]:
    """What the Makefile races."""
    found = re.search(r"^DEMO := ((?:.*\\\n)*.*)$", MAKEFILE.read_text(), re.MULTILINE)
    assert found is not None
    return found[1].replace("\\\n", " ").split()


def raced(demos: int) -> dict[str, Any]:
    """The figures of the race."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "race.json"
        command = [sys.executable, "-m", "offbeat", "race", *arguments_of_the_demo()]
        command += ["--seeds", str(SEEDS * demos), "--json", str(out)]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def rankings(runs: list[dict[str, Any]]) -> list[dict[str, float | None]]:
    """Of every five seeds: the median times, the shortest first."""
    times = {(run["label"], run["seed"]): _or_never(run["seconds_to_target"]) for run in runs}
    labels, seeds = {run["label"] for run in runs}, sorted({run["seed"] for run in runs})
    found = []
    for first in range(0, len(seeds), SEEDS):
        some = seeds[first : first + SEEDS]
        medians = {
            label: statistics.median(times[label, seed] for seed in some) for label in labels
        }
        ordered = sorted(medians.items(), key=lambda item: item[1])
        found.append({label: None if math.isinf(s) else round(s, 2) for label, s in ordered})
    return found


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--race", type=Path, help="the figures of such a race")
    arguments = parser.parse_args()
    demos = 1 if arguments.quick else DEMOS
    race = json.loads(arguments.race.read_text()) if arguments.race else raced(demos)
    found = rankings(race["runs"])
    first_three = [sorted(list(each)[:3]) for each in found]
    for each in found:
        print(", ".join(f"{label} {seconds}" for label, seconds in each.items()))
    same = all(each == first_three[0] for each in first_three)
    print(f"the first three {'are the same' if same else 'differ'}: {first_three}")
    settings = {
        run["label"]: {"rate": run["rate"], **run["tuned"]}
        for run in race["runs"]
        if run["seed"] == race["runs"][0]["seed"]
    }
    figures = {"command": race["command"], "settings": settings, "demos": found}
    common.write(arguments.json, {**figures, "first_three_are_the_same": same})


if __name__ == "__main__":
    main()
