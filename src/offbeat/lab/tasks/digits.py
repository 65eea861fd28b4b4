"""Handwritten digits by a small convolutional net: real data that ships with offbeat."""

from __future__ import annotations

from torch import nn

from offbeat.lab import digits as data
from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Task, classified, drawn, sgd


def task() -> Task:
    """Tell ten digits apart, 95 % of them."""
    train_x, train_y, test_x, test_y = data.split()
    return Task(
        "digits",
        model=lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(1024, 10)),
        ),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=drawn(train_x, train_y, 48),
        evaluate=lambda model: classified(model, test_x, test_y),
        optimizer=sgd(lr=0.2, momentum=0.5),
        target=Target("accuracy", 0.95),
        budget_steps=250,
        draws=False,
    )
