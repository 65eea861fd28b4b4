"""What a server adds up, as a judge has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from offbeat.rounds import Judge, Then, Ticket, Verdict


@dataclass(slots=True)
class _Sum:
    total: Tensor | None = None
    oldest: float = inf
    """The version of the oldest gradient in it."""
    means: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By worker: the mean of its gradients, and how many they are."""


class Sums:
    """The gradients that have come since the last update, and those that are kept for later."""

    def __init__(self, judge: Judge) -> None:
        self._averages = judge.averages
        self._sums = [_Sum() for _ in range(judge.sums)]

    @property
    def oldest(self) -> float:
        """The version of the oldest gradient in the first sum."""
        return self._sums[0].oldest

    def add(self, gradient: Tensor, ticket: Ticket, verdict: Verdict) -> Tensor | None:
        """Add a gradient; return what the optimizer is to step on, if it is."""
        assert verdict.into is not None, "a gradient that is dropped is added to nothing"
        into, part = self._sums[verdict.into], gradient
        if self._averages:
            part = _change(into.means, ticket.worker, gradient)
        elif ticket.samples != 1.0:
            part = gradient * ticket.samples
        into.total = part if into.total is None else into.total + part
        into.oldest = min(into.oldest, ticket.version)
        if not verdict.update:
            return None
        first = self._sums[0].total
        assert first is not None, "a judge made an update of nothing"
        return first / verdict.divisor

    def then(self, then: Then) -> None:
        """After an update: empty the first sum, keep it, or let the second take its place."""
        if then != "keep":
            self._sums[0] = _Sum()
        if then == "next":
            self._sums.reverse()


def _change(means: dict[int, tuple[Tensor, int]], worker: int, gradient: Tensor) -> Tensor:
    """Put a gradient into its worker's mean; return by how much that has changed."""
    if worker not in means:
        means[worker] = (gradient, 1)
        return gradient
    mean, count = means[worker]
    change = (gradient - mean) / (count + 1)
    means[worker] = (mean + change, count + 1)
    return change
