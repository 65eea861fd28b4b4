"""Non-blocking SGD: the first to finish its batch calls the round; the others give what they have.

He, Dube: "Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches", arXiv
2211.00889. Its abstract and an early prototype were at hand; the centralised form, over all-reduce.

    repeat, on every worker:
        until `micro_batches` are finished, or somebody has called the round:
            S, n <- S + gradient sum of a micro-batch at w, n + its samples
        who has finished them all calls the round
        w <- optimizer(w, sum of all S / sum of all n)          everyone waits for this

What becomes of the micro-batch that is being computed when the round is called: `finish` it, and
join then (nothing is wasted: the default); or `bank` it, which is ours: the round starts without
it, and it rides in the next one, which waits for it if need be.

Differs from the paper's figure, which abandons that micro-batch, and lets a slow worker go on in
its batch where the round has interrupted it. Hardware cannot be interrupted, and then every
worker's end of a batch would call a round; here everyone's batch starts anew with each.

Do not use where an all-reduce takes long: nobody computes meanwhile. Where speeds differ by the
same factors all the time, LBBSP does as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class NonblockingSGD(Algorithm):
    """Rounds of finished micro-batches, called by the fastest worker."""

    micro_batches: int = 8
    """A batch of one worker: whoever finishes so many first calls the round."""
    in_flight: Literal["finish", "bank"] = "finish"
    removed: ClassVar[Mapping[str, str]] = {
        "in_flight=abandon": 'hardware computes it to its end all the same; "finish" keeps it',
        "position": "everyone's batch starts anew with each round (docs/log.md)",
    }

    def __post_init__(self) -> None:
        self.check_choices()
        self.check_counts("micro_batches")

    def start(self, replica: Replica) -> None:
        banks = self.in_flight == "bank"
        replica.open(
            Rules("solo", at_boundary=not banks, max_staleness_rounds=1 if banks else None)
        )
        replica.own["finished"] = 0

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.own["finished"] += 1
        replica.contribute(arrive=replica.own["finished"] >= self.micro_batches)
        if replica.called:
            replica.hand_over()
        yield from self.rounds(replica, replica.results())

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            replica.own["finished"] = 0
            yield each
