"""What a task is: a model, its data, and when it has been learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.lab.goals import Target

Batch = Any


def _length(batch: Batch) -> float:
    return float(len(batch[0]))


@dataclass(frozen=True)
class Task:
    """Something to learn, the same for every contestant.

    Every worker draws from all of the data with a generator of its own, so that fast workers do
    not see their share more often than slow ones see theirs.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    """The mean over the samples of a micro-batch; it calls the model, as a wrapper must hear. If it
    needs no backward pass, none is made."""
    batches: Callable[[int, int, int], Iterator[Batch]]
    """Of a rank, the number of workers and a seed: micro-batches without end."""
    evaluate: Callable[[nn.Module], tuple[float, float | None]]
    """Loss and accuracy, or None, on what nobody trains on."""
    optimizer: Callable[[nn.Module], Optimizer]
    target: Target | None
    """None if nothing is learnt: then only speed is measured, in virtual time."""
    budget_steps: int
    """With `--until target`, or without a target, runs end after as many seconds as the slowest
    worker needs for so many micro-batches: a generous multiple of what synchronous SGD needs."""
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    """The learning rate's, stepped for every synchronous round's worth of steps (schedule.py)."""
    samples: Callable[[Batch], float] = _length
    """What a micro-batch weighs in averages, and in the cluster's `sample_s`."""
    draws: bool = True
    """Whether the model or the loss draws random numbers, as dropout does. If not, virtual workers
    need no random generators of their own, which makes them faster."""


def generator(seed: int, rank: int) -> torch.Generator:
    """Return one worker's generator of data: the same for every contestant."""
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)


def drawn(x: Tensor, y: Tensor, size: int) -> Callable[[int, int, int], Iterator[Batch]]:
    """Return `batches` of `size` samples, drawn from all of x and y."""

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        mine = generator(seed, rank)
        while True:
            some = torch.randint(len(x), (size,), generator=mine)
            yield x[some], y[some]

    return batches


def classified(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return loss and accuracy of a classifier."""
    outputs = torch.cat([model(some) for some in torch.split(x, 1000)])
    right = (outputs.argmax(dim=1) == y).double().mean().item()
    return nn.functional.cross_entropy(outputs, y).item(), right


def sgd(lr: float, momentum: float = 0.0) -> Callable[[nn.Module], Optimizer]:
    """Return `optimizer` for plain SGD.

    Momentum and stale gradients amplify each other, so tasks use little of it, or none.
    """
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
