"""Nothing to learn: a race by timing alone, which costs no tensors.

A micro-batch takes what the cluster file says, and brings a gradient of no numbers. All else is as
ever: who waits for whom, what is late, stale or dropped. Messages carry the header only, so a
network's bandwidth counts for little.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.lab.tasks.base import Batch, Task

_SAMPLES = 32.0
_LOSS = torch.tensor(0.0)
_GRADIENT = torch.empty(0)  # of no numbers, so all may have the same


class _Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.every = [self.nothing]  # modules are slow to find a parameter by its name


class _NoStep(Optimizer):
    """Calls the hooks of a step, and makes none. PyTorch's own way to call them is slow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is nothing to forget."""

    def step(self) -> None:  # type: ignore[override]
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (self,), {})
        for after in self._optimizer_step_post_hooks.values():
            after(self, (self,), {})

    step.hooked = True  # type: ignore[attr-defined]  # so torch does not wrap it


def task() -> Task:
    """Compute micro-batches of nothing."""

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        return repeat(_SAMPLES)

    def loss(model: Any, batch: Batch) -> Tensor:
        """There is no backward pass: the gradient is there."""
        for parameter in model.every:
            parameter.grad = _GRADIENT
        return _LOSS

    return Task(
        "timing",
        model=_Nothing,
        loss=loss,
        batches=batches,
        evaluate=lambda model: (0.0, None),
        optimizer=_NoStep,
        target=None,
        budget_steps=200,
        samples=lambda batch: batch,
        draws=False,
    )
