"""Ringleader ASGD: asynchronous SGD for workers whose data differ; all count the same.

Maranjyan, Richtárik: "Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity
under Data Heterogeneity", arXiv 2509.22860.

    a round:
        1   every gradient goes into its worker's mean, and its worker goes on from where it was,
            until every worker's mean holds one
        2   w <- w - lr (the mean over workers of their means); whoever came last goes on from w.
            The next gradient of each of the others goes into its mean, and makes an update, and
            sends its worker on from w; what comes from a worker that has been sent on already goes
            into its mean of the next round
        until all have been sent on

So n updates a round, and each worker has one new point in it. Nothing is dropped, nobody is idle,
and a delay is at most 2n - 2 updates.

Differs from the paper: no server, and no table of all workers' means. Each keeps its own two, and
sends by how much it has changed; all keep the sums.

Do not use when workers hold parts of the same data: `RingmasterASGD` makes better use of the fast.
The mean is over workers, not over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.asynchronous import Asynchronous
from offbeat.rounds import Judge, Ticket, Verdict


@dataclass(frozen=True)
class RingleaderASGD(Asynchronous):
    """Every worker's mean gradient, in turn."""

    def judge(self, size: int) -> Judge:
        return InTurn(size)


class InTurn(Judge):
    """Every worker once a round, with the mean of what it has computed for it."""

    sums: ClassVar[int] = 2
    averages: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._lacking = set(range(size))  # who is not in the sum yet
        self._waiting: set[int] = set()  # who has not been sent on yet
        self._next: set[int] = set()  # who is in the next round's sum

    def judge(self, ticket: Ticket) -> Verdict:
        worker = ticket.worker
        if self._lacking:
            self._lacking.discard(worker)
            if self._lacking:
                return Verdict(fresh=False)
            self._waiting = set(range(self.size))
        elif worker not in self._waiting:
            self._next.add(worker)
            return Verdict(into=1, fresh=False)
        self._waiting.discard(worker)
        self.version += 1
        if self._waiting:
            return Verdict(update=True, divisor=self.size, then="keep")
        self._lacking = set(range(self.size)) - self._next
        self._next = set()
        return Verdict(update=True, divisor=self.size, then="next")
