"""Rescaled ASGD: asynchronous SGD for workers whose data differ, without any memory for it.

"Rescaled Asynchronous SGD", arXiv 2605.13434 (its abstract was at hand).

    repeat, on every worker i:
        g <- gradient at w, the newest parameters when it began
        w <- w - lr (tau_i / mean of all tau) g

tau_i is what a gradient takes worker i. So every worker moves the parameters as much in a second as
any other, and the fixed point is that of the mean over workers; asynchronous SGD's is that of the
mean over gradients, most of which are the fast workers'.

Differs from the paper, as far as its abstract tells: tau_i is the time since this worker's latest
gradient that was applied. These times add up to the time that has passed, whatever the speeds do,
and what is dropped meanwhile. `max_delay` leaves out what comes too late, as Ringmaster ASGD does.

Do not use when workers hold parts of the same data (`RingmasterASGD` is faster there), or with
speeds so unlike that lr max(tau) / mean(tau) would be too much for one step: the slowest have the
stalest gradients, and the largest steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.asynchronous import Asynchronous
from offbeat.rounds import DROPPED, Judge, Ticket, Verdict


@dataclass(frozen=True)
class RescaledASGD(Asynchronous):
    """Every gradient, by the time that its worker has taken."""

    max_delay: int | float = math.inf
    """What has missed as many updates, or more, is left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_delay != math.inf:
            self.check_counts("max_delay")

    def judge(self, size: int) -> Judge:
        return ByTime(size, self.max_delay)

    def delay(self, size: int) -> int:
        return int(min(self.max_delay, size)) - 1


class ByTime(Judge):
    """Every gradient is an update, the larger, the longer since its worker's last."""

    def __init__(self, size: int, max_delay: float) -> None:
        super().__init__(size)
        self._max_delay = max_delay
        self._since_s = [0.0] * size  # of each worker's latest that was applied
        self._gaps_s: list[float] = [0.0] * size
        self._known = 0  # workers with a gap
        self._sum_s = 0.0

    def judge(self, ticket: Ticket) -> Verdict:
        worker = ticket.worker
        self._since_s[worker] += ticket.seconds
        if self.delay(ticket) >= self._max_delay:
            return DROPPED
        gap_s, self._since_s[worker] = self._since_s[worker], 0.0
        self._known += self._gaps_s[worker] == 0.0 < gap_s
        self._sum_s += gap_s - self._gaps_s[worker]
        self._gaps_s[worker] = gap_s
        mean_s = self._sum_s / max(self._known, 1)
        self.version += 1
        scale = gap_s / mean_s if mean_s > 0 else 1.0
        return Verdict(update=True, divisor=ticket.samples, scale=scale)
