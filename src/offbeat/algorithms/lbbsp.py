"""LB-BSP: everybody waits for everybody, but the slow have less to do.

Chen, Weng, Wang, Li, Li: "Semi-Dynamic Load Balancing: Efficient Distributed Learning in
Non-Dedicated Environments", arXiv 1806.02508.

    in every round worker n computes b_n micro-batches of B = `micro_batches` times workers
        b_n ~ B * v_n / sum of v             v_n: its measured speed, smoothed
        w   <- optimizer(w, sum of gradients / sum of samples)

Differs from the paper: a share is a number of micro-batches, not a size of one, since the loop is
the user's. Whole micro-batches seldom fit the speeds: B may be up to a quarter smaller or larger,
where that makes more of them a second. At speeds 2:2:1:1 and 2 each, 8 in all would be 3:3:1:1 or
2:2:2:2, and somebody waits; 6 are 2:2:1:1, and nobody does. Also, speeds are an exponential
average, where the paper trains a predictor.

Do not use when speeds change from round to round: shares that were measured yesterday do not help,
and one micro-batch that takes long holds up everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat import shares
from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class LBBSP(Algorithm):
    """Synchronous SGD with shares by measured speed."""

    micro_batches: int = 8
    """Micro-batches of a round, per worker on average, and nearly so."""
    memory: float = 0.8
    """How much of the old speed stays in the average, each round."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")
        if not (isinstance(self.memory, int | float) and 0 <= self.memory < 1):
            raise ValueError(f"memory must be at least 0 and below 1, got {self.memory!r}")

    def start(self, replica: Replica) -> None:
        replica.open(Rules("all", lockstep=True, uneven=True), notes=1)
        shares.begin(replica, self.micro_batches)

    def step(self, replica: Replica) -> Iterator[Round]:
        comes = replica.piled + 1 >= replica.own["share"]
        replica.contribute(arrive=comes, notes=(replica.seconds,))
        yield from self.rounds(replica, replica.results())

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            shares.follow(replica, each, self.micro_batches, self.memory)
            yield each
