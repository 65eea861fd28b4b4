"""Importance replay, after Re-Fed: every client keeps the samples that move its own model most.

Li et al.: "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024, arXiv
2403.05890: the idea; not the authors' code.

    v <- w, the global model;  importance <- 0
    repeat `passes` times over the client's samples:
        importance_j += norm of the gradient of sample j at v
        v <- v - lr (gradient + pull (v - w))             a model of this client's own
    keep the budget / K most important samples

Differs from the paper: the norm is that of the last layer's gradient, which is
|softmax - label| |feature|, so that a pass costs one evaluation; v takes one step a micro-batch.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from offbeat.federated.features import evaluating, features
from offbeat.federated.methods.base import Method, share_of


@dataclass
class Importance(Method):
    """A budget of samples a task, in equal parts: the most important of each client."""

    name: ClassVar[str] = "importance"
    budget: int = 100
    passes: int = 2
    lr: float = 0.01
    pull: float = 0.5

    def __post_init__(self) -> None:
        super().__init__()

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        members = self.client.world.members
        mine = share_of(self.budget, members.index(self.client.rank), len(members))
        best = self._importance(model, x, y).argsort(descending=True, stable=True)[:mine]
        self.buffer.keep(x[best], y[best])

    def _importance(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        own, total = deepcopy(model), torch.zeros(len(y))
        if not len(y):
            return total
        columns = self.client.columns(y)
        for _ in range(self.passes):
            total += self._norms(own, x, columns)
            order = torch.randperm(len(y), generator=self.client.private)
            for some in torch.split(order, 64):
                self._step(own, model, x[some], columns[some])
        return total

    def _norms(self, own: nn.Module, x: Tensor, columns: Tensor) -> Tensor:
        with evaluating(own):
            shares = self.client.logits(own, x).softmax(1)
            errors = shares - one_hot(columns, shares.shape[1])
        rows = features(own, x, self.client.rank)
        norms: Tensor = errors.square().sum(1).sqrt() * rows.square().sum(1).sqrt()
        return norms

    def _step(self, own: nn.Module, model: nn.Module, x: Tensor, columns: Tensor) -> None:
        weights = list(own.parameters())
        loss = cross_entropy(self.client.logits(own, x), columns)
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for mine, common, gradient in zip(weights, model.parameters(), gradients, strict=True):
                mine.sub_(gradient + self.pull * (mine - common), alpha=self.lr)
