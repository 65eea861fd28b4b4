"""eager-SGD: nobody waits for the late; a round starts as soon as its quorum is on time.

Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler: "Taming Unbalanced Training Workloads in Deep Learning
with Partial Collective Operations", PPoPP 2020, arXiv 1908.04207.

    repeat, on every worker:
        g  <- gradient of a micro-batch at w
        add g to the pile                        the next round takes what is there
        if no round has started since w:         on time
            arrive, and wait for that round
        for every round since w, in order:       late workers catch up
            w <- optimizer(w, sum of that round / its samples)

Differs from the paper: every worker applies every round, once and in order (a replicated log), so
replicas stay bit-identical and need no synchronisation now and then. The sum is divided by the
samples that are in it, not by the number of workers (`average="workers"` is the paper's). A quorum
can be an exact number: by default any half of the workers, where the paper's majority is one worker
drawn for each round, and half of them in expectation only. A gradient is late if a round has
started since its parameters; `lateness="step"` is the paper's: if the round with the number of the
worker's own step has, so that steps and rounds keep step; it was slower, or as fast within the
spread (docs/measured.md). Staleness can be bounded. With `delay=1` nobody waits for the round that
takes its gradient either, but computes the next one meanwhile, as in ABS-SGD.

Do not use solo when some workers are always slow: their gradients come late every time. Where the
order of the data matters, mind that fast workers see more of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Quorum, Round, Rules


@dataclass(frozen=True)
class EagerSGD(Algorithm):
    """SGD over partial all-reduces."""

    quorum: str | int | float = 0.5
    """Who must be on time: a number or a fraction of workers, "solo", "majority", "all", ..."""
    late: Literal["accumulate", "drop"] = "accumulate"
    """A gradient that missed its round rides in the next one, or is dropped and counted."""
    average: Literal["samples", "workers"] = "samples"
    max_staleness_rounds: int | None = None
    """No gradient is applied more rounds late than this: the fast wait rather than exceed it."""
    delay: Literal[0, 1] = 0
    """With 1 a worker waits for the round before, not for its own: all messages are hidden, and
    every gradient is one round late."""
    lateness: Literal["version", "step"] = "version"
    """What makes a gradient late: a round since its parameters, or one of its step's number."""
    removed: ClassVar[Mapping[str, str]] = {
        "replicas": "drifting ones lost accuracy (docs/log.md); replicas are always identical",
        "synchronise_rounds": "replicas are always identical",
    }

    def __post_init__(self) -> None:
        self.check_choices()
        if self.max_staleness_rounds is not None and 0 <= self.max_staleness_rounds < self.delay:
            raise ValueError(f"with delay={self.delay} no gradient is less than one round late")

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        replica.open(
            Rules(
                self.quorum,
                max_staleness_rounds=self.max_staleness_rounds,
                lateness=self.lateness,
                divisor=self.average,
            )
        )

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute(delay=self.delay, drop_late=self.late == "drop")
        yield from replica.results()
