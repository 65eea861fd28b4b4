"""Federated averaging: own epochs, then the mean of the models; with a quorum, nobody waits.

McMahan et al.: "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, arXiv 1602.05629.

    repeat, on every client k that takes part in the round:
        E epochs over its own samples: w <- optimizer(w, own gradient)
        w <- sum over clients of n_k w_k / sum of n_k

As it stands everybody waits for everybody, once a round. With a `quorum`, a round starts with those
that have come, and those that come within `grace_s` after; a late client's move rides in the next
round, on top of what was made meanwhile, and nothing of it is lost.

Differs from the paper: there is no server, clients average among themselves. With a quorum, a
round is divided by the weight of all clients, not only of those that came, so that nobody counts
more for being early. A client that does not take part, or has no samples, calls the optimizer
without a gradient: it waits for the round, and weighs nothing.

Do not use where clients' data differ much and rounds are long: models drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from offbeat.algorithm import Algorithm, check_grace
from offbeat.replica import Replica
from offbeat.rounds import Quorum, Round, Rules


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Own steps, as many as this client has, and a weighted mean of models."""

    steps: int = field(default=1, repr=False)
    """Of this client, in a round: the others may have others."""
    weight: float = field(default=1.0, repr=False)
    """Of this client: its samples, or 1 if all count the same."""
    quorum: str | int | float = "all"
    """Who must have come for a round to start."""
    grace_s: float = 0.0
    """How long it waits for more, then."""

    def __post_init__(self) -> None:
        self.check_counts("steps")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a number above 0, got {self.weight!r}")
        check_grace(self.grace_s, self.quorum)

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        rules = Rules("all", lockstep=True, uneven=True, divisor="moves")
        if self.quorum != "all":
            rules = Rules(self.quorum, at_arrival=True, grace_s=self.grace_s, divisor="moves")
        replica.open(rules, moves=lambda pile: self.weight)

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        comes = not replica.samples or replica.piled + 1 >= self.steps
        if self.quorum == "all":
            replica.contribute(arrive=comes)
            yield from replica.results()
            return
        replica.contribute(arrive=False)
        yield from replica.newest()
        if comes:
            replica.arrive()
            yield from replica.results()
