"""Ringmaster ASGD: asynchronous SGD without the gradients that come too late; optimal in time.

Maranjyan, Tyurin, Richtárik: "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time
Complexity", ICML 2025, arXiv 2501.16168.

    k <- 0
    for every gradient g that comes, computed since version v:
        if k - v < R:
            w <- w - lr g;  k <- k + 1
        its worker begins anew at w
        stop="expired": so does everybody who has been computing for R updates

R = max(1, sigma^2 / epsilon) in theory: as many gradients as are worth being averaged. The smaller
it is, the larger may the learning rate be, of the order of 1 / (2 R L).

Differs from the paper: no server, but tickets, an exchange from one worker to all, and verdicts
that all come to by themselves. `max_delay="auto"` is ours: sqrt(m S), S the noise that gradients
show, m the number of workers with which the least time is reached, by the speeds that they show
(docs/theory.md). With `stop="longer"` only those are stopped for whom the rest would take longer
than a fresh gradient does: with a server it saves models, a quarter of 1,000 an update are left of
6,174 workers, and it loses what stopping gains (docs/crowd.md). Here a restart costs no message.

Do not use when workers have unlike data: the slow ones' count less, or never. `RingleaderASGD` and
`RescaledASGD` are for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from offbeat.algorithm import is_count
from offbeat.asynchronous import Asynchronous, Useful, at_once, if_longer
from offbeat.rounds import DROPPED, Expiry, GivesUp, Judge, Ticket, Verdict, Watches
from offbeat.theory import optimal_time


@dataclass(frozen=True)
class RingmasterASGD(Asynchronous):
    """Every gradient that has missed fewer updates than a limit."""

    max_delay: int | float | Literal["auto"] = "auto"
    """R: what has missed as many updates, or more, is left out; `math.inf` for none. "auto": the
    number of workers, or fewer, by the noise and the speeds that show."""
    stop: Literal["never", "expired", "longer"] = "expired"
    """Who leaves a gradient that would come too late: nobody, everybody, or whom it saves time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choices()
        if self.max_delay != "auto" and not _is_limit(self.max_delay):
            raise ValueError(
                f'max_delay must be "auto", a whole number above 0, or math.inf, '
                f"got {self.max_delay!r}"
            )

    def judge(self, size: int) -> Judge:
        return NotTooLate(size, self.max_delay, self.stop != "never")

    def watches(self, size: int) -> Watches | None:
        return Useful(size, most=size) if self.max_delay == "auto" and size > 1 else None

    @property
    def gives_up(self) -> GivesUp:
        return if_longer if self.stop == "longer" else at_once

    def delay(self, size: int) -> int:
        return size - 1 if self.max_delay == "auto" else int(min(self.max_delay, size)) - 1


def _is_limit(value: object) -> bool:
    return value == math.inf or is_count(value)


class NotTooLate(Judge):
    """A gradient with a delay below R is an update; who has been computing for R, begins anew."""

    def __init__(self, size: int, max_delay: int | float | str, stops: bool) -> None:
        super().__init__(size)
        self.limit = float(size) if isinstance(max_delay, str) else max_delay
        self._expiry = Expiry(size) if stops else None
        self._chooses = isinstance(max_delay, str)
        self._took_s: dict[int, float] = {}  # the least of each worker that has come
        self._known = (0.0, 0)  # what the limit was chosen from

    def learn(self, scale: float) -> None:
        """R updates take H_m (1 + R/m) seconds, and S/R + 1 times as many are needed: sqrt(m S)."""
        known = (scale, len(self._took_s))
        if self._took_s and known != self._known:
            m = optimal_time(self._took_s.values(), scale).m
            self.limit, self._known = max(1.0, round(math.sqrt(m * scale))), known

    def judge(self, ticket: Ticket) -> Verdict:
        if self._chooses and ticket.seconds > 0:
            least_s = self._took_s.get(ticket.worker, math.inf)
            self._took_s[ticket.worker] = min(least_s, ticket.seconds)
        if self.delay(ticket) >= self.limit:
            self._begins(ticket.worker)
            return DROPPED
        self.version += 1
        self._begins(ticket.worker)
        stopped = self._expiry.expired(self.version, self.limit) if self._expiry else ()
        return Verdict(update=True, divisor=ticket.samples, stopped=stopped)

    def _begins(self, worker: int) -> None:
        if self._expiry is not None:
            self._expiry.restarts(worker, self.version)
