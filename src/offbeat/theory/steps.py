"""Limits, step sizes, numbers of updates: what theory would have a method set.

Ringmaster ASGD (arXiv 2501.16168) applies every gradient whose staleness is below R. Two analyses
say with which step size gamma, and how many updates K then bring the mean of |gradient|^2 down to
epsilon. With S = sigma^2 / epsilon:

    "ringmaster"   gamma = min(1/(2 R L), 1/(4 S L))             K = (8 R + 16 S) L Delta / epsilon
    "birch"        gamma = min(1/(2 L), 1/(2 (R-1) L), 1/(4 S L))  K = (4 R + 8 S) L Delta / epsilon

The first is the paper's own (its body was not at hand: as others restate it), the second, which is
tighter, that of Birch SGD (arXiv 2505.09218). Both are for plain SGD, and hold for the worst
function there is: a practical step is larger, and is tuned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, inf, sqrt
from typing import Literal

from offbeat.theory.fixed import check_noise, harmonic_mean, optimal_time, updates_time

Analysis = Literal["ringmaster", "birch"]
_COUNTS = ("limit", "m", "workers")


def staleness_limit(noise: float) -> int:
    """R = max(1, ceil(S)): as stale as the noise hides; no speed need be known.

    >>> staleness_limit(0.2), staleness_limit(99.5)
    (1, 100)
    """
    _check(noise=noise)
    return max(1, ceil(noise))


def staleness_limit_by_speed(seconds: Iterable[float], noise: float) -> int:
    """R = max(1, sqrt(m S)), of the m workers that the optimum has; rounded up.

    Rounding up changes nothing: staleness is whole, so "below R" means the same. It is where
    H_m (1 + R/m) (1 + S/R), the time that R updates take times how often, is least.

    >>> staleness_limit_by_speed([1.0] * 25, noise=100.0)
    50
    """
    return max(1, ceil(sqrt(optimal_time(seconds, noise).m * noise)))


def ringmaster_step_size(
    limit: int, noise: float, smoothness: float = 1.0, analysis: Analysis = "birch"
) -> float:
    """Gamma of Ringmaster ASGD.

    >>> ringmaster_step_size(100, 100.0, analysis="ringmaster")
    0.0025
    >>> ringmaster_step_size(1, 0.0), ringmaster_step_size(101, 1.0)
    (0.5, 0.005)
    """
    _check(limit=limit, noise=noise, smoothness=smoothness)
    by_staleness = {"ringmaster": 2 * limit, "birch": max(2, 2 * (limit - 1))}
    return 1 / (max(_of(analysis, by_staleness), 4 * noise) * smoothness)


def ringmaster_updates(
    limit: int, noise: float, difficulty: float = 1.0, analysis: Analysis = "birch"
) -> int:
    """K: after so many updates of Ringmaster ASGD, with that step size, the target is reached.

    >>> ringmaster_updates(100, 100.0, analysis="ringmaster"), ringmaster_updates(100, 100.0)
    (2400, 1200)
    """
    _check(limit=limit, noise=noise, difficulty=difficulty)
    least = {"ringmaster": 8 * limit + 16 * noise, "birch": 4 * limit + 8 * noise}
    return ceil(_of(analysis, least) * difficulty)


def ringmaster_time(
    seconds: Iterable[float],
    limit: int,
    noise: float,
    difficulty: float = 1.0,
    analysis: Analysis = "birch",
) -> float:
    """Within t(R) ceil(K/R) seconds Ringmaster ASGD is at the target, at workers' fixed speeds.

    With R = S and a difficulty of 1 that is 24 times the optimum: what is lost is a constant.

    >>> seconds = [float(i) for i in range(1, 1001)]
    >>> ringmaster_time(seconds, 100, 100.0) / optimal_time(seconds, 100.0).time_s
    24.0
    """
    updates = ringmaster_updates(limit, noise, difficulty, analysis)
    return updates_time(seconds, limit) * ceil(updates / limit)


def m_sync_step_size(m: int, noise: float, smoothness: float = 1.0) -> float:
    """Gamma of m-Synchronous SGD: min(1/L, m/(2 S L)).

    >>> m_sync_step_size(10, 100.0), m_sync_step_size(1000, 100.0)
    (0.05, 1.0)
    """
    _check(m=m, noise=noise, smoothness=smoothness)
    return 1 / (max(1.0, 2 * noise / m) * smoothness)


def m_sync_rounds(m: int, noise: float, difficulty: float = 1.0) -> int:
    """After so many rounds of m-Synchronous SGD, with that step size, the target is reached.

    A round with gamma <= 1/L lowers the loss by gamma/2 |gradient|^2 - L gamma^2 sigma^2 / (2 m),
    on average. So the mean of |gradient|^2 over K rounds is at most
    2 Delta / (gamma K) + L gamma sigma^2 / m. That gamma makes the second half of epsilon, and
    K = 4 max(1, 2 S/m) L Delta / epsilon the first.

    >>> m_sync_rounds(10, 100.0), m_sync_rounds(1000, 100.0)
    (80, 4)
    """
    _check(m=m, noise=noise, difficulty=difficulty)
    return ceil(4 * max(1.0, 2 * noise / m) * difficulty)


def ringleader_step_size(
    gradients: Sequence[float], noise: float, smoothness: float = 1.0
) -> float:
    """Gamma of Ringleader ASGD (arXiv 2509.22860), where the workers' data differ.

    min(1/(8 n L), B/(10 S L)); B is the harmonic mean of how many gradients each of the n workers
    has in the round.

    >>> ringleader_step_size([4, 2, 1], noise=100.0)  # B = 12/7
    0.0017142857142857142
    >>> ringleader_step_size([4, 2, 1], noise=1.0)
    0.041666666666666664
    """
    _check(noise=noise, smoothness=smoothness)
    if not all(each >= 1 for each in gradients):
        raise ValueError(f"every worker must have a gradient in the round, got {gradients}")
    batch = harmonic_mean(gradients)
    return 1 / (max(8 * len(gradients), 10 * noise / batch) * smoothness)


def delay_adaptive_scale(workers: int, staleness: int) -> float:
    """By what Delay-Adaptive ASGD multiplies the step of a gradient: n / max(n, staleness).

    >>> delay_adaptive_scale(8, 3), delay_adaptive_scale(8, 8), delay_adaptive_scale(8, 32)
    (1.0, 1.0, 0.25)
    """
    _check(workers=workers)
    if staleness < 0:
        raise ValueError(f"staleness must be 0 or more rounds, got {staleness}")
    return workers / max(workers, staleness)


def _of(analysis: str, values: Mapping[str, float]) -> float:
    if analysis not in values:
        raise ValueError(f'analysis must be "ringmaster" or "birch", got {analysis!r}')
    return values[analysis]


def _check(noise: float = 0.0, **numbers: float) -> None:
    """Counts are at least 1, noise is at least 0, the rest is positive; all are finite."""
    check_noise(noise)
    for name, value in numbers.items():
        if name in _COUNTS and not 1 <= value < inf:
            raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < value < inf:
            raise ValueError(f"{name} must be finite and above 0, got {value}")
