"""One client: its place in the world, its sums with the others, and what it has seen so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from offbeat.federated.features import evaluating
from offbeat.federated.secure import check_installed
from offbeat.federated.sums import MaskedSums, Sums
from offbeat.worlds import Channel, World

T = TypeVar("T")


class Client:
    """What a method may ask of the client it runs on."""

    def __init__(self, world: World, seed: int, secure: bool) -> None:
        if secure:
            check_installed()
        self.world = world
        self.rank, self.seed = world.rank, seed
        self.private = torch.Generator().manual_seed(1_000_003 * (seed + 1) + world.rank)
        """For draws of this client's own."""
        self.hiding = torch.Generator().manual_seed(1_000_033 * (seed + 1) + world.rank)
        """For what hides an upload: apart, so that a draw is the same whatever is uploaded."""
        self.seen: tuple[int, ...] = ()
        """The classes so far, in the order in which they came: the columns of `logits`."""
        self.new: tuple[int, ...] = ()
        """Those of the present task: the last ones of them."""
        self.sent_bytes = 0
        """What this client has given to sums and scores, models not counted."""
        self._secure = secure
        self._name = f"federated-{next(world.numbers)}"
        self._sums: Sums | None = None
        self._channel: Channel | None = None
        self._count = 0

    def see(self, classes: tuple[int, ...]) -> None:
        """A task with these classes begins."""
        self.seen, self.new = (*self.seen, *classes), classes

    @property
    def old(self) -> int:
        """How many of the classes belong to tasks that are over."""
        return len(self.seen) - len(self.new)

    def logits(self, model: nn.Module, x: Tensor) -> Tensor:
        """What a model says of the classes seen so far."""
        outputs: Tensor = model(x)
        return outputs[:, list(self.seen)]

    def columns(self, y: Tensor) -> Tensor:
        """Labels, as columns of `logits`."""
        places = torch.full((max(self.seen) + 1,), -1)
        places[list(self.seen)] = torch.arange(len(self.seen))
        return places[y]

    def accuracy(self, model: nn.Module, x: Tensor, y: Tensor) -> float:
        """The share of these samples whose class a model tells among those seen."""
        with evaluating(model):
            found = torch.cat([self.logits(model, some).argmax(1) for some in torch.split(x, 1000)])
        return float((found == self.columns(y)).double().mean())

    # --- together ----------------------------------------------------------------------------

    def together(self, act: Callable[[Channel, Sums], T]) -> T:
        """Do something with all clients; if one is lost meanwhile, the others do it again.

        From its beginning, with new keys, so that nothing of the lost one is in it.
        """
        self._count += 1
        name = f"{self._name}/{self._count}"
        return self.world.together(name, lambda epoch: self._act(act, epoch))

    def _act(self, act: Callable[[Channel, Sums], T], epoch: int) -> T:
        if self._channel is None or self._sums is None or self._channel.epoch != epoch:
            name = f"{self._name}-{epoch}" if epoch else self._name
            self._channel = self.world.channel(name, epoch=epoch)
            self._sums = (
                MaskedSums(self._channel, self.rank) if self._secure else Sums(self._channel)
            )
        before = self._sums.sent_bytes
        result = act(self._channel, self._sums)
        self.sent_bytes += self._sums.sent_bytes - before
        return result

    def counts(self, mine: Tensor) -> Tensor:
        """Return the sum over all clients of whole numbers."""
        return self.together(lambda _, sums: sums.counts(mine))

    def floats(self, mine: Tensor) -> Tensor:
        """Return the sum over all clients."""
        return self.together(lambda _, sums: sums.floats(mine))

    def class_counts(self, y: Tensor, classes: tuple[int, ...]) -> Tensor:
        """Return how many samples of each class all clients have together."""
        return self.counts(class_counts(y, classes))

    def close(self) -> None:
        """Let go of the channel; every client does."""
        if self._channel is not None and self._channel.epoch == self.world.epoch:
            self._channel.close()


def class_counts(y: Tensor, classes: tuple[int, ...]) -> Tensor:
    """Return how many of these labels are of each class."""
    return torch.stack([(y == kind).sum() for kind in classes])
