"""WAGMA-SGD: own steps, and means of models in ever other groups; who is late gives what it has.

Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler: "Breaking (Global) Barriers in
Parallel Stochastic Optimization with Wait-Avoiding Group Averaging", TPDS 2021, arXiv 2005.00124.

    on every worker, step t:
        w <- optimizer(w, own gradient)
        publish w
        if round t has not started:                         on time
            arrive, and wait for the round; with the quorum "solo" it starts at once, for all
        for every round since, of group G:                  m = mean over G of the models given
            w <- w + m - (what this worker gave)            on time: w = m

    whose round takes place: everyone's, at the first arrival (or another quorum); a background
    gives the published model of a worker that computes. Every `period` rounds G is everybody.

Who waits for whom: in a group nobody for the late; in every `period`-th round for half of all. In
the paper everybody waits for everybody there, which bounds how many steps a worker may be behind:
that is `period_quorum="all"`. On 64 workers it cost a tenth to a third of the throughput, and the
accuracy was the same (benchmarks/models.py): all models are in the mean, whoever is waited for.
With "solo" nearly everybody's is one step old. Where few are late, and by much, `quorum=0.9` and
`period_quorum=0.9` cost a tenth of the throughput, and end where all-reduce does (docs/models.md).

Differs from the paper: a late worker keeps what it has done since it gave its model (the delta
rule), so that no progress is lost and the mean over workers is kept, whoever is late. The paper's
rule, w <- (sum over G + w) / (|G| + 1), is `late="paper"`: of what a late worker has done, one
share of |G| + 1 survives. Any number of workers, not only powers of two. The round's mean goes
under the next step of a worker that computes, not over it. The last round of all is everybody's, so
replicas are the same at the end.

The paper's printed pseudo-code shifts the same mask again in every phase: of 8 workers in groups
of 4 it makes pairs in round 1. We build the groups of its example. The released code does not
rotate them where floor(log_S P) is 1, divides by |G| + 1 also for who is on time, and averages
everybody's models in every 11th round, not in every 10th.

Momentum stays each worker's own, as in the paper, or is averaged with the model. Replicas differ
between rounds; `dp.agreed()` shows the mean of all. Do not use where they must be the same, or with
a prime number of workers: its only groups are everybody, and each alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.merges import Offered, Public
from offbeat.replica import Replica
from offbeat.rounds import Groups, Quorum, Round, Rules, SumInGroups


@dataclass(frozen=True)
class WAGMASGD(Algorithm):
    """Own steps, and means of models in groups that nobody is waited for in."""

    group: int | None = None
    """Workers of a group, S; it divides their number P. None: the least that is sqrt(P) or more."""
    period: int = 10
    """Every so many rounds, tau, all workers are one group."""
    quorum: str | int | float = "solo"
    """Who must be on time for a round: see EagerSGD."""
    period_quorum: str | int | float = 0.5
    """Who must be on time for a round of all; "all" in the paper."""
    late: Literal["delta", "paper"] = "delta"
    momentum: Literal["local", "averaged"] = "local"
    delay: Literal[0, 1] = 0
    """With 1 a worker does not wait for the exchange of its own round, but for the one before."""

    def __post_init__(self) -> None:
        self.check_choices()
        self.check_counts("period", *([] if self.group is None else ["group"]))

    def check(self, size: int) -> None:
        if self.group is not None and size % self.group:
            fit = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
            raise ValueError(
                f"group must divide the number of workers, {size}, into groups of as many each: "
                f"{fit}; got {self.group}"
            )
        Quorum.of(self.quorum, size)
        Quorum.of(self.period_quorum, size, "period_quorum")

    def groups(self, workers: int) -> Groups:
        """Who meets whom, by round."""
        fits = (each for each in range(1, workers + 1) if workers % each == 0)
        size = self.group or next(each for each in fits if each**2 >= workers)
        return Groups(workers, size, self.period)

    def start(self, replica: Replica) -> None:
        groups = self.groups(replica.world.size)
        merge = Public if self.late == "delta" else Offered
        replica.open(
            Rules(
                self.quorum,
                period=self.period,
                period_quorum=self.period_quorum,
                lateness="step",
            ),
            moves=lambda _: 1.0,
            merge=partial(merge, world=replica.world, statistics=len(replica.buffers)),
            exchange=partial(SumInGroups, groups=groups),
            momenta=self.momentum == "averaged",
        )

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        replica.contribute(delay=self.delay)
        yield from replica.results()
