"""DropCompute: everybody waits for everybody, but nobody computes past a threshold.

Giladi, Gottlieb, Shkolnik, Karnieli, Banner, Hoffer, Levy, Soudry: "DropCompute: simple and more
robust distributed synchronous training via compute variance reduction", NeurIPS 2023, arXiv
2306.10598.

    in every round, worker n:
        for m = 1 .. M:
            S <- S + gradient sum of micro-batch m at w
            if its clock, since the last update, is past tau: break
        w <- optimizer(w, sum over workers of S / samples)

The check comes after a micro-batch, so each worker completes at least one. Micro-batches that were
not begun stay in the loader: they are shifted to later rounds, not lost.

`threshold_s="auto"` measures for `window_rounds` rounds without dropping, has all workers share
their times, and takes the threshold of the largest effective speed-up: micro-batches computed per
second, over those without a threshold. Later windows do so again. Differs from the paper: the
selector and the check read the same clock (with two, its published run dropped 12 to 20 % instead
of the predicted 7 %), and the model knows that the micro-batch past the threshold is completed.

`normalise="constant"` is the paper's: divide by what all micro-batches would have had, so a round
that dropped some takes a shorter step. Ours divides by the samples that are there. `bank` is ours,
too: a round does not wait for the micro-batch that passes the threshold; it rides in the next.

Do not use when the same workers are always slow: they drop in every round, and their data is
under-represented. With one micro-batch a round there is nothing to drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, e, inf, sqrt
from statistics import NormalDist, fmean
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class DropCompute(Algorithm):
    """Synchronous SGD with a threshold on each worker's compute time per round."""

    micro_batches: int = 8
    """M: micro-batches of each worker in one round, if nothing is dropped."""
    threshold_s: float | Literal["auto"] = "auto"
    """tau: seconds since the last update, after which a worker begins no further micro-batch."""
    normalise: Literal["samples", "constant"] = "samples"
    bank: bool = False
    window_rounds: int = 40
    """How many rounds the automatic threshold is chosen from, and how often."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches", "window_rounds")
        self.check_switches("bank")
        automatic = self.threshold_s == "auto"
        if not automatic and not isinstance(self.threshold_s, int | float):
            raise ValueError(f'threshold_s must be seconds or "auto", got {self.threshold_s!r}')
        if not isinstance(self.threshold_s, str) and not self.threshold_s > 0:
            raise ValueError(
                f"threshold_s must be above 0, got {self.threshold_s}: every worker completes "
                "at least one micro-batch in any case"
            )
        if self.normalise not in ("samples", "constant"):
            raise ValueError(f"normalise must be samples or constant, got {self.normalise!r}")

    def start(self, replica: Replica) -> None:
        replica.open_partial(Rules("all", alarms=self.bank))
        automatic = self.threshold_s == "auto"
        replica.memory.update(
            threshold_s=inf if automatic else self.threshold_s, clock=[], rounds=[]
        )

    def step(self, replica: Replica) -> Iterator[Round]:
        clock, threshold_s = replica.memory["clock"], replica.memory["threshold_s"]
        clock.append(replica.world.now() - replica.round_began)
        stops = len(clock) >= self.micro_batches or clock[-1] > threshold_s
        replica.contribute(arrive=stops)
        yield from self.rounds(replica, replica.results())
        if self.bank and replica.piled and replica.memory["threshold_s"] < inf:
            replica.arrive_at(replica.round_began + replica.memory["threshold_s"])

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.serve())

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        for record in records:
            memory, began = replica.memory, replica.round_began
            if self.normalise == "constant" and record.micro_batches:
                dropped = len(record.ranks) * self.micro_batches / record.micro_batches
                record = replace(record, divisor=record.divisor * max(dropped, 1.0))
            yield record
            if self.bank:  # the next one has begun, though this worker may come late to it
                replica.round_began = record.ended_s
            if self.threshold_s == "auto":
                memory["rounds"].append((replica.round_began - began, list(memory["clock"])))
                if len(memory["rounds"]) == self.window_rounds:
                    memory["threshold_s"] = self._selected(replica)
                    memory["rounds"].clear()
                    replica.round_began = replica.world.now()  # choosing is nobody's compute time
            memory["clock"].clear()

    def _selected(self, replica: Replica) -> float:
        """The best threshold by everyone's times in the window; the same on every worker."""
        mine = whole_rounds([clock for _, clock in replica.memory["rounds"]], self.micro_batches)
        numbers: list[float] = []
        for (wall_s, clock), times in zip(replica.memory["rounds"], mine, strict=True):
            numbers += [wall_s, clock[-1] if clock else 0.0, *times]
        tables = [_rows(row, self.micro_batches + 2) for row in replica.share(numbers)]
        everyone = [rows for rows in tables if rows[0][-1]]  # who has left has no times
        if not everyone:
            return inf
        serial_s = fmean(
            max(row[0] for row in rows) - max(row[1] for row in rows)
            for rows in zip(*everyone, strict=True)
        )
        ends = [[row[2:] for row in rows] for rows in everyone]
        return best_threshold(ends, max(serial_s, 0.0), completes=not self.bank)


Times = Sequence[Sequence[Sequence[float]]]  # by worker, round, micro-batch: seconds since it began


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
    times: Times, threshold_s: float, serial_s: float = 0.0, completes: bool = False
) -> float:
    """S_eff: micro-batches computed per second with a threshold, over those without.

    `times` are the seconds since the round began at which each worker's micro-batches end,
    `serial_s` what a round takes beyond computing. With `completes`, the micro-batch that passes
    the threshold is computed to its end; without, the worker stops on the spot, as in the paper.

    >>> round(effective_speedup([[[1.0, 2.0]], [[1.0, 4.0]]], threshold_s=2.000001), 3)
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
    times: Times, serial_s: float = 0.0, completes: bool = False, candidates: int = 200
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


def expected_round_s(workers: int, micro_batches: int, mean_s: float, sd_s: float) -> float:
    """E[T]: the slowest of so many sums of normal times, by the extreme-value mean.

    >>> round(expected_round_s(64, 12, 0.45, 0.15), 3)
    6.631
    """
    gamma, quantile = 0.5772156649, NormalDist().inv_cdf
    extreme = (1 - gamma) * quantile(1 - 1 / workers) + gamma * quantile(1 - 1 / (e * workers))
    return micro_batches * mean_s + sqrt(micro_batches) * sd_s * extreme


def expected_kept(threshold_s: float, micro_batches: int, mean_s: float, sd_s: float) -> float:
    """E[M~]: how many micro-batches a worker completes before the threshold."""
    below = NormalDist().cdf
    return sum(
        below((threshold_s - m * mean_s) / (sd_s * sqrt(m))) for m in range(1, micro_batches + 1)
    )


def expected_speedup(
    threshold_s: float,
    workers: int,
    micro_batches: int,
    mean_s: float,
    sd_s: float,
    serial_s: float = 0.0,
) -> float:
    """E[S_eff] for normal times; under-estimates what heavy tails give.

    >>> round(expected_speedup(4.928, 64, 12, 0.45, 0.15, serial_s=0.3), 3)
    1.155
    """
    whole_s = expected_round_s(workers, micro_batches, mean_s, sd_s)
    kept = expected_kept(threshold_s, micro_batches, mean_s, sd_s) / micro_batches
    return kept * (whole_s + serial_s) / (min(threshold_s, whole_s) + serial_s)


def _rows(numbers: Sequence[float], width: int) -> list[Sequence[float]]:
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]
