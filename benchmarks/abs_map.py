"""Prints the map of abs_map.toml: how many times as fast ABS-SGD is as the best baseline.

    python benchmarks/abs_map.py benchmarks/results/abs_map.jsonl

Rows are the noise of a micro-batch's gradient, columns what an exchange takes of a micro-batch. In
brackets the bootstrap interval, seed by seed; a race that is not whole is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offbeat.lab import league
from offbeat.lab.verdict import Standing


def compared(cell: league.Cell) -> str:
    """ABS-SGD against the best of the others."""
    by_label = {each.label: each for each in cell.standings}
    ours = by_label.pop("abs")
    best: Standing = min(by_label.values(), key=lambda each: each.median_s)
    gain = ours.speed_up(best)
    return f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f}) {best.label}"


def main() -> None:
    found = league.load([Path(name) for name in sys.argv[1:]])
    columns = sorted({cell.cluster for cell in found.whole}, key=lambda name: float(name[9:]))
    print(f"| noise | {' | '.join(name.removeprefix('exchange-') for name in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for task in dict.fromkeys(cell.task for cell in found.whole):
        cells = {cell.cluster: compared(cell) for cell in found.whole if cell.task == task}
        row = " | ".join(cells.get(name, "not run") for name in columns)
        print(f"| {task.removeprefix('quadratic:')} | {row} |")


if __name__ == "__main__":
    main()
