"""Handwritten digits in micro-batches of one: gradients are mostly noise, as they are late in
training. A small net, so that a run takes a second or two.
"""

from __future__ import annotations

from torch import nn

from offbeat.lab import digits as data
from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Task, classified, drawn, sgd


def task() -> Task:
    """Tell ten digits apart, 90 % of them, one at a time."""
    train_x, train_y, test_x, test_y = data.split()
    return Task(
        "noisy",
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=drawn(train_x, train_y, 1),
        evaluate=lambda model: classified(model, test_x, test_y),
        optimizer=sgd(lr=0.2),
        target=Target("accuracy", 0.9),
        budget_steps=900,
        draws=False,
    )
