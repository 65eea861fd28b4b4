"""What travels with the gradients of a partial round: a few numbers of every worker.

They lie in the margin of the last bucket. Each worker fills its own slots and leaves the others'
zero, so the sum over workers is a gathering, and all hold the same bits of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack
from typing import NamedTuple


class Share(NamedTuple):
    """One worker's slots. float32 must hold each exactly, or nearly where that will do."""

    high: float
    """The samples on its pile, in three parts whose sum is exact."""
    middle: float
    low: float
    micro_batches: float
    rates: float
    """A fingerprint of the learning rates; 0 if it does not count."""
    away: float
    age: float
    """How many rounds the gradient that it computes now does not know of."""
    stale: float
    """The oldest gradient's staleness + 1; 0 without any."""
    stale_samples: float
    """The sum of samples times staleness."""
    bad: float
    """The parameter whose gradient is not finite, + 1; 0 if all are."""
    seconds: float
    """What its latest micro-batches took, each."""
    square: float
    """The squared norm of its mean gradient, if anybody wants to know."""


_SLOTS = len(Share._fields)


class Shares:
    """All workers' slots, as the round has gathered them: a column for each, by rank."""

    def __init__(self, numbers: list[float], size: int) -> None:
        columns = [numbers[slot * size : (slot + 1) * size] for slot in range(_SLOTS)]
        self.samples = tuple(map(sum, zip(*columns[:3], strict=True)))
        (
            self.micro_batches,
            self.rates,
            self.away,
            self.age,
            self.stale,
            self.stale_samples,
            self.bad,
            self.seconds,
            self.square,
        ) = columns[3:]
        self.used = tuple(count > 0 for count in numbers[_SLOTS * size :])


def room(size: int, parameters: int) -> int:
    """How many numbers a header has."""
    return _SLOTS * size + parameters


def written(share: Share, used: Sequence[bool], rank: int, size: int) -> list[float]:
    """One worker's header: its own slots, then which parameters have a gradient."""
    numbers = [0.0] * (_SLOTS * size)
    numbers[rank::size] = share
    return [*numbers, *map(float, used)]


def in_parts(number: float) -> tuple[float, float, float]:
    """Split a number into three that float32 holds, and whose sum is exactly it."""
    high = _float32(number)
    middle = _float32(number - high)
    return high, middle, number - high - middle


def _float32(number: float) -> float:
    rounded: float = unpack("f", pack("f", number))[0]
    return rounded
