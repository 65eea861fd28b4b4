"""FedCBDR: clients choose together which old samples to keep, class by class, and balance the loss.

Qi et al., NeurIPS 2025, arXiv 2507.07712.

    at the end of a task, on every client:
        X <- features of its samples under the global model
        leverage of each sample among those of all clients     gram.py, or masked_svd.py
        quotas: the budget in equal parts over the classes     quotas.py, from sums of counts
        draw that many of each class, over all clients, by leverage     sampling.py
    in later tasks: train on new and kept samples together, with temperatures     losses.py

Differs from the paper: quotas make the balance exact, which there is hoped for from the scores; the
draw is one over all clients, without replacement; samples are not weighed by 1 / sqrt(n p), which
is for sketches of matrices. `scores="svd"` is the paper's upload, `"svd-masked"` its
code's, without un-masking; `by_class=False` leaves the quotas out, as both do.

Do not use without leave to keep samples: they stay on their client, but they do stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.federated import gram, masked_svd
from offbeat.federated.client import Client, class_counts
from offbeat.federated.features import features
from offbeat.federated.losses import Temperatures, adjusted
from offbeat.federated.methods.base import Method
from offbeat.federated.quotas import quotas
from offbeat.federated.sampling import draw
from offbeat.federated.sums import Sums
from offbeat.worlds import Channel

Scores = Literal["gram", "svd", "svd-masked"]
Balance = Literal["temperatures", "adjusted", "none"]


@dataclass
class FedCBDR(Method):
    """Class-balanced replay by leverage scores, and a balanced loss."""

    name: ClassVar[str] = "fedcbdr"
    budget: int = 100
    """Samples of a task that all clients together keep."""
    rank: int | None = None
    """Directions that count in a leverage; as many as the task has classes, if None."""
    scores: Scores = "gram"
    by_class: bool = True
    balance: Balance = "temperatures"
    temperatures: Temperatures = field(default_factory=Temperatures)

    def __post_init__(self) -> None:
        super().__init__()
        for name, kind in (("scores", Scores), ("balance", Balance)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {get_args(kind)}, got {getattr(self, name)!r}"
                )
        if self.budget < 1:
            raise ValueError(f"a buffer must hold 1 sample or more, got {self.budget}")
        self._counts = torch.zeros(0)

    def begin(self, client: Client, model: nn.Module, x: Tensor, y: Tensor) -> None:
        super().begin(client, model, x, y)
        if self.balance == "adjusted":
            self._counts = client.class_counts(self.data(x, y)[1], client.seen)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, columns = self.client.logits(model, x), self.client.columns(y)
        if self.balance == "adjusted":
            return adjusted(logits, columns, self._counts)
        if self.balance == "temperatures":
            return self.temperatures.loss(logits, columns, self.client.old)
        return cross_entropy(logits, columns)

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        seen = features(model, x, self.client.rank)
        kept = self.client.together(lambda channel, sums: self._chosen(channel, sums, seen, y))
        self.buffer.keep(x[kept], y[kept])

    def _chosen(self, channel: Channel, sums: Sums, seen: Tensor, y: Tensor) -> Tensor:
        """Which of this client's samples to keep."""
        new, members = self.client.new, channel.members
        supply = sums.counts(class_counts(y, new)).tolist()
        scores = self._leverage(channel, sums, seen, len(new))
        if self.by_class:
            labels, classes, wanted = y, new, quotas(self.budget, supply)
        else:
            labels, classes, wanted = y * 0, (0,), [min(self.budget, sum(supply))]
        return draw(
            scores,
            labels,
            classes,
            wanted,
            sums.counts,
            generator=self.client.private,
            place=members.index(self.client.rank),
            clients=len(members),
        )

    def _leverage(self, channel: Channel, sums: Sums, seen: Tensor, classes: int) -> Tensor:
        rank = self.rank or classes
        if self.scores == "gram":
            total = sums.floats(gram.gram(seen))
            return gram.leverage(seen, gram.whitening(total, rank))
        scores, sent_bytes = masked_svd.leverage(
            channel,
            self.client.rank,
            seen,
            rank,
            private=self.client.hiding,
            shared=torch.Generator().manual_seed(self.client.seed),
            unmask=self.scores == "svd",
        )
        sums.sent_bytes += sent_bytes
        return scores
