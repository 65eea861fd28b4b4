"""The table of docs/choose.md: what campaigns have found, race by race.

    python benchmarks/choosing.py           write it into the page, between its two marks

Made from the files of results alone. When one of them has changed, run this again:
tests/test_choosing.py compares.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from offbeat.lab.league import load
from offbeat.lab.league.figures import Entry, entries
from offbeat.lab.league.load import Cell

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "choose.md"
RESULTS = [ROOT / "benchmarks" / "results" / f"{name}.jsonl" for name in ("league", "headlines")]
BEGIN, END = "<!-- races: benchmarks/choosing.py -->\n", "<!-- end of races -->\n"
HEAD = """\
| cluster | task | seeds | first, or as fast within the spread: times as fast as `sync` | then |
|---|---|---|---|---|
"""
NEXT = 3
"""How many are named that come after the first."""


def table() -> str:
    """Return it: a row for every race that was run to its end."""
    return HEAD + "".join(_row(cell) for cell in _cells())


def _cells() -> Iterator[Cell]:
    for file in RESULTS:
        yield from load([file]).whole


def _row(cell: Cell) -> str:
    ranking = entries(cell)
    first = [each for each in ranking if each.rank[0] == 1]
    then = [each for each in ranking if each.rank[0] > 1 and each.label != "sync"][:NEXT]
    about = str(tomllib.loads(cell.cluster_file).get("description", "")).rstrip(".")
    columns = (
        f"`{cell.cluster}`: {about[:1].lower()}{about[1:]}",
        f"`{cell.task}`",
        str(ranking[0].seeds),
        ", ".join(f"**`{each.label}`** {_times(each)}" for each in first),
        ", ".join(f"`{each.label}` {_times(each)}" for each in then),
    )
    return f"| {' | '.join(columns)} |\n"


def _times(entry: Entry) -> str:
    if (found := entry.speed_up) is None:
        return ""
    if found.median == 0:
        return "never"
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def written(page: str) -> str:
    """Return the page with the table of today."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {PAGE.name}")
