"""When a run has reached its target: read off a smoothed curve, so that no lucky look counts.

    score      accuracy, or -log(loss): higher is better
    curve      straight lines between evaluations, over the samples that all workers have applied
    smoothed   at x: the mean of the curve from x - window/2 to x + window/2
    reached    at the first x that two means confirm: of the window around x, and of the window
               that begins at x, both are at the target

A curve that touches the target and falls back has not reached it. Seconds are read at x, between
the two evaluations around it. The mean over a fixed stretch of samples hardly changes when every
other evaluation is left out: the answer is the trajectory's, not the cadence's. Nor does it depend
on how long the run goes on: what comes after the second window is not looked at.

                     ·  ·                        a first touch does not count
    target ───────·──────·──────·─x──·───·───
              ·              ·  ├──────┤         the window around x
                                  ├──────┤       the window from x on
"""

from __future__ import annotations

import math
from bisect import bisect_right

from offbeat.lab.goals import Target

_PLACES = 64
"""Places in a window at which the smoothed curve is looked at; fixed ones, whatever the cadence."""
_WORST = -1e9
"""The score of a model that has left the numbers."""
_LEAST_LOSS = 1e-300


class Reaching:
    """One run's way to its target, evaluation by evaluation."""

    def __init__(self, target: Target, window: float) -> None:
        self._target = target
        self._window = window
        self._goal = score(target, target.value, target.value)
        self._x: list[float] = []
        self._y: list[float] = []
        self._at_s: list[float] = []
        self._areas = [0.0]  # below the curve, up to each evaluation
        self._place: int | None = None  # the next one to look at
        self._before: tuple[float, float] | None = None  # the one before it, and its worse mean
        self.samples: float | None = None
        """Of all workers, when it was reached; None if it was not."""

    @property
    def seconds(self) -> float | None:
        """When it was reached."""
        return None if self.samples is None else self._read(self._at_s, self.samples)

    def add(self, samples: float, seconds: float, loss: float, accuracy: float | None) -> None:
        """Take the next evaluation; one of the same samples as the last says nothing new."""
        if self._x and samples <= self._x[-1]:
            return
        value = score(self._target, loss, accuracy)
        if self._x:
            width = samples - self._x[-1]
            self._areas.append(self._areas[-1] + width * (self._y[-1] + value) / 2)
        self._x.append(samples)
        self._y.append(value)
        self._at_s.append(seconds)
        self._look()

    def _look(self) -> None:
        """Look at every place whose two windows have been evaluated in full."""
        step = self._window / _PLACES
        if self._place is None:
            self._place = math.ceil(self._x[0] / step)
        last = self._x[-1] - self._window
        while self.samples is None and self._place * step <= last:
            x = self._place * step
            worse = min(self._smoothed(x), self._smoothed(x + self._window / 2))
            if worse >= self._goal:
                self.samples = self._crossing(x, worse)
            self._before = x, worse
            self._place += 1

    def _crossing(self, x: float, here: float) -> float:
        """Where the target was met, between the place before and this one."""
        if self._before is None:
            return x
        start, there = self._before
        return start + (x - start) * (self._goal - there) / (here - there)

    def _smoothed(self, x: float) -> float:
        """The mean around x; over a narrower stretch where the curve has only begun."""
        half = min(self._window / 2, x - self._x[0])
        if half <= 0:
            return self._read(self._y, x)
        return (self._area(x + half) - self._area(x - half)) / (2 * half)

    def _area(self, x: float) -> float:
        number = self._segment(x)
        width, here = x - self._x[number], self._read(self._y, x)
        return self._areas[number] + width * (self._y[number] + here) / 2

    def _read(self, values: list[float], x: float) -> float:
        """Read between the two evaluations around x."""
        number = self._segment(x)
        if number + 1 == len(values):
            return values[number]
        share = (x - self._x[number]) / (self._x[number + 1] - self._x[number])
        return values[number] + (values[number + 1] - values[number]) * min(max(share, 0.0), 1.0)

    def _segment(self, x: float) -> int:
        """The evaluation before x."""
        return min(max(bisect_right(self._x, x) - 1, 0), len(self._x) - 1)


def score(target: Target, loss: float, accuracy: float | None) -> float:
    """Return how good an evaluation is, by what the target is of: the higher, the better.

    Losses fall by factors, so it is their logarithm that is averaged.
    """
    if target.metric == "loss":
        return -math.log(max(loss, _LEAST_LOSS)) if math.isfinite(loss) else _WORST
    known = accuracy is not None and math.isfinite(accuracy) and math.isfinite(loss)
    return accuracy if known and accuracy is not None else _WORST
