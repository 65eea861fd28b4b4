"""Going ahead of the rounds: one's own gradients are applied at once, the others' when they come.

    parameters = base + own moves

The *base* has everything of all rounds that this worker knows of, and nothing else: it is the same
on every worker, bit for bit. A *move* is how far this worker's own steps have carried it. Rounds
average moves; when one arrives, the worker's own move in it gives way to the mean of all.

For that it remembers its *place* when it gave its move away: base + move. What it has moved since
stays, so the parameters go from there to the new base by the difference of the two.

                  place given away      parameters now
    old base ──────────┬──────────────────────┬
    new base ──────────────┬──────────────────────┬          all else is shifted as far

Base, place and the move on its way are the three gradient-sized buffers that this needs; two more
for a while, where a worker that waits gives a second move before it knows of the first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offbeat.rounds import Flats, Layout, Round


class Ahead:
    """A worker's base, and its places when it gave moves to rounds that it does not know yet."""

    def __init__(self, layout: Layout, alone: bool) -> None:
        self._layout = layout
        self._parameters = layout.parameters
        self._alone = alone
        self._places: deque[tuple[int, Flats]] = deque()  # by round; there is rarely more than one
        self._spare: list[Flats] = []
        self._shown = False  # the base is in the parameters, for a while
        self._base = Flats(layout)
        _copy(self._parameters, self._base.views)

    def check(self) -> None:
        """Raise unless the parameters are this worker's own."""
        if self._shown:
            raise RuntimeError(
                "a step, state_dict() or close() inside dp.agreed(): move it out of that block"
            )

    @torch.no_grad()
    def give(self, round: int, into: Flats, weight: float) -> None:
        """Write this worker's moves that no round has taken, times a weight: this round does."""
        self.check()
        place = self._spare.pop() if self._spare else Flats(self._layout)
        _copy(self._parameters, place.views)
        since = self._places[-1][1] if self._places else self._base
        for move, now, before in zip(into.bodies, place.bodies, since.bodies, strict=True):
            torch.sub(now, before, out=move).mul_(weight)
        self._places.append((round, place))

    @torch.no_grad()
    def take(self, record: Round) -> None:
        """Put the mean of everyone's moves in place of one's own."""
        place = self._places.popleft()[1] if self._gave_to(record) else None
        good = bool(record.samples) and record.bad is None
        if good and self._alone and place is not None:  # one's own are the mean, without rounding
            self._base, place = place, self._base
        else:
            if good:
                _add(self._base.bodies, record.sum.bodies, 1 / record.divisor)
            if place is not None:
                for base, before in zip(self._base.bodies, place.bodies, strict=True):
                    torch.sub(base, before, out=before)
                self._shift(place, 1.0)
            elif good:
                self._shift(record.sum, 1 / record.divisor)
            if record.bad is not None:
                self._return_to_numbers()
        if place is not None and not self._spare:
            self._spare.append(place)

    def end(self) -> None:
        """Have the base in the parameters for good: no moves are left but what was rounded."""
        _copy(self._base.views, self._parameters)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Have the base in the parameters for a while; then the very bits that were there."""
        before, shown = [each.detach().clone() for each in self._parameters], self._shown
        _copy(self._base.views, self._parameters)
        self._shown = True
        try:
            yield
        finally:
            self._shown = shown
            _copy(before, self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`, so nothing is under way."""
        return {
            "base": [each.clone() for each in self._base.views],
            "parameters": [each.detach().clone() for each in self._parameters],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved, the parameters included."""
        _copy(state["base"], self._base.views)
        _copy(state["parameters"], self._parameters)

    def _gave_to(self, record: Round) -> bool:
        return bool(self._places) and self._places[0][0] == record.round

    def _shift(self, by: Flats, scale: float) -> None:
        """Move all that comes after the base."""
        _add(self._parameters, by.views, scale)
        for _, place in self._places:
            _add(place.bodies, by.bodies, scale)

    def _return_to_numbers(self) -> None:
        """Whatever of one's own has left them goes back to the base."""
        for mine in (self._parameters, *(place.views for _, place in self._places)):
            for each, base in zip(mine, self._base.views, strict=True):
                each.copy_(torch.where(each.isfinite(), each, base))


@torch.no_grad()
def _copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(values))


def _add(to: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> None:
    torch._foreach_add_(list(to), list(values), alpha=scale)
