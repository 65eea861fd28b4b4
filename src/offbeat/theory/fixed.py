"""Workers of fixed speeds: how long a method takes to a target, at most or at least."""

from __future__ import annotations

from collections.abc import Sequence


def rounds_cost(seconds: Sequence[float], noise: float, signal: float = 1.0) -> list[float]:
    """T_m for m = 1..n: what reaching a target costs with the m fastest of workers so fast.

    A round takes as long as its m-th fastest worker, and 1 + S/m rounds are needed, in units of
    L Delta / epsilon. S = noise / signal is the useful number of gradients, sigma^2 / epsilon; a
    signal of 0 is an infinite S, in other units.
    """
    return [time_s * (signal + noise / m) for m, time_s in enumerate(sorted(seconds), start=1)]


def best_m(seconds: Sequence[float], noise: float) -> int:
    """The m with the least T_m; within 1 + ln n of what any method can reach.

    >>> best_m([1.0, 1.0, 1.0, 10.0], noise=100.0)
    3
    >>> best_m([1.0, 1.0, 1.0, 1.1], noise=100.0)
    4
    """
    costs = rounds_cost(seconds, noise)
    return costs.index(min(costs)) + 1
