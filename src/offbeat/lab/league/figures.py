"""What the league's results say: ranks with what they may be, and every algorithm over all races.

A contestant's time is the median over its seeds, infinite if more than half of them never came to
the target. One is faster than another where the whole bootstrap interval of the speed-up, seed by
seed, says so. So a rank is a range: from how many are surely faster, to how many are surely slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from offbeat.lab.contestants import shown
from offbeat.lab.families import family
from offbeat.lab.league.load import Cell, League
from offbeat.lab.verdict import Standing, baseline, is_faster
from offbeat.report import spread
from offbeat.report.spread import ENOUGH_SEEDS, Interval

NEAR = 1.5
"""Within so many times the seconds of the best, a method is near it."""


@dataclass(frozen=True)
class Entry:
    """One algorithm in one race."""

    label: str
    family: str
    settings: str
    """What it was tuned to, in words."""
    edge: str
    reached: int
    seeds: int
    rank: tuple[int, int]
    """The best and the worst that it may be."""
    seconds: Interval
    behind: float
    """Its seconds over those of the best."""
    speed_up: Interval | None
    """Over synchronous SGD."""
    throughput: Interval | None
    efficiency: Interval | None
    sent_bytes: float | None
    """By a worker, for each of its steps."""
    staleness_rounds: float | None
    waited: float | None
    """The share of the workers' time."""
    dropped: float
    """The share of the samples."""


@dataclass(frozen=True)
class Overall:
    """One algorithm over all its races."""

    label: str
    family: str
    races: int
    first: int
    """Where it is the best, or as fast within the spread."""
    near: int
    never: int
    """Where it does not come to the target in most seeds."""
    behind: list[float]
    """Its seconds over those of the best, race by race."""

    @property
    def median_behind(self) -> float:
        return median(self.behind)


def entries(cell: Cell) -> list[Entry]:
    """The ranking of a race, the best first."""
    ordered = sorted(cell.standings, key=lambda each: (each.median_s, _missed(each)))
    base, best_s = baseline(ordered), ordered[0].median_s
    return [_entry(each, ordered, base, best_s) for each in ordered]


@dataclass(frozen=True)
class Figures:
    """All of a league: to find them takes seconds, so it is done once."""

    rankings: list[list[Entry]]
    """Race by race."""
    overall: list[Overall]


def of(league: League) -> Figures:
    """Find them."""
    rankings = [entries(cell) for cell in league.cells]
    return Figures(rankings, _over_all(league, rankings))


def _over_all(league: League, rankings: list[list[Entry]]) -> list[Overall]:
    """Every algorithm over all whole races, the one that is behind the least first.

    Who has been in fewer than half of them is after all others: its races may have been easy.
    """
    by_label: dict[str, list[Entry]] = {label: [] for label in league.labels}
    for cell, ranking in zip(league.cells, rankings, strict=True):
        for entry in ranking if cell.whole else ():
            by_label[entry.label].append(entry)
    found = [_overall(label, some) for label, some in by_label.items() if some]
    half = len(league.whole) / 2
    return sorted(
        found, key=lambda each: (each.races < half, each.median_behind, -each.first, -each.near)
    )


def profile(behind: list[float], at: list[float]) -> list[float]:
    """The share of races in which it needs at most so many times the seconds of the best."""
    return [sum(each <= limit for each in behind) / len(behind) for limit in at]


def _overall(label: str, some: list[Entry]) -> Overall:
    return Overall(
        label,
        some[0].family,
        len(some),
        sum(each.rank[0] == 1 and math.isfinite(each.behind) for each in some),
        sum(each.behind <= NEAR for each in some),
        sum(math.isinf(each.behind) for each in some),
        [each.behind for each in some],
    )


def _entry(mine: Standing, all_: list[Standing], base: Standing | None, best_s: float) -> Entry:
    run, steps = mine.runs[0], sum(each.steps or 0 for each in mine.runs)
    sent = [each.sent_bytes for each in mine.runs if each.sent_bytes is not None]
    sizes = [f"{name}={shown(value)}" for name, value in run.tuned.items()]
    utilization = [each.utilization for each in mine.runs if each.utilization is not None]
    reached = [each for each in mine.times.values() if math.isfinite(each)]
    return Entry(
        mine.label,
        family(run.algorithm),
        ", ".join([f"lr ×{run.rate:.3g}", *sizes]),
        run.edge,
        len(reached),
        len(mine.runs),
        _rank(mine, all_),
        spread.interval(mine.times.values()) or Interval(math.inf, math.inf, math.inf, 0),
        mine.median_s / best_s if math.isfinite(mine.median_s) else math.inf,
        mine.speed_up(base) if base is not None else None,
        mine.throughput(base) if base is not None else None,
        mine.efficiency(base) if base is not None else None,
        sum(sent) / steps if sent and steps else None,
        mine.mean("mean_staleness_rounds"),
        1 - fmean(utilization) if utilization else None,
        mine.dropped,
    )


def _rank(mine: Standing, all_: list[Standing]) -> tuple[int, int]:
    others = [each for each in all_ if each is not mine]
    faster = sum(_surely(each, mine) for each in others)
    slower = sum(_surely(mine, each) for each in others)
    return 1 + faster, len(all_) - slower


def _surely(one: Standing, other: Standing) -> bool:
    """As `is_faster`, without the bootstrap where all seeds say the same."""
    if one.median_s >= other.median_s:
        return False
    ours, theirs = one.times, other.times
    both = [seed for seed in ours if seed in theirs]
    everywhere = all(ours[seed] < theirs[seed] for seed in both)
    return (everywhere and len(both) >= ENOUGH_SEEDS) or is_faster(one, other)


def _missed(standing: Standing) -> int:
    return sum(map(math.isinf, standing.times.values()))
