"""DiLoCo: many own steps, then an outer optimizer on the mean move; little travels, seldom.

Douillard et al.: "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105. With `fragments` and `overlap`: Streaming DiLoCo, arXiv 2501.18512. With a `quorum` and
a grace: after Decoupled DiLoCo, arXiv 2604.21428.

    repeat, on every worker:
        H = `steps` times: w <- optimizer(w, own gradient)          any optimizer; its state stays
        Delta <- mean over workers of Th - w                        one exchange
        b  <- momentum b + Delta
        Th <- Th - lr (Delta + momentum b)                          Nesterov, on every worker alike
        w  <- Th

As it stands everybody waits for everybody, once every H steps. With `overlap` o, a worker makes o
own steps between launch and merge: w <- w + (Th - the w that it launched from), and waits only for
what takes longer. With `fragments` P the model is cut into P parts, of which one is due every H/P
steps, in turn: as many bytes in all, in P times smaller portions. With a `quorum`, a merge starts
with those that have come, and those that come within `grace_s` after; nobody waits for the slow.

Differs from the papers: all o steps of an overlap stay, and count once; the papers mix the two
models, which loses a part of them and of the outer step. Moves are measured from the base that all
share and weigh by the samples of a step. Decoupled DiLoCo's weights, times the samples of the move,
count a worker's speed twice, but where all moves have H steps, as here, they are the same: so they
are no setting. Its direction-averaging (RDA) is `average="directions"`, here of all parameters,
embeddings too. With data that differ between workers it settles at a geometric median of where they
pull, not at the mean, and where moves cancel out, it is as long as they are: let the rate decay. No
syncer: every worker has the outer state. With a quorum a round is divided by the weight of all in
their loops, not only of those that came, and the fragments are drawn in a new order in every turn,
so that a worker of half the speed does not bring the same ones for ever. Fragments are runs of
buckets (`bucket_bytes` of attach); running statistics are averaged, without momentum.

Do not use with few steps a round and this momentum: it belongs to H in the hundreds; from 16 steps
on down, momentum 0 and lr 1 did better (that is local SGD). Alone, with momentum, it is look-ahead,
not plain training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from offbeat.algorithm import Algorithm, check_grace, is_count, is_number
from offbeat.merges import Outer
from offbeat.replica import Replica
from offbeat.rounds import Directions, MakeExchange, Quorum, Round, Rules, SumOverAll


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """Own steps, and an outer optimizer over the mean move."""

    steps: int = 100
    """Own steps between two merges of the same part of the model; H in the paper."""
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    """Of the outer optimizer, Nesterov's."""
    fragments: int = 1
    """Parts of the model that are merged in turn."""
    overlap: int = 0
    """Own steps between launch and merge."""
    quorum: str | int | float = "all"
    """Who must have come for a merge to start."""
    grace_s: float = 0.0
    """How long it waits for more, then."""
    average: Literal["moves", "directions"] = "moves"
    """What is averaged: moves; or, of each parameter, their directions and their lengths apart."""

    def __post_init__(self) -> None:
        self.check_choices()
        self.check_counts("steps", "fragments")
        if not (is_number(self.lr) and 0 < self.lr < float("inf")):
            raise ValueError(f"the outer lr must be above 0, got {self.lr!r}")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum!r}")
        if self.steps % self.fragments:
            raise ValueError(
                f"fragments must divide the {self.steps} steps of a round, got {self.fragments}"
            )
        if not is_count(self.overlap, least=0) or self.overlap > self._period:
            raise ValueError(
                f"overlap must be between 0 and {self._period}, the steps from one launch to the "
                f"next, got {self.overlap!r}"
            )
        check_grace(self.grace_s, self.quorum)

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        rules = Rules("all", lockstep=True, divisor="moves")
        if not self._in_lockstep:
            rules = Rules(
                self.quorum,
                at_arrival=True,
                fragments=self.fragments,
                grace_s=self.grace_s,
                divisor="moves",
            )
        merge = partial(Outer, lr=self.lr, momentum=self.momentum)
        exchange: MakeExchange = SumOverAll
        if self.average == "directions" and replica.world.size > 1:
            exchange = partial(SumOverAll, launches=Directions)
        replica.open(rules, moves=lambda pile: pile.batch_per_step, merge=merge, exchange=exchange)

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        if self._in_lockstep:
            replica.contribute(arrive=replica.piled + 1 >= self.steps)
            yield from replica.results()
            return
        replica.contribute(arrive=False)
        if not replica.under_way:  # merges of the others, if there are any
            yield from replica.newest()
        elif replica.piled >= self.overlap:
            yield from replica.results()
        if replica.piled >= self._period:
            replica.arrive()
            if not self.overlap:
                yield from replica.results()

    @property
    def _period(self) -> int:
        """Own steps from one launch to the next."""
        return self.steps // self.fragments

    @property
    def _in_lockstep(self) -> bool:
        return self.quorum == "all" and not self.overlap and self.fragments == 1
