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
replicas stay bit-identical and need no synchronisation now and then. With `replicas="drift"` a
late worker applies the newest round only, as in the paper, and worker 0's model is copied to all
after every `synchronise_rounds` rounds. The sum is divided by the samples that are in it, not by
the number of workers (`average="workers"` is the paper's). A quorum can be an exact number: by
default any half of the workers, where the paper's majority is one worker drawn for each round, and
half of them in expectation only. Staleness can be bounded. With `delay=1` nobody waits for the
round that takes its gradient either, but computes the next one meanwhile, as in ABS-SGD.

Do not use solo when some workers are always slow: their gradients come late every time. Where the
order of the data matters, mind that fast workers see more of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
    replicas: Literal["identical", "drift"] = "identical"
    synchronise_rounds: int = 64
    """With drifting replicas: everyone meets, and takes over worker 0's model, this often."""

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.delay and self.replicas == "drift":
            raise ValueError('delay=1 needs replicas="identical"')
        if self.max_staleness_rounds is not None and 0 <= self.max_staleness_rounds < self.delay:
            raise ValueError(f"with delay={self.delay} no gradient is less than one round late")

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        rules = Rules(
            self.quorum,
            max_staleness_rounds=self.max_staleness_rounds,
            divisor=self.average,
            full_every=self.synchronise_rounds if self.replicas == "drift" else None,
        )
        replica.open_partial(rules)

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute(delay=self.delay, drop_late=self.late == "drop")
        yield from self.rounds(replica, replica.results())

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.serve())

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        if self.replicas == "identical":
            yield from records
            return
        for record in replica.newest(records):
            yield record
            if (record.round + 1) % self.synchronise_rounds == 0:
                replica.copy_from_worker_0()


_KNOWN = {
    "late": ("accumulate", "drop"),
    "average": ("samples", "workers"),
    "delay": (0, 1),
    "replicas": ("identical", "drift"),
}
