"""Workers whose speeds change as they like: the universal model of computation.

Worker i has a power v_i(t) >= 0, in gradients a second. In any stretch of time it makes as many
gradients as the whole part of its power's integral over that. (Tyurin, arXiv 2408.04929.)

Ringmaster ASGD has made k times R updates by T_k, where T_0 = 0 and

    T_k = min { T : sum over i of floor(1/4 * integral of v_i from T_{k-1} to T) >= R }

so it is at its target by T_ceil(K/R); no method can do better but for that constant. With the whole
power instead of a quarter, T_k are the moments at which Rennala SGD has collected R gradients, all
begun anew at the moment before: exactly so.

m-Synchronous SGD needs gradients of m workers that differ, so one that is fast does not help:

    T_k = min { T : integral of v_i from T_{k-1} to T is at least 1 for m workers i }

A power is a number, if it is constant; pairs (from_s, gradients a second), if it changes at
moments, 0 before the first; or a function: how many gradients the worker has the power for by a
given moment. That is the integral from 0 on, which never falls.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from math import inf
from typing import Protocol

Power = float | Sequence[tuple[float, float]] | Callable[[float], float]


def universal_times(
    powers: Sequence[Power],
    updates: int,
    rounds: int,
    share: float = 0.25,
    horizon_s: float = 1e9,
) -> list[float]:
    """T_1, ..., T_rounds: by when Ringmaster ASGD has made so many times R = `updates`, at most.

    With `share` 1, when Rennala SGD has collected as many, round by round. What does not happen
    before the horizon never does: it is infinity.

    A worker that pauses from second 10 to second 20, and one that becomes faster and faster:

    >>> universal_times([[(0, 1.0), (10, 0.0), (20, 1.0)]], updates=2, rounds=3)
    [8.0, 26.0, 34.0]
    >>> times = universal_times([lambda t: t * t], updates=4, rounds=4)  # t^2 is 16, 32, 48, 64
    >>> [round(each, 3) for each in times]
    [4.0, 5.657, 6.928, 8.0]
    """
    if not updates >= 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    workers = [_worker(power, horizon_s) for power in powers]

    def end(begin: float) -> float:
        return next(islice(_arrivals(workers, begin, 1 / share), updates - 1, None), inf)

    return list(islice(_moments(end), rounds))


def universal_m_sync_times(
    powers: Sequence[Power], m: int, rounds: int, horizon_s: float = 1e9
) -> list[float]:
    """When m-Synchronous SGD ends its rounds, if every worker begins each of them anew.

    >>> universal_m_sync_times([1.0, 0.5, 0.1], m=2, rounds=3)
    [2.0, 4.0, 6.0]
    """
    if not 1 <= m <= len(powers):
        raise ValueError(f"m must be between 1 and the {len(powers)} workers, got {m}")
    workers = [_worker(power, horizon_s) for power in powers]

    def end(begin: float) -> float:
        ready = (each.moment(each.work(begin) + 1, begin) for each in workers)
        return heapq.nsmallest(m, ready)[-1]

    return list(islice(_moments(end), rounds))


def _moments(end: Callable[[float], float]) -> Iterator[float]:
    """When rounds end, one after the other; once one never does, none does."""
    moment = 0.0
    while True:
        moment = end(moment) if moment < inf else inf
        yield moment


def _arrivals(workers: Sequence[_Worker], begin: float, each: float) -> Iterator[float]:
    """The moments at which somebody has the power for another `each` gradients since `begin`."""
    done = [worker.work(begin) for worker in workers]
    coming = [
        (worker.moment(work + each, begin), rank, 1)
        for rank, (worker, work) in enumerate(zip(workers, done, strict=True))
    ]
    heapq.heapify(coming)
    while coming and coming[0][0] < inf:
        moment, rank, count = coming[0]
        yield moment
        again = workers[rank].moment(done[rank] + (count + 1) * each, moment)
        heapq.heapreplace(coming, (again, rank, count + 1))


# --- powers --------------------------------------------------------------------------------


class _Worker(Protocol):
    def work(self, moment: float) -> float:
        """The integral of its power from 0 to that moment."""

    def moment(self, work: float, after: float) -> float:
        """The first moment, not before `after`, at which the integral is so much."""


def _worker(power: Power, horizon_s: float) -> _Worker:
    if callable(power):
        return _Function(power, horizon_s)
    return _Steps([(0.0, power)] if isinstance(power, int | float) else power, horizon_s)


class _Steps:
    """A power that is constant from moment to moment."""

    def __init__(self, speeds: Sequence[tuple[float, float]], horizon_s: float) -> None:
        self._from = [float(moment) for moment, _ in speeds]
        self._speeds = [float(speed) for _, speed in speeds]
        if not speeds or self._from[0] < 0 or any(b <= a for a, b in pairwise(self._from)):
            raise ValueError(f"a power's moments must ascend from 0 s or later, got {speeds}")
        if not all(0 <= speed < inf for speed in self._speeds):
            raise ValueError(f"speeds must be finite and 0 or more, got {speeds}")
        lengths = (b - a for a, b in pairwise(self._from))
        made = (speed * length for speed, length in zip(self._speeds, lengths, strict=False))
        self._done = list(accumulate(made, initial=0.0))  # before each of the moments
        self._horizon_s = horizon_s

    def work(self, moment: float) -> float:
        at = bisect_right(self._from, moment) - 1
        if at < 0:
            return 0.0
        return self._done[at] + self._speeds[at] * (moment - self._from[at])

    def moment(self, work: float, after: float) -> float:
        at = max(bisect_left(self._done, work) - 1, 0)
        if not self._speeds[at]:
            return inf  # only the last one: before it, a pause has no work to reach
        moment = self._from[at] + (work - self._done[at]) / self._speeds[at]
        return max(moment, after) if moment <= self._horizon_s else inf


class _Function:
    """A power whose integral is a function of the moment."""

    def __init__(self, work: Callable[[float], float], horizon_s: float) -> None:
        self.work = work
        self._horizon_s = horizon_s

    def moment(self, work: float, after: float) -> float:
        low, length = after, 1.0
        while self.work(high := min(low + length, self._horizon_s)) < work:
            if high >= self._horizon_s:
                return inf
            low, length = high, 2 * length
        while low < (middle := (low + high) / 2) < high:
            low, high = (middle, high) if self.work(middle) < work else (low, middle)
        return high
