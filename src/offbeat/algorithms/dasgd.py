"""DaSGD: local SGD whose average is launched now and merged a few steps later; nobody waits for it.

Zhou, Wang, et al.: "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using
Delayed Averaging", arXiv 2006.00441 (its abstract and the released code were at hand).

    on every worker, tau = `steps`, d = `delay`:
        after own step k = r tau:       x <- w ;  start A = mean over workers of x
        after own step k = r tau + d:   w <- w + A - x                      merge="delta"
                                        w <- xi w + (1 - xi) A              merge="paper"

Communication is hidden if it takes at most d steps. With `delay="auto"`, each worker takes the
smallest d that hides the exchange, in steps of its own: the least over workers of the time from
launch to result in a round, the longest of the latest rounds. Whoever launches last has waited for
nobody, so that is the exchange, and not the wait for a slow worker. Workers need not agree on d. A
worker whose average has not come after d steps waits for it.

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

from offbeat.algorithm import Algorithm, is_count, is_number
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
    xi: float | None = None
    """With the paper's merge: how much of a worker's own model stays; 0.25 if None."""
    quorum: str | int | float = "all"
    """Who must have come for an average to start."""

    def __post_init__(self) -> None:
        self.check_counts("steps")
        self.check_choices()
        if self.delay != "auto" and not (is_count(self.delay) and self.delay <= self.steps):
            raise ValueError(
                f'delay must be "auto" or between 1 and the {self.steps} steps of a round, '
                f"got {self.delay!r}"
            )
        if self.xi is not None and self.merge != "paper":
            raise ValueError(
                f"xi is the paper's merge's, got xi={self.xi!r} with merge={self.merge!r}: write "
                'merge="paper", or leave xi out'
            )
        if not (is_number(self._xi) and 0 <= self._xi < 1):
            raise ValueError(f"xi must be at least 0 and below 1, got {self.xi!r}")

    @property
    def _xi(self) -> float:
        return 0.25 if self.xi is None else self.xi

    def check(self, size: int) -> None:
        Quorum.of(self.quorum, size)

    def start(self, replica: Replica) -> None:
        rules = Rules(self.quorum, at_arrival=True, divisor="moves")
        merge = partial(Pull, share=self._xi) if self.merge == "paper" else Shift
        replica.open(rules, notes=1, moves=lambda pile: pile.batch_per_step, merge=merge)
        delay = self.steps if self.delay == "auto" else self.delay
        replica.own.update(delay=delay, lag_s=0.0)
        replica.memory["lags_s"] = []

    def step(self, replica: Replica) -> Iterator[Round]:
        yield replica.own_step()
        replica.contribute(arrive=False, notes=(replica.own["lag_s"],))
        if not replica.under_way:  # rounds of the others, if there are any
            yield from self.rounds(replica, replica.newest())
        elif replica.piled >= replica.own["delay"]:
            step_s = replica.seconds
            yield from self.rounds(replica, replica.results())
            if self.delay == "auto" and step_s and replica.memory["lags_s"]:
                hides = ceil(max(replica.memory["lags_s"]) / step_s - 1e-6)
                replica.own["delay"] = min(max(hides, 1), self.steps)
        if replica.piled >= self.steps:
            replica.arrive()

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            if replica.world.rank in each.ranks:
                replica.own["lag_s"] = each.ended_s - replica.gave_s
            if told := [notes[0] for notes in each.notes_by_rank if notes and notes[0]]:
                replica.memory["lags_s"] = [*replica.memory["lags_s"], min(told)][-_REMEMBERED:]
            yield each
