"""Non-blocking SGD: the first to finish its batch calls the round; the others give what they have.

He, Dube: "Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches", arXiv
2211.00889. Its abstract and an early prototype were at hand; the centralised form, over all-reduce.

    repeat, on every worker:
        until `micro_batches` are finished, or somebody has called the round:
            S, n <- S + gradient sum of a micro-batch at w, n + its samples
        who has finished them all calls the round
        w <- optimizer(w, sum of all S / sum of all n)          everyone waits for this

What becomes of the micro-batch that is being computed when the round is called: `finish` it, and
join then (nothing is wasted: the default); `abandon` it, as in the paper's figure; or `bank` it,
which is ours: the round starts without it, and it rides in the next one, which waits for it if need
be. On hardware that cannot be interrupted an abandoned micro-batch is computed to its end and
thrown away.

`position="carry"` is the paper's figure too: a slow worker goes on in its batch where the round has
interrupted it. Mind that then every worker's end of a batch calls a round, so that there are as
many rounds as batches of all workers together; `reset` starts everyone's batch anew.

Do not use where an all-reduce takes long: nobody computes meanwhile. Where speeds differ by the
same factors all the time, LBBSP does as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class NonblockingSGD(Algorithm):
    """Rounds of finished micro-batches, called by the fastest worker."""

    micro_batches: int = 8
    """A batch of one worker: whoever finishes so many first calls the round."""
    in_flight: Literal["finish", "abandon", "bank"] = "finish"
    position: Literal["reset", "carry"] = "reset"

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    def start(self, replica: Replica) -> None:
        rules = Rules(
            "solo",
            hold=self.in_flight == "finish",
            max_staleness_rounds=1 if self.in_flight == "bank" else None,
        )
        replica.open_partial(rules, abandon=self.in_flight == "abandon")
        replica.memory["finished"] = 0

    def step(self, replica: Replica) -> Iterator[Round]:
        finished = replica.memory["finished"] + 1
        arrival = replica.contribute(
            arrive=finished >= self.micro_batches, drop_late=self.in_flight == "abandon"
        )
        if arrival != "dropped":
            replica.memory["finished"] = finished
        if replica.called:
            replica.hand_over()
        yield from self.rounds(replica, replica.results())

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.serve())

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        for record in records:
            if self.position == "reset" or replica.memory["finished"] >= self.micro_batches:
                replica.memory["finished"] = 0
            yield record


_KNOWN = {"in_flight": ("finish", "abandon", "bank"), "position": ("reset", "carry")}
