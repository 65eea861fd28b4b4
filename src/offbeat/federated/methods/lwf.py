"""LwF: the new model is to say of new samples what the old one said about old classes.

Li, Hoiem: "Learning without Forgetting", ECCV 2016, arXiv 1606.09282; federated as in FedCBDR's
baselines: the old model is the global one at the end of the task before.

    loss <- CE over the logits of new classes
            + strength T² KL( softmax(old logits of the old model / T) || of the new model )
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from offbeat.federated.features import evaluating
from offbeat.federated.methods.base import Method


@dataclass
class LwF(Method):
    """Distillation from the model before."""

    name: ClassVar[str] = "lwf"
    strength: float = 1.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        super().__init__()
        self._teacher: nn.Module | None = None

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        old, temperature = self.client.old, self.temperature
        logits = self.client.logits(model, x)
        loss = cross_entropy(logits[:, old:], self.client.columns(y) - old)
        if self._teacher is None or not old:
            return loss
        with evaluating(self._teacher):
            taught = self.client.logits(self._teacher, x)[:, :old] / temperature
        says = logits[:, :old] / temperature
        apart = kl_div(
            log_softmax(says, 1), log_softmax(taught, 1), log_target=True, reduction="batchmean"
        )
        return loss + self.strength * temperature**2 * apart

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._teacher = deepcopy(model).requires_grad_(False)
