"""m-Synchronous SGD: everybody waits for the m fastest; what comes later is dropped.

Begunov and Tyurin, arXiv 2602.03802 (its abstract was at hand; the steps are the usual ones, also
known as backup workers: Chen et al., arXiv 1604.00981).

    for k = 0, 1, ...:
        every worker that knows w_k starts one gradient at w_k
        wait until m of them, of m workers, are there
        w_{k+1} <- optimizer(w_k, their mean)
        a gradient of an older w is dropped, and counted

Differs from the paper: nothing can cancel a gradient that is being computed, so a late worker ends
it first, and misses the rounds that start meanwhile.

Do not use when the data of slow workers differs from that of the fast: it is under-represented.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Measured, Quorum, Round, Rules


@dataclass(frozen=True)
class MSyncSGD(Algorithm):
    """The first m gradients of every round's parameters."""

    m: int | float | Literal["auto"]
    """A number of workers, a fraction of them, or "auto": chosen anew from what rounds show."""

    def check(self, size: int) -> None:
        Quorum.of(self._first(size), size, called="m")

    def start(self, replica: Replica) -> None:
        choose = Choice(replica.world.size) if self.m == "auto" else None
        replica.open_partial(Rules(self._first(replica.world.size)), choose=choose)

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute(drop_late=True)
        yield from replica.results()

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from replica.serve()

    def _first(self, size: int) -> int | float:
        if isinstance(self.m, str) and self.m != "auto":
            raise ValueError(f'm must be a number, a fraction or "auto", got {self.m!r}')
        return size if self.m == "auto" else self.m  # see everyone before judging anyone


class Choice:
    """m from the workers' measured seconds and the gradients' measured noise.

    k gradients g_i with mean g: the noise of one is k/(k-1) (mean |g_i|^2 - |g|^2), what is left of
    |g|^2 is the signal, and S is their ratio, the useful number of gradients in a round.
    """

    def __init__(self, size: int, memory: float = 0.9, gain: float = 0.1) -> None:
        self._m = size
        self._memory = memory
        self._gain = gain  # change m only for a gain above this share: no flapping
        self._seconds = [0.0] * size
        self._noise = self._signal = 0.0

    def __call__(self, measured: Measured) -> int:
        for rank, seconds in enumerate(measured.seconds):
            self._seconds[rank] = self._smooth(self._seconds[rank], seconds)
        k = len(measured.squares)
        if k > 1:
            noise = (sum(measured.squares) / k - measured.mean_square) * k / (k - 1)
            self._noise = self._smooth(self._noise, max(noise, 0.0))
            self._signal = self._smooth(self._signal, max(measured.mean_square - noise / k, 0.0))
        if all(self._seconds) and self._noise + self._signal > 0:
            useful = self._noise / max(self._signal, 1e-12 * self._noise)
            costs = rounds_cost(self._seconds, useful)
            best = costs.index(min(costs)) + 1
            if costs[best - 1] < (1 - self._gain) * costs[self._m - 1]:
                self._m = best
        return self._m

    def _smooth(self, old: float, new: float) -> float:
        if not new or not old:
            return new or old
        return self._memory * old + (1 - self._memory) * new


def rounds_cost(seconds: Sequence[float], noise: float) -> list[float]:
    """T_m for m = 1..n: what reaching a target costs with the m fastest of workers so fast.

    `seconds` are each worker's for one gradient, `noise` is S = sigma^2 / epsilon, the useful
    batch size. A round takes as long as its m-th fastest worker, and 1 + S/m rounds are needed, in
    units of L Delta / epsilon.
    """
    return [time_s * (1 + noise / m) for m, time_s in enumerate(sorted(seconds), start=1)]


def best_m(seconds: Sequence[float], noise: float) -> int:
    """The m with the least T_m; within 1 + ln n of what any method can reach.

    >>> best_m([1.0, 1.0, 1.0, 10.0], noise=100.0)
    3
    >>> best_m([1.0, 1.0, 1.0, 1.1], noise=100.0)
    4
    """
    costs = rounds_cost(seconds, noise)
    return costs.index(min(costs)) + 1
