"""DecentLaM: D-PSGD with a momentum that does not amplify its bias; only neighbours wait.

Yuan et al.: "DecentLaM: Decentralized Momentum SGD for Large-Batch Deep Training", ICCV 2021, arXiv
2104.11981.

    repeat, on every worker i:
        y_i <- x_i - lr g_i
        send y_i to those who hear i
        z_i <- sum over j of W[i, j] y_j
        m_i <- beta m_i + (x_i - z_i) / lr
        x_i <- x_i - lr m_i

So the momentum is one of half-step and mixing together, and the fixed point that of D-PSGD with the
same learning rate, whatever beta is. DmSGD's is that with lr / (1 - beta).

Which graphs are stable: a disagreement of the eigenvalue lambda of W follows z^2 - (lambda + beta)
z + beta = 0. For a real lambda its roots are inside the unit circle: all symmetric graphs that do
not change in time. For a complex one they need not be: on the directed exponential graph it
diverges with beta 0.9, for every learning rate, and so it does on graphs that change in time. That
is refused before the start, with the eigenvalue.

Differs from the paper: any optimizer makes the half-step, without its own momentum. p = lr m is
kept in place of m, so that the learning rate may be 0; it follows the schedule. A worker that is
away or has left counts as one with a gradient of 0.

Do not use when workers have very unlike data: the bias of D-PSGD is still there. `EDM` and
`MomentumTracking` have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.decentralised import Decentralised
from offbeat.merges import HeavyBall, Mix


@dataclass(frozen=True)
class DecentLaM(Decentralised):
    """Momentum on the half-step and mixing together."""

    mix: ClassVar[type[Mix]] = HeavyBall
    instead: ClassVar[str] = (
        "take a symmetric graph that does not change in time ('ring', 'mesh', "
        "'symmetric-exponential', 'hypercube'), a smaller beta, or MomentumTracking"
    )

    beta: float = 0.9
    """The momentum, in place of the optimizer's."""
