"""Which threshold on the compute time of a round is best, by measured times: DropCompute's choice.

    S_eff(tau) = micro-batches computed a second with the threshold tau, over those without

Differs from the paper: the micro-batch that passes the threshold is computed to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from statistics import fmean

Times = Sequence[Sequence[Sequence[float]]]  # by worker, round, micro-batch: seconds since it began


def chosen_threshold(tables: Sequence[Sequence[Sequence[float]]]) -> float:
    """The best threshold for what workers have measured; inf for none.

    By worker and round: how long the round took, then when each of its micro-batches ended, 0 for
    those that were not begun. A worker without any has left. The longest round does not count.
    """
    took_s = [max(row[0] for row in rows) for rows in zip(*tables, strict=True)]
    kept = sorted(sorted(range(len(took_s)), key=took_s.__getitem__)[:-1] or [0])
    rounds = [[worker[n] for n in kept] for worker in tables]
    here = [rows for rows in rounds if any(any(row[1:]) for row in rows)]
    if not here:
        return inf
    serial_s = fmean(
        max(row[0] for row in rows) - max(max(row[1:]) for row in rows)
        for rows in zip(*here, strict=True)
    )
    micro_batches = len(here[0][0]) - 1
    ends = [
        whole_rounds([[end for end in row[1:] if end] for row in rows], micro_batches)
        for rows in here
    ]
    return best_threshold(ends, max(serial_s, 0.0))


def whole_rounds(clocks: Sequence[Sequence[float]], micro_batches: int) -> list[list[float]]:
    """Complete one worker's rounds: a micro-batch that was not begun takes as long as another did.

    >>> whole_rounds([[1.0, 2.0, 4.0], [1.0]], micro_batches=3)
    [[1.0, 2.0, 4.0], [1.0, 2.0, 3.0]]
    """
    seen = [after - before for clock in clocks for before, after in pairwise([0.0, *clock])]
    if not seen:
        return [[0.0] * micro_batches for _ in clocks]
    others, rounds = 0, []
    for clock in clocks:
        times = list(clock[:micro_batches])
        while len(times) < micro_batches:
            times.append((times[-1] if times else 0.0) + seen[others % len(seen)])
            others += 1
        rounds.append(times)
    return rounds


def effective_speedup(
    times: Times, threshold_s: float, serial_s: float = 0.0, completes: bool = True
) -> float:
    """S_eff: micro-batches computed per second with a threshold, over those without.

    `times` are the seconds since the round began at which each worker's micro-batches end,
    `serial_s` what a round takes beyond computing. Unless it `completes` the micro-batch that
    passes the threshold, a worker stops on the spot, as in the paper.

    >>> effective_speedup([[[1.0, 2.0]], [[1.0, 4.0]]], threshold_s=0.5)
    2.0
    >>> round(effective_speedup([[[1.0, 2.0]], [[1.0, 4.0]]], 2.000001, completes=False), 3)
    1.5
    """
    gains = []
    for workers in zip(*times, strict=True):
        whole_s = max(ends[-1] for ends in workers)
        kept = [sum(end < threshold_s for end in ends) for ends in workers]
        if completes:
            kept = [min(count + 1, len(ends)) for count, ends in zip(kept, workers, strict=True)]
            cut_s = max(ends[count - 1] for count, ends in zip(kept, workers, strict=True))
        else:
            cut_s = min(threshold_s, whole_s)
        share = sum(kept) / sum(len(ends) for ends in workers)
        gains.append((whole_s + serial_s) / (cut_s + serial_s) * share)
    return fmean(gains)


def best_threshold(
    times: Times, serial_s: float = 0.0, completes: bool = True, candidates: int = 200
) -> float:
    """The threshold with the largest effective speed-up, among evenly spaced ones; inf for none.

    From the first end of half of a worker's micro-batches to the last end of all.
    """
    half = ceil(len(times[0][0]) / 2) - 1
    first = min(ends[half] for rounds in times for ends in rounds)
    last = max(ends[-1] for rounds in times for ends in rounds)
    grid = [first + (last - first) * step / candidates for step in range(1, candidates)]
    gains = {tau: effective_speedup(times, tau, serial_s, completes) for tau in grid}
    best = max(gains, key=lambda tau: gains[tau])
    return best if gains[best] > 1.0 else inf
