"""EDM: exact diffusion with momentum; D-PSGD without the bias of unlike data; only neighbours wait.

"EDM", arXiv 2501.19082; with beta 0 it is exact diffusion, or D^2 (Tang et al., ICML 2018, arXiv
1803.07068).

    repeat, on every worker i:                      psi_i = x_i at first
        m_i <- beta m_i + g_i
        psi' <- x_i - lr m_i
        send psi' + x_i - psi_i to those who hear i;  psi_i <- psi'
        x_i <- sum over j of W[i, j] of what j has sent

Which graphs are stable: a disagreement of the eigenvalue lambda of W follows z^2 - 2 lambda z +
lambda = 0. A symmetric graph needs eigenvalues above -1/3, which (I + W) / 2 has: the lazy graphs.
A ring of an even number of workers is on the edge. Directed ones, and those that change in time,
mostly diverge: a lazy one-peer graph does from 32 workers on. That is refused before the start.

Differs from the paper: m <- beta m + g, as in torch, so its learning rate is lr / (1 - beta). Any
optimizer makes the step that g is taken from. A worker that is away or has left counts as one with
a gradient of 0.

Do not use when the graph changes in time: `MomentumTracking` can, for twice the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.decentralised import Decentralised
from offbeat.merges import Corrected, Mix


@dataclass(frozen=True)
class EDM(Decentralised):
    """What mixing has moved in the last round is added again before this one."""

    mix: ClassVar[type[Mix]] = Corrected
    instead: ClassVar[str] = (
        "take a lazy symmetric graph ('lazy-ring', 'lazy-mesh', 'lazy-symmetric-exponential'), "
        "or MomentumTracking"
    )

    graph: Any = "lazy-ring"
    beta: float = 0.9
    """The momentum, in place of the optimizer's."""
