"""Logistic regression on two overlapping clouds of points: convex, and so without surprises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Batch, Task, drawn, sgd

_POINTS = 4000
_INPUTS = 50
_PENALTY = 1e-3


def task() -> Task:
    """Learn a regularised logistic regression; its best loss is about 0.32."""
    fixed = torch.Generator().manual_seed(0)
    direction = torch.randn(_INPUTS, generator=fixed)
    x = torch.randn(_POINTS, _INPUTS, generator=fixed) * torch.logspace(0, -1, _INPUTS)
    chance = torch.sigmoid(2 * x @ direction)
    y = (torch.rand(_POINTS, generator=fixed) < chance).float()
    test = _POINTS // 4

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        fit = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels)
        return fit + _PENALTY * sum(weight.square().sum() for weight in model.parameters())

    def evaluate(model: nn.Module) -> tuple[float, float]:
        right = (model(x[:test]).squeeze(1) > 0).float() == y[:test]
        return loss(model, (x[:test], y[:test])).item(), right.double().mean().item()

    return Task(
        "logistic",
        model=lambda: nn.Linear(_INPUTS, 1),
        loss=loss,
        batches=drawn(x[test:], y[test:], 16),
        evaluate=evaluate,
        optimizer=sgd(lr=0.2),
        target=Target("loss", 0.34),
        budget_steps=800,
        draws=False,
    )
