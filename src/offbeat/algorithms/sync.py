"""Synchronous SGD: everybody waits for everybody, every round.

The baseline, and the model for the other files. After Chen, Pan, Monga, Bengio and Jozefowicz,
"Revisiting Distributed Synchronous SGD" (arXiv 1604.00981), without backup workers.

    repeat:
        g, n  <- sum of gradient times samples, samples   over `micro_batches` micro-batches
        G, N  <- all_reduce(g), all_reduce(n)
        w     <- optimizer(w, G / N)

Differs from the usual implementation: the divisor is the number of samples, not of workers, so
workers with unequal batches give the mean over all samples. A worker that runs out of data serves
the others with zeros until all have left.

Do not use when workers differ in speed: the slowest sets the pace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class SyncSGD(Algorithm):
    """Synchronous SGD over all workers."""

    micro_batches: int = 1
    """Micro-batches of each worker in one round (gradient accumulation)."""
    overlap: bool = True
    """Reduce gradients while the last backward pass of a round still runs."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")
        self.check_switches("overlap")

    def start(self, replica: Replica) -> None:
        replica.open(Rules("all", lockstep=True), early=self.overlap)

    def reduces_next(self, replica: Replica) -> bool:
        return replica.piled + 1 == self.micro_batches

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute(arrive=replica.piled + 1 >= self.micro_batches)
        yield from replica.results()
