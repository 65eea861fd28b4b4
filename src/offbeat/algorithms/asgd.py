"""Asynchronous SGD: every gradient is an update as soon as it comes; nobody waits for anybody.

    repeat, on every worker:
        g <- gradient at w, the newest parameters when it began
        w <- w - lr g        in the order in which gradients come

`delay_adaptive=True`: a gradient with a delay of d updates is applied with lr n / max(n, d), n the
number of workers (Mishchenko et al.: "Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays",
NeurIPS 2022, arXiv 2206.07638; Koloskova et al., arXiv 2206.08307; the rule as Ringmaster ASGD's
authors have it as their baseline).

Differs from the papers: no server, but tickets, an exchange from one worker to all, and verdicts
that all come to by themselves. n is the number of workers that began, also when some have left.

Do not use when some workers are much slower than others (`RingmasterASGD` leaves out what comes
too late), or when workers have unlike data: those of the fast count more (`RingleaderASGD`,
`RescaledASGD`).
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.asynchronous import Asynchronous
from offbeat.rounds import Judge, Ticket, Verdict


@dataclass(frozen=True)
class ASGD(Asynchronous):
    """Every gradient, however late."""

    delay_adaptive: bool = False
    """A smaller learning rate for what comes late."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_switches("delay_adaptive")

    def judge(self, size: int) -> Judge:
        return All(size, self.delay_adaptive)


class All(Judge):
    """Every gradient is an update."""

    def __init__(self, size: int, adaptive: bool) -> None:
        super().__init__(size)
        self._adaptive = adaptive

    def judge(self, ticket: Ticket) -> Verdict:
        scale = self.size / max(self.size, self.delay(ticket)) if self._adaptive else 1.0
        self.version += 1
        return Verdict(update=True, divisor=ticket.samples, scale=scale)
