"""D-PSGD: everybody steps alone, and after every step waits for its neighbours to mix models.

Lian et al.: "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv
1705.09056.

    repeat, on every worker i:
        y_i <- optimizer(x_i, own gradient)
        send y_i to those who hear i
        x_i <- sum over j of W[i, j] y_j

Who waits for whom: only neighbours, so a stall travels one hop a round. Replicas are never equal
before the end, where all take the mean of all models; `dp.agreed()` has that mean, at any time.
Stable on every connected graph in which workers keep some of their own (all that have a name).

Differs from the papers: mixes after the step, not beside it ("adapt then combine"), which is as
fast and has less bias. A worker that is away or has left goes on mixing, without a step.

Do not use when workers have unlike data: the fixed point is not the minimum, by O(lr) times how
unlike they are; DmSGD's is that of D-PSGD with lr / (1 - beta). `DecentLaM` does not have that
factor, `EDM` and `MomentumTracking` do not have the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.decentralised import Decentralised


@dataclass(frozen=True)
class DPSGD(Decentralised):
    """Mixing among neighbours; the optimizer is each worker's own, with all that it remembers."""
