"""Local SGD: everybody steps alone, and every few steps everybody waits to average the models.

Stich: "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv 1805.09767. A baseline.

    repeat, on every worker:
        `steps` times: w <- optimizer(w, own gradient)
        w <- mean over workers of w

Differs from the usual implementation: models are weighed by the samples that went into them since
the last average, so a worker that has left its loop, or had less data, does not hold back the mean.
Optimizer state stays each worker's own.

Do not use when workers differ in speed: it gathers the waits of `steps` steps into one, and the
slowest still sets the pace. Replicas differ between rounds; they are equal after each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round


@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Own steps, and a mean of models now and then."""

    steps: int = 8
    """Steps of each worker between two averages."""

    def __post_init__(self) -> None:
        self.check_counts("steps")

    def step(self, replica: Replica) -> Iterator[Round]:
        taken = replica.memory.get("taken", 0) + 1
        replica.memory["taken"] = taken % self.steps
        yield replica.own_step(ends_round=taken == self.steps)
        if taken == self.steps:
            replica.average_models()

    def leave(self, replica: Replica) -> Iterator[Round]:
        while (going_on := replica.average_models(leaving=True)) is not None:
            if going_on:  # they step their schedulers: so does this worker, with nothing to apply
                nothing = (0.0,) * replica.world.size
                yield Round(replica.round, replica.pile.flats, nothing, 0.0, (), own=True)
