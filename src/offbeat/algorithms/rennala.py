"""Rennala SGD: all compute at the same parameters, as often as they can, until there is enough.

Tyurin, Richtárik: "Optimal Time Complexities of Parallel Stochastic Optimization Methods Under a
Fixed Computation Model", NeurIPS 2023, arXiv 2305.12387.

    for k = 0, 1, ...:
        every worker computes one gradient at w_k after another
        when B are there:  w_{k+1} <- w_k - lr (their mean)
        what else was computed at w_k is dropped; all begin anew

B = max(1, sigma^2 / epsilon) in theory: as many gradients as are worth being averaged. No gradient
is ever stale, and the time is optimal up to a constant, as Ringmaster ASGD's is.

Differs from the paper: no server, but tickets; the mean is over samples. `batch="auto"`, from the
noise that gradients show.

Do not use when workers have unlike data: those of the fast count more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offbeat.asynchronous import Asynchronous, Useful
from offbeat.rounds import Enough, Judge, Watches


@dataclass(frozen=True)
class RennalaSGD(Asynchronous):
    """The first B gradients of every version, whosever they are."""

    batch: int | Literal["auto"] = "auto"
    """B: gradients in an update. "auto": as many as there are workers, then by their noise."""
    stop: bool = True
    """Leave a gradient of an older version at once, and begin anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_switches("stop")
        if self.batch != "auto":
            self.check_counts("batch")

    def judge(self, size: int) -> Judge:
        batch = size if self.batch == "auto" else self.batch
        return Enough(size, gradients=batch, stops=self.stop)

    def watches(self, size: int) -> Watches | None:
        return Useful(size, most=_MOST * size) if self.batch == "auto" and size > 1 else None

    def delay(self, size: int) -> int:
        return 0


_MOST = 64  # gradients of each worker in a batch
