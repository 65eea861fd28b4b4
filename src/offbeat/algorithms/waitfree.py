"""Wait-free local SGD: own steps at once, the mean of all moves when it comes; nobody waits.

Local SGD whose averages travel while everybody computes on, as in CoCoD-SGD (Shen et al., IJCAI
2019, arXiv 1906.12043), with as many steps as fit, as in LOSCAR-SGD (arXiv 2605.20866), and started
as ABS-SGD starts its rounds (arXiv 2308.15164): when everybody has finished a step.

    on every worker, round t:
        repeat:
            w <- optimizer(w, own gradient)
        until everyone has made a step, and the exchange of t-1 has ended
        y <- w                                      the place that this worker gives
        start the exchange of y - base              in the background
        when the mean d of t-1 comes:
            base <- base + d,  w <- w + base - y_{t-1}      all that was moved since stays

`fixed_point` says what unlike data converge to. "samples": every sample counts the same, so a fast
worker counts more (its moves are sums over its steps, and weigh by the batch of one step).
"workers": every worker counts the same, as in FedNova: moves are divided by their steps.

Differs from LOSCAR-SGD: everything is averaged, not a random part of the coordinates.

Between rounds replicas differ by their own steps; `dp.agreed()` shows what they agree on. Do not
use where replicas must be identical at every step, or with data that differ much and long rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Pile, Round, Rules


@dataclass(frozen=True)
class WaitFreeLocalSGD(Algorithm):
    """Own steps, and means of moves that arrive later."""

    max_steps: int | None = None
    """A worker that has made so many since its last round waits for the next."""
    fixed_point: Literal["samples", "workers"] = "samples"
    delay: Literal[0, 1] = 1
    """With 0 a worker waits for the round that takes its moves; their number still adapts."""
    min_batch: float = 0.0
    """A round does not start with fewer samples, of all workers together."""

    def __post_init__(self) -> None:
        self.check_choices()
        if self.max_steps is not None:
            self.check_counts("max_steps")
        if not 0 <= self.min_batch < float("inf"):
            raise ValueError(f"min_batch must be 0 or more samples, got {self.min_batch}")

    def start(self, replica: Replica) -> None:
        rules = Rules("all", at_boundary=True, least_samples=self.min_batch, divisor="moves")
        replica.open(rules, moves=self._weight)

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        replica.contribute(delay=self.delay)
        if replica.piled == self.max_steps:
            replica.await_call()
        if replica.called:  # first the round before, so that only one move is under way
            yield from replica.results(delay=0)
            replica.hand_over()
        yield from replica.results(delay=self.delay)

    def _weight(self, pile: Pile) -> float:
        return 1 / pile.micro_batches if self.fixed_point == "workers" else pile.batch_per_step
