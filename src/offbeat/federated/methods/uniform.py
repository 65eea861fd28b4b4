"""Uniform replay: every client keeps as many samples as any other, drawn without looking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from offbeat.federated.methods.base import Method, share_of


@dataclass
class Uniform(Method):
    """A budget of samples a task, in equal parts; a client with fewer keeps all it has."""

    name: ClassVar[str] = "uniform"
    budget: int = 100

    def __post_init__(self) -> None:
        super().__init__()

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        members = self.client.world.members
        mine = share_of(self.budget, members.index(self.client.rank), len(members))
        some = torch.randperm(len(y), generator=self.client.private)[:mine]
        self.buffer.keep(x[some], y[some])
