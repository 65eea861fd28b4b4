"""Local SGD: everybody steps alone, and every few steps everybody waits to average the models.

Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767. A baseline.

    repeat, on every worker:
        `steps` times: w <- optimizer(w, own gradient)
        w <- mean over workers of w

Differs from the usual implementation: models are weighed by the samples of a step of theirs, so a
worker that has left its loop does not hold back the mean. (Not by all samples since the last
average: a move grows with the steps behind it, and speed would count twice; section B of LOSCAR-SGD
and FedNova discuss that.) Optimizer state stays each worker's own.

Do not use when workers differ in speed: it gathers the waits of `steps` steps into one, and the
slowest still sets the pace. Replicas differ between rounds; they are equal after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Own steps, and a mean of models now and then."""

    steps: int = 8
    """Steps of each worker between two averages."""

    def __post_init__(self) -> None:
        self.check_counts("steps")

    def start(self, replica: Replica) -> None:
        rules = Rules("all", lockstep=True, divisor="moves")
        replica.open(rules, moves=lambda pile: pile.batch_per_step)

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        replica.contribute(arrive=replica.piled + 1 >= self.steps)
        yield from replica.results()
