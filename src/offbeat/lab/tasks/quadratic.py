"""A noisy quadratic: the hard case of the theory, whose optimum is known.

f(x) = x'Ax/2 - b'x with A = tridiag(-1, 2, -1)/4, b = (-1, 0, ..., 0)/4, and gradients with added
noise, as in the experiments of Tyurin and Richtárik (arXiv 2305.12387). The loss is f(x) - min f.
`quadratic:0.05` has so much noise, as a standard deviation, in each of the 16 coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Batch, Task, generator, sgd

_SIZE = 16
_NOISE = 0.02
_START = 4.0


class _Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(_SIZE))
        with torch.no_grad():
            self.x[0] = _START

    def forward(self) -> Tensor:
        return self.x


def task(noise: str = "") -> Task:
    """Come close to the minimum of a quadratic of condition number 117."""
    spread = _NOISE if not noise else _checked(noise)
    ones = torch.ones(_SIZE)
    matrix = (2 * torch.diag(ones) - torch.diag(ones[1:], 1) - torch.diag(ones[1:], -1)) / 4
    slope = torch.zeros(_SIZE)
    slope[0] = -0.25

    def value(x: Tensor) -> Tensor:
        return x @ (matrix @ x) / 2 - slope @ x

    least = value(torch.linalg.solve(matrix, slope)).item()

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        mine = generator(seed, rank)
        while True:
            yield spread * torch.randn(_SIZE, generator=mine)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = model()
        return value(x) + torch.dot(batch, x)

    return Task(
        f"quadratic:{noise}" if noise else "quadratic",
        model=_Point,
        loss=loss,
        batches=batches,
        evaluate=lambda model: (value(model()).item() - least, None),
        optimizer=sgd(lr=0.5),
        target=Target("loss", 0.01),
        budget_steps=500,
        samples=lambda batch: 1.0,
        draws=False,
    )


def _checked(noise: str) -> float:
    try:
        spread = float(noise)
    except ValueError:
        spread = -1.0
    if not 0 <= spread < math.inf:
        raise ValueError(f"quadratic:{noise}: the noise is a number from 0 on, such as 0.02")
    return spread
