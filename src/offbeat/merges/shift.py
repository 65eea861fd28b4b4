"""Shift: rounds carry moves, and a result moves the worker by as much as its own move falls short.

    parameters = base + own moves

The *base* has everything of all rounds that this worker knows of, and nothing else: it is the same
on every worker, bit for bit. A *move* is how far this worker's own steps have carried it. Rounds
average moves; when one arrives, the worker's own move in it gives way to the mean of all.

For that it remembers its *place* when it gave its move away: base + move. What it has moved since
stays, so the parameters go from there to the new base by the difference of the two.

                  place given away      parameters now
    old base ──────────┬──────────────────────┬
    new base ──────────────┬──────────────────────┬          all else is shifted as far

A worker that has not moved since is at the new base then, to the bit: that is local SGD, which
waits for its round. Nothing that was computed meanwhile is lost, by construction.

Base, place and the move on its way are the three gradient-sized buffers that this needs. Who waits
for its round needs no place: that is where its parameters are. While the program does not come for
its rounds, there is one more, for what they shift it by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.merges.buffers import Buckets, add, copy, has, of
from offbeat.merges.statistics import copies, hold
from offbeat.rounds import Flats, Land, Layout, Round
from offbeat.worlds import Channel


@dataclass(frozen=True)
class _Place:
    """Where a worker was when it gave its moves to a round."""

    round: int
    at: Flats
    buckets: Buckets


class Shift:
    """A worker's base, and its places when it gave moves to rounds that it does not know yet."""

    own = False
    counts = False  # the worker's own steps have applied its samples
    common = True
    """Whether all workers have the same base. If not, `read` tells what this worker's model is, and
    whoever wants to know what they are together asks for their mean: see rounds/means.py."""
    spares = False
    alike = True
    statistics = 0
    """How many of the layout's last tensors are running statistics: see statistics.py."""
    land: Land | None = None
    """Takes what every round has summed up, before anybody hears of it, if it does: see Public."""
    joins = True
    """Whether a worker can join: what it needs of another one is in `for_joiner`."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """Without a common base: what to hold while parameters change elsewhere than in a round."""

    def __init__(self, layout: Layout, alone: bool) -> None:
        self._layout = self.travels = layout
        self._parameters = layout.parameters
        self._alone = alone
        self._places: deque[_Place] = deque()  # by round; there is rarely more than one
        self._stands: int | None = None  # the round that took the moves of a worker that waits
        self._spare: list[Flats] = []
        self._owed: Flats | None = None  # what folded rounds shift the parameters by
        self._owes_numbers = False  # one of them took back moves that have left the numbers
        self._moved = False  # own steps since the latest place
        self._hidden: list[Tensor] = []  # one's own parameters, while the base is in their place
        self._base = Flats(layout)
        copy(self._parameters, self._base.views)

    def check(self) -> None:
        """Raise unless the parameters are this worker's own."""
        if self.shown:
            raise RuntimeError(
                "a step, state_dict() or close() inside dp.agreed(): move it out of that block"
            )

    def moves(self) -> None:
        """An own step is being made."""
        self.check()
        self._leave()
        self._moved = True

    def made(self) -> int | None:
        """An own step has been made; which parameter is not finite, if anybody looks."""
        return None

    def give(
        self, round: int, into: Flats, weight: float, waits: bool, buckets: Buckets = None
    ) -> Iterator[None]:
        """Write this worker's moves that no round has taken, times a weight: this round does.

        Bucket by bucket, of these or of all. `waits` says that the program waits for the round
        before it moves on.
        """
        self._leave()
        since = [self._since(bucket) for bucket in range(len(self._layout.buckets))]
        if waits and not self._places and self._owed is None and buckets is None:
            self._stands = round
            now: Sequence[Tensor] = self._parameters
        else:
            place = self._place(buckets)
            self._places.append(_Place(round, place, buckets))
            now = place.views
        self._moved = self._moved and buckets is not None
        for bucket in range(len(self._layout.buckets)) if buckets is None else buckets:
            with torch.no_grad():
                for number in self._layout.buckets[bucket].parameters:
                    torch.sub(now[number], since[bucket].views[number], out=into.views[number])
                if weight != 1.0:
                    into.bodies[bucket].mul_(weight)
            yield

    def _since(self, bucket: int) -> Flats:
        """Where this worker's moves of a bucket that no round has taken begin."""
        given = (each.at for each in reversed(self._places) if has(each.buckets, bucket))
        return next(given, self._base)

    @torch.no_grad()
    def _place(self, buckets: Buckets = None) -> Flats:
        """Where this worker is; of these buckets, if not of all."""
        place = self._spare.pop() if self._spare else Flats(self._layout)
        here, numbers = self._hidden or self._parameters, self._numbers(buckets)
        copy([here[n] for n in numbers], [place.views[n] for n in numbers])
        if self._owed is not None:
            add(place.bodies, self._owed.bodies, 1.0)
        if self._owes_numbers:
            self._return_to_numbers(place.views)
        if self._owed is not None:
            hold(place.views, copies(here, self.statistics), self._base.views)
        return place

    def begin(self, round: Round) -> bool:
        """Put the mean of everyone's moves in place of one's own."""
        before = copies(self._parameters, self.statistics)
        self._take(round, None)
        hold(self._parameters, before, self._base.views)
        return False

    def end(self, round: Round) -> None:
        """There was no step to make."""

    def skip(self, round: Round) -> None:
        """Take back one's own moves in it."""
        self._take(round, None)

    def fold(self, round: Round) -> None:
        """Move the base, or take back own moves; the parameters follow when the program comes."""
        self._leave()
        if self._owed is None:
            self._owed = Flats(self._layout)
        self._take(round, self._owed)

    @torch.no_grad()
    def adopt(self) -> None:
        """Shift the parameters by what was folded."""
        owed, self._owed = self._owed, None
        returns, self._owes_numbers = self._owes_numbers, False
        if owed is None:
            return
        if not self._is_at_base:
            before = copies(self._parameters, self.statistics)
            add(self._parameters, owed.views, 1.0)
            if returns:
                self._return_to_numbers(self._parameters)
            hold(self._parameters, before, self._base.views)
        else:
            copy(self._base.views, self._parameters)

    def agreed(self) -> Sequence[Tensor]:
        """The base."""
        return self._base.views

    @torch.no_grad()
    def _take(self, round: Round, owed: Flats | None) -> None:
        if round.bad is not None:
            self._leave()
        gave = self._places.popleft() if self._gave_to(round) else None
        place = None if gave is None else gave.at
        stood, good = self._stands == round.round, bool(round.samples) and round.bad is None
        parts = round.buckets if gave is None else gave.buckets
        if good and self._alone and (stood or place is not None) and parts is None:
            self._be_mean(place)
            return
        by = self._advance(round) if good else (round.sum, 0.0)
        self._stands = None if stood else self._stands
        if round.bad is None and owed is None and self._is_at_base:  # without rounding
            copy(self._base.views, self._parameters)
            if place is not None:
                self._give_back(place)
            return
        if gave is not None and place is not None:
            if good and owed is None:
                self._meet(place)
            for number, (base, before) in enumerate(
                zip(self._base.bodies, place.bodies, strict=True)
            ):
                if not has(gave.buckets, number):
                    continue
                torch.sub(base, before, out=before)
                if round.bad is not None:
                    before.nan_to_num_(0.0, 0.0, 0.0)
            self._shift(place, 1.0, owed, gave.buckets)
            self._give_back(place)
        if good and gave is None:
            self._shift(*by, owed, round.buckets)
        elif good and gave is not None and gave.buckets is not None and round.buckets is None:
            others = [n for n in range(len(self._layout.buckets)) if n not in gave.buckets]
            self._shift(*by, owed, tuple(others))  # it carries more than this worker gave
        if round.bad is not None:
            self._return_to_numbers(*(place.at.views for place in self._places))
            if owed is None:
                self._return_to_numbers(self._parameters)
            else:
                self._owes_numbers = True

    def _advance(self, round: Round) -> tuple[Flats, float]:
        """Move the base by what a round has brought; say by how much: a buffer times a number."""
        mean, buckets = 1 / round.divisor, round.buckets
        add(of(self._base, buckets), of(round.sum, buckets), mean)
        return round.sum, mean

    def _meet(self, place: Flats) -> None:
        """Change the place, if not all that was moved since is to stay; the base has moved."""

    @property
    def _is_at_base(self) -> bool:
        """Whether this worker has not moved but for what rounds have returned."""
        return not (self._moved or self._places or self._stands is not None)

    def _be_mean(self, place: Flats | None) -> None:
        """Alone: one's own moves are the mean, without rounding."""
        self._stands = None
        if place is None:
            copy(self._parameters, self._base.views)
        else:
            self._base, place = place, self._base
            self._give_back(place)

    def _leave(self) -> None:
        """Who stands where it gave its moves away goes on: remember the place."""
        if self._stands is not None:
            self._places.append(_Place(self._stands, self._place(), None))
            self._stands = None

    def settled(self, channel: Channel | None = None) -> None:
        """Have the base in the parameters for good: no moves are left but what was rounded."""
        self.adopt()
        copy(self._base.views, self._parameters)

    @property
    def shown(self) -> bool:
        """Whether the base is in the parameters for a while."""
        return bool(self._hidden)

    def read(self, into: Flats) -> None:
        """Write what this worker's model is, own moves and folded rounds included."""
        copy(self._hidden or self._parameters, into.views)
        if self._owed is not None:
            add(into.bodies, self._owed.bodies, 1.0)

    def show(self, agreed: Sequence[Tensor] | None = None) -> bool:
        """Have the base, or something else, in the parameters for a while; False if it is there."""
        if self._hidden:
            return False
        self._hidden = [each.detach().clone() for each in self._parameters]
        copy(self._base.views if agreed is None else agreed, self._parameters)
        return True

    def hide(self) -> None:
        """Have the very bits again that were there before."""
        copy(self._hidden, self._parameters)
        self._hidden = []

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`, so nothing is under way."""
        return {
            "base": [each.clone() for each in self._base.views],
            "parameters": [each.detach().clone() for each in self._parameters],
            "moved": self._moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved, the parameters included."""
        copy(state["base"], self._base.views)
        copy(state["parameters"], self._parameters)
        self._moved = state["moved"]

    def for_joiner(self) -> dict[str, Any]:
        """What a worker needs that joins: all that rounds have made, and nothing of one's own."""
        return {"base": self._base.views}

    def join(self, state: dict[str, Any]) -> None:
        """Be where another worker's rounds have brought it; the parameters, too."""
        copy(state["base"], self._base.views)
        copy(state["base"], self._parameters)

    def _give_back(self, place: Flats) -> None:
        if not self._spare:
            self._spare.append(place)

    def _gave_to(self, round: Round) -> bool:
        return bool(self._places) and self._places[0].round == round.round

    def _shift(self, by: Flats, scale: float, owed: Flats | None, buckets: Buckets) -> None:
        """Move all that comes after the base."""
        if owed is not None:
            add(of(owed, buckets), of(by, buckets), scale)
        elif buckets is None:
            add(self._parameters, by.views, scale)
        else:
            numbers = self._numbers(buckets)
            here, there = ([each[n] for n in numbers] for each in (self._parameters, by.views))
            add(here, there, scale)
        for place in self._places:
            add(of(place.at, buckets), of(by, buckets), scale)

    def _numbers(self, buckets: Buckets) -> Sequence[int]:
        """The parameters in these buckets."""
        if buckets is None:
            return range(len(self._parameters))
        every = self._layout.buckets
        return [number for bucket in buckets for number in every[bucket].parameters]

    def _return_to_numbers(self, *own: Sequence[Tensor]) -> None:
        """Whatever of one's own has left them goes back to the base."""
        for mine in own:
            for each, base in zip(mine, self._base.views, strict=True):
                each.copy_(torch.where(each.isfinite(), each, base))
