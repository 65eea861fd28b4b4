"""m-Synchronous SGD: everybody waits for the m fastest; what comes later is dropped.

Begunov and Tyurin, arXiv 2602.03802 (its abstract was at hand; the steps are the usual ones, also
known as backup workers: Chen et al., arXiv 1604.00981).

    for k = 0, 1, ...:
        every worker that knows w_k starts one gradient at w_k
        wait until m of them, of m workers, are there
        w_{k+1} <- optimizer(w_k, their mean)
        a gradient of an older w is dropped, and counted

Differs from the paper: nothing cancels a gradient that is being computed, so a late worker ends
it first, and misses the rounds that start meanwhile. `m="auto"` is ours; it reckons as if everyone
began each round anew, as in the paper. So is `top_up=True`: who is done before the m-th goes on
computing at w_k, and all that is there by then counts; who is not done then is stopped.

Do not use when the data of slow workers differs from that of the fast: it is under-represented.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbeat import asynchronous
from offbeat.algorithm import Algorithm
from offbeat.averages import Average
from offbeat.noise_choice import of_gradients
from offbeat.noise_scale import NoiseScale
from offbeat.replica import Replica
from offbeat.rounds import Enough, Measured, Quorum, Round, Rules
from offbeat.theory import rounds_cost


@dataclass(frozen=True)
class MSyncSGD(Algorithm):
    """The first m gradients of every round's parameters."""

    m: int | float | Literal["auto"]
    """A number of workers, a fraction of them, or "auto": chosen anew from what rounds show."""
    top_up: bool = False
    """Have those who are done compute more gradients until m workers are: nobody waits."""

    def __post_init__(self) -> None:
        self.check_switches("top_up")
        if self.top_up and self.m == "auto":
            raise ValueError('top_up=True needs m as a number or a fraction, got "auto"')

    def check(self, size: int) -> None:
        Quorum.of(self._first(size), size, called="m")

    def start(self, replica: Replica) -> None:
        if self.top_up:
            size = replica.world.size
            m = Quorum.of(self._first(size), size, called="m").needed
            asynchronous.start(replica, Enough(size, workers=m), asynchronous.at_once)
            return
        choose = Choice(replica.world.size) if self.m == "auto" else None
        replica.open(Rules(self._first(replica.world.size)), choose=choose)

    def step(self, replica: Replica) -> Iterator[Round]:
        if self.top_up:
            yield from asynchronous.step(replica)
            return
        replica.contribute(drop_late=True)
        yield from replica.results()

    def _first(self, size: int) -> int | float:
        if isinstance(self.m, str | bool) and self.m != "auto":
            raise ValueError(f'm must be a number, a fraction or "auto", got {self.m!r}')
        return size if self.m == "auto" else self.m  # see everyone before judging anyone


class Choice:
    """m from how long rounds of the m fastest would have taken, and from the gradient's noise.

    The noise is what noise_scale.py measures. A large scale is found late, but then T_m hardly
    depends on it: what counts is the signal beside the noise of a round, and that is known soon.

    A round of m costs its m-th fastest time and the exchange. That time is averaged over rounds for
    each m: the m-th of the workers' average times would be too short, since it is now one who is
    slow, now another. A worker's time is what its latest gradient that came in time has taken, with
    those that were dropped before it. One that is late shows its old time until then, and the long
    one afterwards, for as long as its next gradient takes: over many rounds, each of its times is
    seen as often as it happens. (Without the dropped ones, a long time that ends in the same round
    as the next short one would never be seen.)
    """

    def __init__(self, size: int, gain: float = 0.05) -> None:
        self._m = size
        self._gain = gain  # change m only for a gain above this share: no flapping
        self._rounds = 0
        self._times: list[list[float]] = [[] for _ in range(size)]  # of the m-th fastest
        self._exchange: list[float] = []
        self._noise: dict[str, list[float]] = {}

    def __call__(self, measured: Measured) -> int:
        noise = NoiseScale(self._noise)
        noise.add(measured.samples, measured.squares, measured.mean_square)
        self._rounds += 1
        if self._rounds == 1 or not all(measured.seconds):  # a first gradient takes longer
            return self._m
        times = [Average(sums, _MEMORIES, _AGREES) for sums in self._times]
        for time, seconds in zip(times, sorted(measured.seconds), strict=True):
            time.add(seconds)
        exchange = Average(self._exchange)
        exchange.add(measured.exchange_s)
        if times[0].count < _LEAST_ROUNDS:
            return self._m
        per_worker = sum(measured.samples) / len(measured.samples)
        signal, variance = of_gradients(noise.measured, per_worker)
        costs = rounds_cost([time.mean + exchange.mean for time in times], variance, signal)
        best = costs.index(min(costs[_LEAST - 1 :] or costs)) + 1
        if costs[best - 1] < (1 - self._gain) * costs[self._m - 1]:
            self._m = best
        return self._m


_LEAST = 2  # a round of one shows no noise, and m would never change again
_LEAST_ROUNDS = 3
# A time that is rare and long is no change: it takes many standard errors to be one.
_MEMORIES, _AGREES = (0.97, 0.99, 0.998), 12.0
