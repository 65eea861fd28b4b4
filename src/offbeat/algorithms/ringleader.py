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

from collections.abc import Sequence
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
        self._inside: set[int] = set()  # who is in the sum
        self._next: set[int] = set()  # who is in the next round's sum

    def judge(self, ticket: Ticket) -> Verdict:
        worker = ticket.worker
        if self._lacking:
            self._lacking.discard(worker)
            self._inside.add(worker)
            if self._lacking:
                return Verdict(fresh=False)
            self._waiting = self._active
        elif worker not in self._waiting:
            self._next.add(worker)
            return Verdict(into=1, fresh=False)
        self._waiting.discard(worker)
        return self._updated()

    def leaves(self, worker: int) -> Sequence[Verdict]:
        """Go on without it: what it has brought stays in its round."""
        verdicts: list[Verdict] = []
        was_last = self._waiting == {worker}
        for those in (self._lacking, self._waiting):
            those.discard(worker)
        if was_last:
            self._begin_round()
            verdicts.append(Verdict(into=None, then="next"))
        if self._inside and not self._lacking and not self._waiting:
            self._waiting = self._active
            verdicts.append(self._updated())
        return verdicts

    def _updated(self) -> Verdict:
        self.version += 1
        divisor = len(self._inside)
        if self._waiting:
            return Verdict(update=True, divisor=divisor, then="keep")
        self._begin_round()
        return Verdict(update=True, divisor=divisor, then="next")

    @property
    def _active(self) -> set[int]:
        return set(range(self.size)) - self.left

    def _begin_round(self) -> None:
        """With what was brought for it already."""
        self._inside, self._next = self._next, set()
        self._lacking = self._active - self._inside
