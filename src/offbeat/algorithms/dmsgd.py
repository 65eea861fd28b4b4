"""DmSGD: D-PSGD with each worker's own momentum; only neighbours wait for each other.

Yu, Jin, Yang: "On the Linear Speedup Analysis of Communication Efficient Momentum SGD for
Distributed Non-Convex Optimization", ICML 2019, arXiv 1905.03817. A baseline.

    repeat, on every worker i:
        m_i <- beta m_i + g_i                           the optimizer's own momentum
        send x_i - lr m_i to those who hear i
        x_i <- sum over j of W[i, j] of what j has sent

It is `DPSGD` with an optimizer that has momentum, under the name by which papers compare with it.

Differs from the paper: mixes after every step, not every few, and after the step, not beside it. A
momentum is each worker's own, and does not travel; any optimizer that has one will do. A worker
that is away or has left goes on mixing, without a step.

Do not use when workers have unlike data: the fixed point is that of D-PSGD with lr / (1 - beta), so
its bias is up to 1 / (1 - beta)^2 times as large. `DecentLaM` does not have that factor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from offbeat.decentralised import Decentralised


@dataclass(frozen=True)
class DmSGD(Decentralised):
    """The same, with the optimizer's momentum: m <- beta m + g, x <- W (x - lr m)."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise unless there is a momentum."""
        if not any(group.get("momentum") or "betas" in group for group in optimizer.param_groups):
            name = type(optimizer).__name__
            raise ValueError(
                f"DmSGD is D-PSGD with the momentum of the optimizer, but {name} has none: "
                "give it momentum=0.9, or take DPSGD"
            )
