"""A client's replay buffer: the old samples that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Buffer:
    """Samples of tasks that are over, in the order in which they were kept."""

    def __init__(self) -> None:
        self._x: list[Tensor] = []
        self._y: list[Tensor] = []

    def __len__(self) -> int:
        return sum(len(each) for each in self._y)

    def keep(self, x: Tensor, y: Tensor) -> None:
        """Keep these, too."""
        if len(x) != len(y):
            raise ValueError(f"{len(x)} samples do not go with {len(y)} labels")
        if len(y):
            self._x.append(x.clone())
            self._y.append(y.clone())

    def after(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return these samples, followed by all that were kept."""
        return torch.cat([x, *self._x]), torch.cat([y, *self._y])

    def histogram(self, classes: Sequence[int]) -> Tensor:
        """How many samples there are of each of these classes."""
        labels = torch.cat([*self._y, torch.zeros(0, dtype=torch.int64)])
        return torch.stack([(labels == kind).sum() for kind in classes])
