"""Pull: a worker keeps a share of where it is, and takes the rest from the mean.

    parameters <- share * parameters + (1 - share) * base       the base is the mean of the places

What all workers have moved between giving and merging counts by that share only: the rest is lost.
That is the merge of the DaSGD paper. A worker that has not moved since takes the mean; so does, by
a shift, one that has not given anything to the round, or that does not come for it in time.
"""

from __future__ import annotations

import torch

from offbeat.merges.shift import Shift
from offbeat.rounds import Flats, Layout


class Pull(Shift):
    """A shift that does not keep all of what was moved since."""

    def __init__(self, layout: Layout, alone: bool, *, share: float) -> None:
        super().__init__(layout, False)  # alone, too, it is pulled back to its own place
        self._share = share

    @torch.no_grad()
    def _meet(self, place: Flats) -> None:
        """As if it had given its move at share * base + (1 - share) * parameters."""
        for here, base, now in zip(place.views, self._base.views, self._parameters, strict=True):
            here.copy_(base).mul_(self._share).add_(now, alpha=1 - self._share)
