"""Outer: the mean move is the gradient of an optimizer over the base.

    b    <- momentum * b + move
    base <- base + lr * (move + momentum * b)           lr 1, momentum 0: Shift

That is SGD with Nesterov's momentum on the pseudo-gradient, minus the mean move; the same sum and
the same arithmetic on every worker, so the same bits. A worker's own parameters follow as with
every shift: what it has moved since it gave its move stays.

Running statistics, of BatchNorm say, are no parameters: of them the mean is taken, as it is. A
variance that overshoots by momentum would become negative.

With momentum there is one more gradient-sized buffer, b. What a round has brought is written over:
its buffer holds the step of the base afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offbeat.merges.shift import Shift
from offbeat.rounds import Flats, Layout, Round


class Outer(Shift):
    """A base that is moved by an outer optimizer."""

    def __init__(self, layout: Layout, alone: bool, *, lr: float, momentum: float) -> None:
        super().__init__(layout, alone and lr == 1 and momentum == 0)
        self._lr = lr
        self._momentum = momentum
        self._buffer = Flats(layout)
        self._trained = [
            [n for n in bucket.parameters if isinstance(layout.parameters[n], nn.Parameter)]
            for bucket in layout.buckets
        ]

    @torch.no_grad()
    def _advance(self, round: Round) -> tuple[Flats, float]:
        buckets = range(len(self._trained)) if round.buckets is None else round.buckets
        trained = [number for bucket in buckets for number in self._trained[bucket]]
        bodies = [round.sum.bodies[bucket] for bucket in buckets]
        torch._foreach_mul_(bodies, 1 / round.divisor)
        move = [round.sum.views[number] for number in trained]
        if self._momentum and move:
            b = [self._buffer.views[number] for number in trained]
            torch._foreach_mul_(b, self._momentum)
            torch._foreach_add_(b, move)
            torch._foreach_add_(move, b, alpha=self._momentum)
        if self._lr != 1 and move:
            torch._foreach_mul_(move, self._lr)
        torch._foreach_add_([self._base.bodies[bucket] for bucket in buckets], bodies)
        return round.sum, 1.0

    def for_joiner(self) -> dict[str, Any]:
        """The momentum, too."""
        return {**super().for_joiner(), "outer": self._buffer.views if self._momentum else []}

    def join(self, state: dict[str, Any]) -> None:
        """Be where another worker's rounds have brought it."""
        super().join(state)
        for mine, given in zip(self._buffer.views, state["outer"], strict=False):
            mine.copy_(given)

    def state_dict(self) -> dict[str, Any]:
        """The momentum, too."""
        buffers = self._buffer.views if self._momentum else []
        return {**super().state_dict(), "outer": [each.clone() for each in buffers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved, the parameters included."""
        super().load_state_dict(state)
        for mine, saved in zip(self._buffer.views, state["outer"], strict=False):
            mine.copy_(saved)
