"""Going ahead of the rounds: one's own gradients are applied at once, the others' when they come.

    parameters = base + moves under way + moves since

The *base* has everything of all rounds that this worker knows of, and nothing else: it is the same
on every worker, bit for bit. A *move* is how far this worker's own steps have carried it. Rounds
average moves; when one arrives, the worker's own move in it gives way to the mean of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offbeat.collectives import Record


class Ahead:
    """A worker's base, and its own moves that are not in it."""

    def __init__(
        self, parameters: Sequence[Tensor], like: Sequence[Tensor], gave: int, alone: bool
    ) -> None:
        self._parameters = list(parameters)
        self._gave = gave
        self._alone = alone
        self._under_way: deque[list[Tensor]] = deque()
        self._shown = False  # the base is in the parameters, for a while
        self._base = [torch.empty_like(each) for each in like]
        self._copy(self._parameters, self._base)

    @torch.no_grad()
    def pile_up(self, into: Sequence[Tensor], weight: float) -> None:
        """Write this worker's moves since the last round that took them, times a weight."""
        torch._foreach_copy_(list(into), self._moves())
        torch._foreach_mul_(list(into), weight)

    def gave(self, rounds: int) -> None:
        """Note that so many rounds, of all, have taken moves; a second one found none to take."""
        if self._shown:
            raise RuntimeError(
                "a step or state_dict() inside dp.agreed(): move it out of that block"
            )
        for _ in range(rounds - self._gave):
            self._under_way.append(self._moves())
        self._gave = rounds

    @torch.no_grad()
    def take(self, record: Record) -> None:
        """Put the mean of everyone's moves in place of one's own."""
        if self._alone:  # one's own are the mean, without the rounding
            self._under_way.popleft()
            self._copy(self._parameters, self._base)
            return
        since = self._moves()
        self._under_way.popleft()
        if record.samples and record.bad is None:
            mean = torch._foreach_div(record.sum.views, record.divisor)
            torch._foreach_add_(self._base, list(mean))
        if record.bad is not None:  # whose moves have left the numbers goes back to the base
            for each in (each for moves in (since, *self._under_way) for each in moves):
                each.nan_to_num_(0.0, 0.0, 0.0)
        self._go_to(since)

    def end(self) -> None:
        """Have the base in the parameters for good: no moves are left but what was rounded."""
        self._copy(self._base, self._parameters)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Have the base in the parameters for a while; then the very bits that were there."""
        before, shown = [each.detach().clone() for each in self._parameters], self._shown
        self._copy(self._base, self._parameters)
        self._shown = True
        try:
            yield
        finally:
            self._shown = shown
            self._copy(before, self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`, so nothing is under way."""
        return {
            "base": [each.clone() for each in self._base],
            "parameters": [each.detach().clone() for each in self._parameters],
        }

    def load_state_dict(self, state: dict[str, Any], gave: int) -> None:
        """Become what was saved, the parameters included."""
        self._gave = gave
        self._copy(state["base"], self._base)
        self._copy(state["parameters"], self._parameters)

    @torch.no_grad()
    def _moves(self) -> list[Tensor]:
        """Those since the last round that took them."""
        moves = [
            each.to(base.dtype) for each, base in zip(self._parameters, self._base, strict=True)
        ]
        moves = list(torch._foreach_sub(moves, self._base))
        for given in self._under_way:
            torch._foreach_sub_(moves, given)
        return moves

    @torch.no_grad()
    def _go_to(self, since: Sequence[Tensor]) -> None:
        place = list(torch._foreach_add(self._base, list(since)))
        for given in self._under_way:
            torch._foreach_add_(place, given)
        self._copy(place, self._parameters)

    @torch.no_grad()
    def _copy(self, values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list(into), list(values))
