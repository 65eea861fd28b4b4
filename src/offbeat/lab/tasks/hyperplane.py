"""Hyperplane regression, as in eager-SGD (arXiv 1908.04207): y = a x + noise.

The paper has 8,192 inputs and 32,768 points; here both are a thirty-second of that, in the same
proportion. Race it on the cluster eager-hyperplane-8.
"""

from __future__ import annotations

import torch
from torch import nn

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Task, drawn, sgd

_INPUTS = 256
_NOISE = 2.0


def task() -> Task:
    """Find the hyperplane; the noise leaves a loss of about 4."""
    fixed = torch.Generator().manual_seed(0)
    plane = torch.randn(_INPUTS, generator=fixed) * (8 / _INPUTS**0.5)
    x = torch.randn(5 * _INPUTS, _INPUTS, generator=fixed)
    y = (x @ plane + _NOISE * torch.randn(len(x), generator=fixed)).unsqueeze(1)
    test = _INPUTS
    return Task(
        "hyperplane",
        model=lambda: nn.Linear(_INPUTS, 1),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batches=drawn(x[test:], y[test:], 32),
        evaluate=lambda model: (
            nn.functional.mse_loss(model(x[:test]), y[:test]).item(),
            None,
        ),
        optimizer=sgd(lr=0.02),
        target=Target("loss", 8.0),
        budget_steps=300,
        draws=False,
    )
