"""The mean of a number that every round measures anew, over as long a past as still holds.

A long memory is exact and slow, a short one is quick and rough. So there are several, and the
longest is taken that agrees with all shorter ones: within so many standard errors of each. While
nothing changes that is the longest; after a change, one that has forgotten what was before.

The standard error is of a single measurement, which the differences between one and the next show:
a slow drift hardly makes them larger. A memory m has seen about (1 + m) / (1 - m) measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


class Average:
    """A mean, and how certain it is.

    Its numbers are in `sums`, a plain list that goes into checkpoints: how many measurements there
    were, the latest, the squares of their differences, and a sum for each memory.
    """

    def __init__(
        self,
        sums: list[float] | None = None,
        memories: Sequence[float] = (0.9, 0.97, 0.99, 0.997),
        agrees: float = 2.5,
    ) -> None:
        self.sums = sums if sums is not None else []
        if not self.sums:
            self.sums += [0.0] * (3 + len(memories))
        self._memories = memories
        self._agrees = agrees

    def add(self, value: float) -> None:
        """Take another measurement into the mean."""
        count, latest, squares, *sums = self.sums
        jump = (value - latest) ** 2 if count else 0.0
        self.sums[:3] = [count + 1, value, self._memories[-1] * squares + jump]
        self.sums[3:] = [
            memory * each + value for memory, each in zip(self._memories, sums, strict=True)
        ]

    @property
    def count(self) -> int:
        """How many measurements there were."""
        return int(self.sums[0])

    @property
    def mean(self) -> float:
        """What the number is by now; 0 if it was never measured.

        >>> average = Average()
        >>> for value in (1.0, 3.0, 2.0):
        ...     average.add(value)
        >>> round(average.mean, 2)  # not what a mean that begins at 0 would say
        2.0
        """
        return self._chosen()[0]

    @property
    def doubt(self) -> float:
        """The standard error of the mean."""
        return self._chosen()[1]

    def _chosen(self) -> tuple[float, float]:
        count, _, squares, *sums = self.sums
        if not count:
            return 0.0, 0.0
        # Half of a squared difference is the variance of one measurement, on average.
        variance = squares / 2 / _weight(self._memories[-1], max(count - 1, 1))
        shorter: list[tuple[float, float]] = []
        for memory, each in zip(self._memories, sums, strict=True):
            weight = _weight(memory, count)
            mean, doubt = each / weight, sqrt(variance * _weight(memory**2, count)) / weight
            if any(abs(mean - other) > self._agrees * its_doubt for other, its_doubt in shorter):
                break
            shorter.append((mean, doubt))
        return shorter[-1]


def _weight(memory: float, count: float) -> float:
    """The sum of 1, memory, memory^2, ...: so many of them."""
    return (1 - float(memory**count)) / (1 - memory)
