"""Running statistics, of BatchNorm say, in a model that rounds shift.

A forward pass makes a statistic forget: s <- 0.9 s + 0.1 v. A worker that has gone on since it gave
one away has little left of what it gave. To take all of that back would overshoot:

    it gave 1.0     the mean is 0.2     meanwhile it has 0.3        0.3 + (0.2 - 1.0) = -0.5

A negative variance is NaN in the next evaluation. So a statistic that was shifted is held between
what it was before and what all agree on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copies(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """What the last tensors, so many, hold now."""
    return [each.detach().clone() for each in tensors[len(tensors) - count :]]


@torch.no_grad()
def hold(shifted: Sequence[Tensor], before: Sequence[Tensor], agreed: Sequence[Tensor]) -> None:
    """Have the last tensors, as many as there were before, between that and what is agreed on."""
    count = len(before)
    if not count:
        return
    for now, old, new in zip(shifted[-count:], before, agreed[-count:], strict=True):
        now.clamp_(torch.fmin(old, new), torch.fmax(old, new))
