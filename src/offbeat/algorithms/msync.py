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

from offbeat.algorithm import Algorithm
from offbeat.collectives import Quorum, Record
from offbeat.replica import Replica


@dataclass(frozen=True)
class MSyncSGD(Algorithm):
    """The first m gradients of every round's parameters."""

    m: int | float
    """A number of workers, or a fraction of them."""

    def check(self, size: int) -> None:
        Quorum.of(self.m, size)

    def start(self, replica: Replica) -> None:
        replica.open_partial(self.m)

    def step(self, replica: Replica) -> Iterator[Record]:
        replica.contribute(drop_late=True)
        yield from replica.results()

    def leave(self, replica: Replica) -> Iterator[Record]:
        yield from replica.serve()


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
