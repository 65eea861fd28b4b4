"""EWC: parameters that mattered for old tasks are held where they were.

Kirkpatrick et al., PNAS 2017, arXiv 1612.00796; federated as in FedCBDR's baselines.

    after task s:  F_s <- mean over all clients' samples of (gradient of log p(y | x))²
    loss           <- CE + strength / 2 * sum over s of F_s (w - w_s)²

Differs from the paper: the Fisher information is that of the labels at hand (empirical), summed
over clients, so that all pull in the same way. All old tasks are held by one sum, as
sum of F_s and sum of F_s w_s say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from offbeat.federated.features import evaluating
from offbeat.federated.methods.base import Method


@dataclass
class EWC(Method):
    """Elastic weight consolidation."""

    name: ClassVar[str] = "ewc"
    strength: float = 10.0
    """Times the learning rate and the largest Fisher information it must stay below 2."""

    def __post_init__(self) -> None:
        super().__init__()
        self._fisher: list[Tensor] = []  # sum of F_s
        self._pull: list[Tensor] = []  # sum of F_s w_s

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(model, x, y)
        held = zip(_weights(model).values(), self._fisher, self._pull, strict=False)
        for weight, fisher, pull in held:  # without what does not depend on w
            loss = loss + self.strength * (fisher * weight.square() / 2 - pull * weight).sum()
        return loss

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        weights = {name: each.detach() for name, each in _weights(model).items()}
        mine = self._squares(model, weights, x, y)
        flat = torch.cat([each.flatten() for each in mine] + [torch.tensor([float(len(y))])])
        total = self.client.floats(flat)
        fisher = torch.split(total[:-1] / total[-1], [each.numel() for each in mine])
        for place, (each, weight) in enumerate(zip(fisher, weights.values(), strict=True)):
            new = each.view_as(weight).to(weight)
            if place == len(self._fisher):
                self._fisher.append(torch.zeros_like(weight))
                self._pull.append(torch.zeros_like(weight))
            self._fisher[place] += new
            self._pull[place] += new * weight

    def _squares(
        self, model: nn.Module, weights: dict[str, Tensor], x: Tensor, y: Tensor
    ) -> list[Tensor]:
        """The sum over this client's samples of the squared gradient, parameter by parameter."""
        seen, buffers = list(self.client.seen), dict(model.named_buffers())

        def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(model, (weights, buffers), (x.unsqueeze(0),))
            return cross_entropy(outputs[:, seen], y.unsqueeze(0))

        total = {name: torch.zeros_like(each) for name, each in weights.items()}
        columns = torch.split(self.client.columns(y), 200)
        each_of = vmap(grad(loss), in_dims=(None, 0, 0))
        with evaluating(model):
            for some, labels in zip(torch.split(x, 200), columns, strict=True):
                for name, gradients in each_of(weights, some, labels).items():
                    total[name] += gradients.square().sum(0)
        return list(total.values())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}
