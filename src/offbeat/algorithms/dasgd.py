"""DaSGD: local SGD whose average is launched now and merged a few steps later; nobody waits for it.

Zhou, Wang, et al.: "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using
Delayed Averaging", arXiv 2006.00441 (its abstract and the released code were at hand).

    on every worker, tau = `steps`, d = `delay`:
        after own step k = r tau:       x <- w ;  start A = mean over workers of x
        after own step k = r tau + d:   w <- w + A - x                      merge="delta"
                                        w <- xi w + (1 - xi) A              merge="paper"

Communication is hidden if it takes at most d steps. With `delay="auto"`, each worker takes the
smallest d that hid its latest rounds: from launch to result, in steps of its own. Workers need not
agree on it. A worker whose average has not come after d steps waits for it.

Differs from the paper: its merge throws away 1 - xi of what all have moved in those d steps; ours
keeps it (the rule of CoCoD-SGD, arXiv 1906.12043), and "paper" is a switch. Also, `quorum`: with
fewer than all, an average starts with those that have come, and nobody waits for the slow; what
these bring goes into a later one. Every step of every worker then counts the same, whenever it
comes: a round is divided by the weight of all workers that are in their loops. Models weigh by the
samples of a step, and running statistics are averaged with them; in the released code they are not.

Do not use when workers differ in speed, but with a quorum: delays hide the network, not a slow
worker. Replicas differ at any time; `dp.agreed()` shows the mean. Alone, with merge="paper", it is
not plain training: it is pulled back to its own past.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

from offbeat.algorithm import Algorithm
from offbeat.merges import Pull, Shift
from offbeat.replica import Replica
from offbeat.rounds import Quorum, Round, Rules

_REMEMBERED = 8  # rounds


@dataclass(frozen=True)
class DaSGD(Algorithm):
    """Own steps, and averages that are merged some steps after they were launched."""

    steps: int = 4
    """Steps of a worker from one launch to the next; tau in the paper."""
    delay: int | Literal["auto"] = "auto"
    """Own steps between launch and merge, 1 to `steps`; d in the paper."""
    merge: Literal["delta", "paper"] = "delta"
    xi: float = 0.25
    """With the paper's merge: how much of a worker's own model stays."""
    quorum: str | int | float = "all"
    """Who must have come for an average to start."""

    def __post_init__(self) -> None:
        self.check_counts("steps")
        self.check_choices()
        if self.delay != "auto":
            whole = isinstance(self.delay, int) and not isinstance(self.delay, bool)
            if not whole or not 1 <= self.delay <= self.steps:
                raise ValueError(
                    f'delay must be "auto" or between 1 and the {self.steps} steps of a round, '
                    f"got {self.delay!r}"
                )
        if not (isinstance(self.xi, int | float) and 0 <= self.xi < 1):
            raise ValueError(f"xi must be at least 0 and below 1, got {self.xi!r}")

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        rules = Rules(self.quorum, at_arrival=True, divisor="moves")
        merge = partial(Pull, share=self.xi) if self.merge == "paper" else Shift
        replica.open(rules, moves=lambda pile: pile.batch_per_step, merge=merge)
        replica.memory.update(delay=self.steps if self.delay == "auto" else self.delay, lags_s=[])

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        replica.contribute(arrive=False)
        if not replica.under_way:  # rounds of the others, if there are any
            yield from self.rounds(replica, replica.newest())
        elif replica.piled >= replica.memory["delay"]:
            step_s = replica.seconds
            yield from self.rounds(replica, replica.results())
            if self.delay == "auto" and step_s:
                hides = ceil(max(replica.memory["lags_s"], default=0.0) / step_s - 1e-6)
                replica.memory["delay"] = min(max(hides, 1), self.steps)
        if replica.piled >= self.steps:
            replica.arrive()

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            if replica.world.rank in each.ranks:
                lags_s = [*replica.memory["lags_s"], each.ended_s - replica.gave_s]
                replica.memory["lags_s"] = lags_s[-_REMEMBERED:]
            yield each
