"""What a method against forgetting is: what to replay, what to minimise, what to do between tasks.

    begin   a task begins, with these samples of this client
    data    what this client trains on in it
    loss    of a micro-batch
    end     the task is over: remember what is needed later

One object for each client; methods talk to the others through `self.client` alone.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat.federated.buffer import Buffer
from offbeat.federated.client import Client


class Method:
    """Fine-tuning: the new samples alone, and nothing against forgetting."""

    name: ClassVar[str] = "finetune"
    client: Client

    def __init__(self) -> None:
        self.buffer = Buffer()

    def begin(self, client: Client, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """A task begins; the client has seen its classes already."""
        self.client = client

    def data(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What to train on: the new samples, and what was kept."""
        return self.buffer.after(x, y)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean over a micro-batch."""
        return cross_entropy(self.client.logits(model, x), self.client.columns(y))

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """The task is over, and all clients have the same model."""


def share_of(budget: int, place: int, clients: int) -> int:
    """What one client keeps of a budget, where each keeps as much: the first ones one more."""
    if budget < 1:
        raise ValueError(f"a buffer must hold 1 sample or more, got {budget}")
    return budget // clients + (place < budget % clients)
