"""Momentum tracking: no bias of unlike data, on any graph, also one that changes; neighbours wait.

Takezawa et al.: "Momentum Tracking: Momentum Acceleration for Decentralized Deep Learning on
Heterogeneous Data", TMLR 2023, arXiv 2209.15505.

    repeat, on every worker i:                      c_i = 0 at first
        u_i <- beta u_i + g_i
        send x_i - lr (u_i - c_i), and c_i - u_i, to those who hear i
        x_i <- sum over j of W[i, j] of the first
        c_i <- sum over j of W[i, j] of the second, + u_i

c_i is how far u_i is from the mean of all; the sum of all c is 0, always. Both parts travel in one
message, of twice the size.

Which graphs are stable: all on which D-PSGD is. With "one-peer", the default, a worker sends to one
other and hears one other in each round, and in log2 P rounds all have mixed exactly.

Differs from the paper: u <- beta u + g, as in torch, so its learning rate is lr / (1 - beta). Any
optimizer makes the step that g is taken from. A worker that is away or has left counts as one with
a gradient of 0.

Do not use when bytes are what is short, and data are alike: `DecentLaM` sends half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from offbeat.decentralised import Decentralised
from offbeat.merges import Mix, Tracking


@dataclass(frozen=True)
class MomentumTracking(Decentralised):
    """A worker steps along an estimate of everybody's momentum."""

    mix: ClassVar[type[Mix]] = Tracking

    graph: Any = "one-peer"
    beta: float = 0.9
    """The momentum, in place of the optimizer's."""
