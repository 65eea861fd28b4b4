"""What several seeds say: a median, and an interval that it lies in.

A time that was never reached is infinite, not left out: it is longer than any other. Contestants
meet the same noise and data in the same seed, so they are compared seed by seed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

ENOUGH_SEEDS = 5
"""With fewer, the interval of a median is too narrow: even from the lowest to the highest seed it
misses the true one in more than 6 of 100 cases."""
_DRAWS = 2000
_OUTSIDE = 0.025
"""The share of the draws beyond either end: an interval of 95 %."""


def seconds(value: float) -> str:
    """Write a length of time: with tenths, or if it is short with two digits.

    >>> seconds(1234.56), seconds(2.0), seconds(0.01234)
    ('1,234.6', '2.0', '0.012')
    """
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


class Interval(NamedTuple):
    """A median, and from where to where it may be."""

    median: float
    low: float
    high: float
    seeds: int

    @property
    def above_1(self) -> bool:
        """Whether a ratio is above 1, as far as one can tell."""
        return self.seeds >= ENOUGH_SEEDS and self.low > 1.0

    @property
    def below_1(self) -> bool:
        """Likewise, below."""
        return self.seeds >= ENOUGH_SEEDS and self.high < 1.0


def interval(values: Iterable[float]) -> Interval | None:
    """Return the median of what seeds brought, with its bootstrap interval; None of no seed.

    Seeds are drawn with replacement, always by the same draws: the same seeds, the same answer.
    """
    known = tuple(sorted(values))
    return _bootstrapped(known) if known else None


@lru_cache(maxsize=1024)
def _bootstrapped(known: tuple[float, ...]) -> Interval:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(known, k=len(known))) for _ in range(_DRAWS))
    outside = int(_OUTSIDE * _DRAWS)
    return Interval(statistics.median(known), medians[outside], medians[-1 - outside], len(known))


def speed_ups(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """How many times as fast we are, seed by seed, from seconds; 1 where neither arrived."""
    return [_ratio(our_s, their_s) for our_s, their_s in zip(ours, theirs, strict=True)]


def _ratio(our_s: float, their_s: float) -> float:
    if math.isinf(our_s):
        return 1.0 if math.isinf(their_s) else 0.0
    return their_s / our_s if our_s else math.inf
