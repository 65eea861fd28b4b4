"""Workers of fixed speeds: how long a method takes to a target, at most or at least.

Worker i takes tau_i seconds for a gradient, the fastest first. H_m is the harmonic mean of the m
fastest; messages take no time. In units of L Delta / epsilon:

    full synchronous       tau_n (1 + S/n)            every round waits for the slowest
    m-synchronous          tau_m (1 + S/m)            every round waits for the m fastest
    plain asynchronous     H_n (1 + S/n)              by its best known analysis
    optimal                min over m of H_m (1 + S/m)
    unlike data            tau_n + mean(tau) S/n      every worker is needed: Malenia, Ringleader

The optimum is a lower bound for all methods on equal data, and Rennala SGD (arXiv 2305.12387) and
Ringmaster ASGD (arXiv 2501.16168) reach it. The best m of m-Synchronous SGD (arXiv 2602.03802) is
near it. Let A = min over m of tau_m (1 + S/m). Then 1/tau_i <= (1 + S/i) / A for every i, so

    H_m (1 + S/m) = (m + S) / (1/tau_1 + ... + 1/tau_m) >= A (m + S) / (m + S h_m) >= A / h_m

and  optimal <= best m <= h_n optimal <= (1 + ln n) optimal. Nor is the factor more than the number
of different speeds: all of one speed have the bound of the last of them, (1 + S/j) / A, and there
are at most j of them.

1000 workers, S = 100:

>>> from math import sqrt
>>> profiles = {"1": lambda i: 1.0, "sqrt i": sqrt, "i": float, "i^2": lambda i: float(i * i)}
>>> def row(tau):
...     seconds = [tau(i) for i in range(1, 1001)]
...     best, m = optimal_time(seconds, noise=100), best_m(seconds, noise=100)
...     yield f"{best.time_s:.4f} ({best.m})"
...     yield f"{m_sync_time(seconds, 100):.4f} ({m})"
...     yield f"{sync_time(seconds, 100):.4f}"
...     yield f"{async_time(seconds, 100):.4f}"
>>> columns = "{:8}{:16}{:16}{:>14}{:>12}".format
>>> print(columns("tau_i", "optimal (m)", "m-sync (m)", "synchronous", "async"))
tau_i   optimal (m)     m-sync (m)         synchronous       async
>>> for name, tau in profiles.items():
...     print(columns(name, *row(tau)))
1       1.1000 (1000)   1.1000 (1000)           1.1000      1.1000
sqrt i  10.7318 (115)   20.0000 (100)          34.7851     17.7991
i       32.5244 (32)    101.0000 (1)         1100.0000    146.9513
i^2     70.7074 (8)     101.0000 (1)      1100000.0000    669.1264

The logarithm is real. Workers with tau_i = i / (i + n), and S = n, are near the worst:

>>> for n in (10, 100, 1000, 10_000, 100_000):
...     seconds = [i / (i + n) for i in range(1, n + 1)]
...     ratio = m_sync_time(seconds, n) / optimal_time(seconds, n).time_s
...     print(f"{n:6}  {ratio:.2f} of at most {harmonic_number(n):.2f}")
    10  1.96 of at most 2.93
   100  3.34 of at most 5.19
  1000  5.08 of at most 7.49
 10000  7.00 of at most 9.79
100000  9.01 of at most 12.09
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import fsum, inf
from typing import NamedTuple


class Best(NamedTuple):
    """The least time, and with how many of the fastest workers it is reached."""

    time_s: float
    m: int


def harmonic_mean(seconds: Iterable[float], m: int | None = None) -> float:
    """H_m: the m fastest, computing all the time, bring m gradients every H_m seconds.

    Of all of them, if no m is given.

    >>> harmonic_mean([1.0, 2.0, 4.0]), harmonic_mean([1.0, 2.0, 4.0], m=1)
    (1.7142857142857142, 1.0)
    """
    ordered = _ordered(seconds)
    m = _within(m, len(ordered))
    return m / fsum(1 / tau for tau in ordered[:m])


def harmonic_number(n: int) -> float:
    """h_n = 1 + 1/2 + ... + 1/n, at most 1 + ln n; 0 for n = 0."""
    if n < 0:
        raise ValueError(f"n must be 0 or more, got {n}")
    return fsum(1 / i for i in range(1, n + 1))


def optimal_time(seconds: Iterable[float], noise: float) -> Best:
    """T_opt: no method takes less; the m is how many of the workers are worth having.

    Plain asynchronous SGD on these m alone is optimal, too, as long as speeds are what they are.

    >>> optimal_time([1.0, 1.0, 1.0, 10.0], noise=1.0)
    Best(time_s=1.3333333333333333, m=3)
    """
    ordered = _ordered(seconds)
    check_noise(noise)
    speeds = accumulate(1 / tau for tau in ordered)
    costs = [(m + noise) / speed for m, speed in enumerate(speeds, start=1)]
    least = min(costs)
    return Best(least, costs.index(least) + 1)


def sync_time(seconds: Iterable[float], noise: float) -> float:
    """Every round waits for everybody."""
    ordered = _ordered(seconds)
    return m_sync_time(ordered, noise, len(ordered))


def async_time(seconds: Iterable[float], noise: float) -> float:
    """Every gradient is applied when it comes, however stale; by the best known analysis."""
    ordered = _ordered(seconds)
    check_noise(noise)
    return harmonic_mean(ordered) * (1 + noise / len(ordered))


def m_sync_time(seconds: Iterable[float], noise: float, m: int | None = None) -> float:
    """T_m: every round waits for the m fastest; with the best m, if none is given."""
    ordered = _ordered(seconds)
    check_noise(noise)
    costs = rounds_cost(ordered, noise)
    return min(costs) if m is None else costs[_within(m, len(costs)) - 1]


def best_m(seconds: Iterable[float], noise: float) -> int:
    """The m with the least T_m; within h_n <= 1 + ln n of what any method can reach.

    >>> best_m([1.0, 1.0, 1.0, 10.0], noise=100.0)
    3
    >>> best_m([1.0, 1.0, 1.0, 1.1], noise=100.0)
    4
    """
    check_noise(noise)
    costs = rounds_cost(_ordered(seconds), noise)
    return costs.index(min(costs)) + 1


def rounds_cost(seconds: Sequence[float], noise: float, signal: float = 1.0) -> list[float]:
    """T_m for m = 1..n: what reaching a target costs with the m fastest of workers so fast.

    A round takes as long as its m-th fastest worker, and 1 + S/m rounds are needed, in units of
    L Delta / epsilon. S = noise / signal is the useful number of gradients, sigma^2 / epsilon; a
    signal of 0 is an infinite S, in other units. Nothing is checked here.
    """
    return [time_s * (signal + noise / m) for m, time_s in enumerate(sorted(seconds), start=1)]


def heterogeneous_time(seconds: Iterable[float], noise: float) -> float:
    """Where workers' data differ, so that a gradient of every one is needed: Malenia, Ringleader.

    >>> heterogeneous_time([1.0, 2.0, 6.0], noise=4.0)  # 6 + 3 * 4/3
    10.0
    """
    ordered = _ordered(seconds)
    check_noise(noise)
    mean = fsum(ordered) / len(ordered)
    return ordered[-1] + mean * noise / len(ordered)


def updates_time(seconds: Iterable[float], updates: float) -> float:
    """t(R) = 2 min over m of H_m (1 + R/m): within it, Ringmaster ASGD makes R updates, always.

    It is Ringmaster that interrupts a worker whose gradient has become too stale. Seconds, as
    measured, and not in units of anything.

    >>> updates_time([1.0, 2.0, 4.0], updates=10)
    14.857142857142858
    """
    if not updates >= 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    return 2 * optimal_time(seconds, updates).time_s


def exponential_round_time(n: int, m: int) -> float:
    """What a round of m takes on average if all n workers' times are exponential, with mean 1.

    h_n - h_{n-m}: noise alone makes a synchronous round of 1000 workers 7.5 times as long.

    >>> [round(exponential_round_time(1000, m), 2) for m in (500, 900, 1000)]
    [0.69, 2.3, 7.49]
    """
    return fsum(1 / i for i in range(n - _within(m, n) + 1, n + 1))


def _ordered(seconds: Iterable[float]) -> list[float]:
    """The workers' times, the fastest first. A time may be infinite, if not that of all."""
    times = list(seconds)
    for rank, tau in enumerate(times):
        if not tau > 0:
            raise ValueError(f"a gradient must take more than 0 s, got {tau} for worker {rank}")
    times.sort()
    if not times or times[0] == inf:
        raise ValueError(f"at least one worker must take finitely long, got {len(times)} workers")
    return times


def check_noise(noise: float) -> None:
    """S is a finite number; where there is no signal, there is nothing to reckon with."""
    if not 0 <= noise < inf:
        raise ValueError(f"noise must be finite and at least 0, got {noise}")


def _within(m: int | None, n: int) -> int:
    """All n workers, or the m that are asked for."""
    if m is None:
        return n
    if not 1 <= m <= n:
        raise ValueError(f"m must be between 1 and the {n} workers, got {m}")
    return m
