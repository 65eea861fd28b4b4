"""Learning curves of several seeds as one line with a band."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from typing import Literal, NamedTuple

from offbeat.report.runs import Run

POINTS = 160
"""Of a line that is drawn over several seeds."""


class Curve(NamedTuple):
    """The mean over seeds, and the lowest and highest of them; x ascends."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(
    group: list[Run], value: Literal["loss", "accuracy"], against: Literal["at_s", "samples"]
) -> Curve:
    """Return the curve of these runs, as far as all of them go.

    One seed keeps its own points; several are interpolated at the same places.
    """
    seeds = [points for run in group if (points := _points(run, value, against))]
    if not seeds:
        return Curve([], [], [], [])
    if len(seeds) == 1:
        x, y = [point[0] for point in seeds[0]], [point[1] for point in seeds[0]]
        return Curve(x, y, y, y)
    first, last = max(points[0][0] for points in seeds), min(points[-1][0] for points in seeds)
    if last <= first:
        return Curve([], [], [], [])
    x = [first + (last - first) * number / (POINTS - 1) for number in range(POINTS)]
    across = [[_at(points, place) for points in seeds] for place in x]
    mean = [statistics.fmean(values) for values in across]
    return Curve(x, mean, [min(values) for values in across], [max(values) for values in across])


def _points(run: Run, value: str, against: str) -> list[tuple[float, float]]:
    points = {
        getattr(line, against): y
        for line in run.evaluations
        if (y := getattr(line, value)) is not None and math.isfinite(y)
    }
    return sorted(points.items())


def _at(points: list[tuple[float, float]], x: float) -> float:
    """Interpolate between the two points around x."""
    after = min(max(bisect_right(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * min(max((x - x0) / (x1 - x0), 0.0), 1.0)
