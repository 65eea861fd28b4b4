"""A partial all-reduce for any tensors, without an optimizer.

with offbeat.partial_all_reduce("norms", torch.zeros(4), quorum="majority") as norms:
    newest = norms.reduce(torch.ones(4))
    print(newest.mean(), newest.ranks, newest.round, newest.waited_s)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor

from offbeat.errors import WorkerLeft
from offbeat.rounds.engine import Engine
from offbeat.rounds.layout import Layout
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Round
from offbeat.rounds.start import Rules
from offbeat.worlds.base import World
from offbeat.worlds.current import enter_world, leave_world


def partial_all_reduce(
    name: str,
    *like: Tensor,
    quorum: str | int | float = "majority",
    drop_late: bool = False,
    max_staleness_rounds: int | None = None,
) -> Partial:
    """Open a partial all-reduce among all workers, for tensors of the shapes of `like`.

    All workers give it the same name and settings, and close it, or leave its block. `quorum` says
    who must be there for a round to start: "solo", "majority", "all", "first:k", "last:k", a number
    of workers or a fraction of them.
    """
    world = enter_world()
    try:
        return Partial(world, name, like, quorum, drop_late, max_staleness_rounds)
    except BaseException as error:
        leave_world(world, error)
        raise


class Partial:
    """What `partial_all_reduce` returns."""

    def __init__(
        self,
        world: World,
        name: str,
        like: tuple[Tensor, ...],
        quorum: str | int | float,
        drop_late: bool,
        max_staleness_rounds: int | None,
    ) -> None:
        if not like:
            raise ValueError("partial_all_reduce needs at least one tensor to know the shapes of")
        self._world = world
        self._drop_late = drop_late
        self._closed = False
        names = [f"tensor {number}" for number in range(len(like))]
        layout = Layout(names, [tensor.detach() for tensor in like])
        self._like = [(tensor.shape, tensor.dtype) for tensor in like]
        rules = Rules(quorum, max_staleness_rounds=max_staleness_rounds)
        self._only_newest = True
        self._partial = Engine(world, name, layout, rules, begin=False)
        self._partial.fold = self._forget
        self._partial.may_fold = lambda _: self._only_newest and len(self._partial.log) > 1
        self._partial.begin()
        world.open.append(self)

    def reduce(self, *tensors: Tensor, samples: float = 1.0) -> Round:
        """Contribute, wait if this worker is on time, and return the newest round.

        Its buffers are lent until the next call. A late worker does not wait: what it brings rides
        in the next round, or is dropped. Older rounds are forgotten: a few are kept at most.
        """
        rounds = self.rounds(*tensors, samples=samples)
        self._only_newest = True
        for taken in rounds:
            if not self._partial.more:
                return taken
        raise AssertionError("a round that this worker was waiting for")

    def rounds(self, *tensors: Tensor, samples: float = 1.0) -> Iterator[Round]:
        """Contribute likewise, and return every round since the last call.

        From the first such call on all rounds are kept, each as large as the tensors: do not be
        away for long.
        """
        self._only_newest = False
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != self._like:
            raise ValueError(
                f"tensors must be of the shapes and types that were declared, {self._like}, got "
                f"{[(tensor.shape, tensor.dtype) for tensor in tensors]}"
            )

        if not samples > 0:
            raise ValueError(f"samples must be a number above 0, got {samples}")

        def add(pile: Pile) -> None:
            views = pile.flats.views
            if pile.micro_batches:
                torch._foreach_add_(views, list(tensors))
            else:
                torch._foreach_copy_(views, list(tensors))
            pile.used = [True] * len(views)
            pile.samples += samples
            pile.micro_batches += 1

        self._partial.contribute(add, drop_late=self._drop_late)
        return self._partial.results()

    def close(self) -> None:
        """Serve the others until all have left."""
        if not self._closed:
            self._end()
            try:
                for _ in self._partial.leave():
                    pass
            except BaseException as error:
                leave_world(self._world, error)
                raise
            leave_world(self._world)

    def away(self, where: str = "") -> AbstractContextManager[None]:
        """Take part in rounds with nothing of one's own meanwhile, and hold up nobody."""
        return self._partial.away()

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on."""
        if not self._closed:
            self._end()
            leave_world(self._world, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is None or isinstance(error, WorkerLeft):
            self.close()
        else:
            self.abandon(error)
        return isinstance(error, WorkerLeft)

    def _forget(self, rounds: Iterator[Round]) -> None:
        for _ in rounds:
            pass

    def _end(self) -> None:
        self._closed = True
        self._world.open.remove(self)
