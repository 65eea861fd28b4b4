"""This code beside earlier code: the same benchmarks, each in its own version, by turns.

Three benchmarks that version 0.1 had, too. What is compared is what they say for one machine in one
state, and always the less, the better:

    race_overhead       CPU time of a virtual race over that of plain PyTorch, by method
    partial_all_reduce  seconds within a partial all-reduce, by number of workers and bytes
    straggler_step      a step of the fast ranks over their own compute, by ranks and method

In every turn each benchmark runs in the earlier code and here, in an order that changes with every
turn, with --quick; a figure that only one of them has is left out. Reported is now / before within
a turn: the median, the least and the most of the turns.

    git worktree add --detach ../before 8c47c2f    # the last of 0.1
    python benchmarks/against.py ../before [--turns 3] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).parent.parent
Figures = dict[str, float]


def _race_overhead(told: dict[str, Any]) -> Figures:
    return {name: each["ratio"] for name, each in told["overhead"].items()}


def _partial_all_reduce(told: dict[str, Any]) -> Figures:
    return {
        f"{verb}, {row['ranks']} workers, {row['bytes']} bytes": row[f"{verb}_s"]
        for row in told["rows"]
        for verb in ("solo", "majority")
    }


def _straggler_step(told: dict[str, Any]) -> Figures:
    return {
        f"{row['contestant']}, {row['ranks']} ranks": row["over_own_compute"]
        for row in told["rows"]
        if row["contestant"] != "own compute"
    }


BENCHMARKS: dict[str, Callable[[dict[str, Any]], Figures]] = {
    "race_overhead": _race_overhead,
    "partial_all_reduce": _partial_all_reduce,
    "straggler_step": _straggler_step,
}


def measured(code: Path, benchmark: str) -> Figures:
    """What one benchmark says of one checkout, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "figures.json"
        script = code / "benchmarks" / f"{benchmark}.py"
        subprocess.run(
            [sys.executable, script, "--quick", "--json", into],
            env={**os.environ, "PYTHONPATH": str(code / "src")},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return BENCHMARKS[benchmark](json.loads(into.read_text()))


def row(benchmark: str, figure: str, before: list[float], now: list[float]) -> dict[str, Any]:
    ratios = [mine / its for mine, its in zip(now, before, strict=True)]
    return {
        "benchmark": benchmark,
        "figure": figure,
        "before": before,
        "now": now,
        "now/before": {
            "median": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        },
    }


def compared(benchmark: str, before: Path, turns: int) -> list[dict[str, Any]]:
    """One row for each figure that both have."""
    figures: dict[Path, list[Figures]] = {before: [], HERE: []}
    for turn in range(turns):
        for code in (before, HERE) if turn % 2 == 0 else (HERE, before):
            figures[code].append(measured(code, benchmark))
    every = [each for each in figures.values() for each in each]
    both = [name for name in figures[HERE][0] if all(name in each for each in every)]
    return [
        row(benchmark, name, *([each[name] for each in figures[code]] for code in (before, HERE)))
        for name in both
    ]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("before", type=Path, help="a checkout of the earlier code")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    asked = parser.parse_args()
    rows = []
    for benchmark in asked.only[: 1 if asked.quick else None]:
        for each in compared(benchmark, asked.before.resolve(), 1 if asked.quick else asked.turns):
            ratio = each["now/before"]
            print(
                f"{benchmark:19} {each['figure']:32} {ratio['median']:.2f} "
                f"({ratio['least']:.2f} to {ratio['most']:.2f})",
                flush=True,
            )
            rows.append(each)
        common.write(asked.json, {"rows": rows})


if __name__ == "__main__":
    main()
