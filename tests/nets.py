"""Small models and loops that many tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster

FOUR = Cluster.parse(
    "workers = 4\nspeed = [1.0, 0.9, 0.5, 0.4]\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 0.1"
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def threads_left() -> list[str]:
    """Those that outlive an attachment, which should be none.

    But who connects cannot be interrupted: that thread is left behind if a worker is lost meanwhile
    (worlds/gloo.py), or if another connection to the store came first (worlds/pool.py).
    """
    every = (each for each in threading.enumerate() if each is not threading.main_thread())
    return [each.name for each in every if not each.name.startswith("offbeat-connect")]


def batch(rank: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """The data of one worker's step: the same in every world."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)


def loss(model: nn.Module, rank: int, step: int, size: int = 4) -> Tensor:
    x, y = batch(rank, step, size)
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(
    steps: int | Callable[[int], int] = 5,
    algorithm: offbeat.Algorithm | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    size: Callable[[int], int] | None = None,
    data: Callable[[int], int] | None = None,
    **settings: Any,
) -> tuple[list[list[Tensor]], offbeat.Stats]:
    """Train this worker; return its parameters after every step and at the end, and its stats.

    `data` says whose data a worker has; its own, if nothing does.
    """
    rank = offbeat.rank()
    model = net(seed=rank)  # every worker starts elsewhere: attach takes over worker 0's
    opt = optimizer(model)
    trajectory = []
    with offbeat.attach(model, opt, algorithm, **settings) as dp:
        for step in range(steps if isinstance(steps, int) else steps(rank)):
            opt.zero_grad()
            if size is not None:
                dp.samples(size(rank))
            whose = rank if data is None else data(rank)
            loss(model, whose, step, 4 if size is None else size(rank)).backward()
            opt.step()
            trajectory.append(parameters(model))
    trajectory.append(parameters(model))
    return trajectory, dp.stats()


def plain(
    workers: int,
    steps: int | Callable[[int], int] = 5,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    size: Callable[[int], int] | None = None,
) -> list[list[Tensor]]:
    """What synchronous SGD must do, on one process with plain PyTorch: mean over all samples."""
    model = net(seed=0)
    opt = optimizer(model)
    trajectory = []
    counts = [steps if isinstance(steps, int) else steps(rank) for rank in range(workers)]
    for step in range(max(counts)):
        opt.zero_grad()
        sizes = [size(rank) if size else 1 for rank in range(workers)]
        present = [rank for rank in range(workers) if step < counts[rank]]
        total = sum(sizes[rank] for rank in present)
        for rank in present:
            weight = sizes[rank] / total
            (weight * loss(model, rank, step, size(rank) if size else 4)).backward()
        opt.step()
        trajectory.append(parameters(model))
    return [*trajectory, parameters(model)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def close(left: list[Tensor], right: list[Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(a, b, atol=tolerance) for a, b in zip(left, right, strict=True))


def agree_on_the_base(algorithm: offbeat.Algorithm, cluster: Cluster) -> None:
    """Hold what `dp.agreed()` shows, round by round, against what the other workers see."""

    def worker() -> dict[int, list[Tensor]]:
        model, seen = net(), {}
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(24):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                with dp.agreed():
                    seen[dp.round] = parameters(model)
        return seen

    one, *others = offbeat.run(worker, cluster).results
    for other in others:
        common = one.keys() & other.keys()
        assert len(common) >= 4
        assert all(same(one[round], other[round]) for round in common)
