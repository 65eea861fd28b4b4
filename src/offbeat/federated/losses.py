"""Losses that hold up old classes against new ones: FedCBDR's temperatures, and logit adjustment.

Task-aware temperature scaling (TTS; Qi et al., NeurIPS 2025, arXiv 2507.07712, equation 7):

    z     <- the logits of old classes / t_old, those of new classes / t_new
    loss  <- w_old mean over old samples of CE(z, y)  +  w_new mean over new samples of CE(z, y)

`form="paper"` is that, divided by 2, so that with temperatures and weights of 1 and as many old
samples as new ones it is cross-entropy. `form="code"` is what the authors' code does: all logits of
an old sample are divided by t_old once more, of a new one by t_new, and there is one mean over the
batch: with ones it is cross-entropy, always. Inference uses the logits as they are.

Logit adjustment (Menon et al., ICLR 2021, arXiv 2007.07314): CE(logits + log(prior), y), with the
share of each class in what all clients train on; no setting to choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Temperatures:
    """Temperatures and weights of old and new; the paper's best on CIFAR-100."""

    old: float = 0.9
    new: float = 1.1
    weight_old: float = 1.1
    weight_new: float = 0.9
    form: Literal["paper", "code"] = "paper"

    def __post_init__(self) -> None:
        for name in ("old", "new", "weight_old", "weight_new"):
            if not (0 < getattr(self, name) < math.inf):
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)!r}")
        if self.form not in ("paper", "code"):
            raise ValueError(f'form must be "paper" or "code", got {self.form!r}')

    def loss(self, logits: Tensor, labels: Tensor, old_classes: int) -> Tensor:
        """Of logits whose first so many columns are the old classes; labels are columns."""
        if not old_classes:
            return cross_entropy(logits, labels)
        is_old = labels < old_classes
        scaled = torch.cat(
            [logits[:, :old_classes] / self.old, logits[:, old_classes:] / self.new], 1
        )
        if self.form == "code":
            rows = torch.where(is_old, self.old, self.new).unsqueeze(1).to(logits)
            weights = torch.where(is_old, self.weight_old, self.weight_new).to(logits)
            return (cross_entropy(scaled / rows, labels, reduction="none") * weights).mean()
        each = cross_entropy(scaled, labels, reduction="none")
        groups = ((each[is_old], self.weight_old), (each[~is_old], self.weight_new))
        means = [weight * its.mean() for its, weight in groups if len(its)]
        return torch.stack(means).mean()  # a batch with old or new samples alone has one


def adjusted(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Cross-entropy of logits plus the logarithms of the classes' shares in what is trained on.

    A class that nobody has is taken for one with half a sample.
    """
    shares = counts.to(logits).clamp(min=0.5)
    return cross_entropy(logits + (shares / shares.sum()).log(), labels)
