"""Local SGD: everybody steps alone, and every few steps everybody waits to average the models.

Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767. A baseline.

    repeat, on every worker:
        `steps` times: w <- optimizer(w, own gradient)
        w <- mean over workers of w

With `shares="speed"`, a worker's number of steps is in proportion to its measured speed, `steps` on
average: all come to the average together, as with LB-BSP's batches (arXiv 1806.02508).

Differs from the usual implementation: models are weighed by the samples of a step of theirs, so a
worker that has left its loop does not hold back the mean. (Not by all samples since the last
average: a move grows with the steps behind it, and speed would count twice; section B of LOSCAR-SGD
and FedNova discuss that.) Any optimizer will do; its state stays each worker's own.

Do not use when workers differ in speed from step to step: it gathers the waits of `steps` steps
into one, and the slowest still sets the pace; shares that were measured before do not help then.
Replicas differ between rounds; they are equal after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbeat import shares
from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules

_MEMORY = 0.8  # how much of the old speed stays, each round


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Own steps, and a mean of models now and then."""

    steps: int = 8
    """Steps of each worker between two averages; on average, with shares by speed."""
    shares: Literal["equal", "speed"] = "equal"

    def __post_init__(self) -> None:
        self.check_counts("steps")
        self.check_choices()

    def start(self, replica: Replica) -> None:
        by_speed = self.shares == "speed"
        rules = Rules("all", lockstep=True, uneven=by_speed, divisor="moves")
        replica.open(rules, notes=int(by_speed), moves=lambda pile: pile.batch_per_step)
        shares.begin(replica, self.steps)

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        comes = replica.piled + 1 >= replica.own["share"]
        replica.contribute(arrive=comes, notes=(replica.seconds,))
        yield from self.rounds(replica, replica.results())

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            if self.shares == "speed":
                shares.follow(replica, each, self.steps, _MEMORY)
            yield each
