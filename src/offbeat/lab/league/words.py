"""The league in words: facts, and sentences that claim what the intervals support."""

from __future__ import annotations

import math

from offbeat.lab.league.figures import NEAR, Overall
from offbeat.lab.league.load import League
from offbeat.report.spread import Interval

_UNITS = ("B", "kB", "MB", "GB")


def facts(league: League) -> list[str]:
    """What there is."""
    done, runs = len(league.whole), sum(cell.runs for cell in league.cells)
    asked = len(league.cells) + len(league.waiting)
    races = _races(done) if done == asked else f"{done} of {_races(asked)}"
    return [
        races,
        f"{len(league.labels)} algorithms",
        f"{runs:,} runs of {league.seeds} seeds",
        "virtual time",
        f"offbeat {', '.join(dict.fromkeys(league.versions))}",
    ]


def sentences(league: League, over_all: list[Overall]) -> list[str]:
    """Who is ahead over all races, and what that rests on."""
    if not over_all:
        return ["No race has been run to its end yet."]
    most = max(each.races for each in over_all)
    everywhere = [each for each in over_all if each.races == most]
    best = everywhere[0]
    text = (
        f"{best.label} is behind the least: in the median over {_races(best.races)} it needs "
        f"{best.median_behind:.2f} times the seconds of the fastest"
    )
    if best.first:
        text += f", in {_races(best.first)} it is the fastest, or as fast within the spread"
    steady = max(everywhere, key=lambda each: (each.near, -each.median_behind))
    text += f". Within {NEAR:g} times of the fastest most often: {steady.label}, "
    text += f"in {steady.near} of {steady.races}."
    if most < 2:
        text += " One race says nothing about others."
    return [text]


def _races(count: int) -> str:
    return f"{count} race{'' if count == 1 else 's'}"


def span(found: Interval | None, middle: bool = True) -> str:
    """An interval, with its median before it or without."""
    if found is None:
        return "–"
    if found.median == 0:
        return "never"
    high = "∞" if math.isinf(found.high) else f"{found.high:.2f}"
    low = f"{found.low:.2f}"
    return f"{found.median:.2f}" if middle else f"{low} to {high}"


def bytes_of(count: float | None) -> str:
    """So many bytes, in a unit that fits."""
    if count is None:
        return "–"
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g} {_UNITS[power]}"
