"""Public: every worker always has a model to give, and a round shifts all that it has.

Rounds average models, perhaps only those of a group, and take a worker's whether its program is
ready or not. So there is a model for them apart from the program's parameters: the *public* one. It
is what the program had after its latest own step, and all that rounds have done to it since.

    given     what the round took: the public model of that moment
    mean      of what the group's workers have given
    public    <- public + (mean - given)
    own       <- own + (mean - given)           when the program comes for it

Who is on time has given what it has, and gets the mean, to the bit. Who is late keeps what it has
done since. Within a group the shifts add up to nothing: so the mean over all workers is never
changed by a round, whoever is late, and how late. This is the delta rule, the default of WAGMASGD.
Running statistics are held within bounds beside: see statistics.py.

The background shifts the public model as soon as a round has landed, so the log keeps no sums and
a program that is away costs nothing. The program takes over at its next step. Buffers: the public
model, and the sum on its way; what was given, if the program has published meanwhile; what the
parameters are owed, if a round lands in the middle of a step. Where the model has running
statistics, which a forward pass changes, they are owed until the next step.

`Offered` is the rule of the paper instead, which loses progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.merges.buffers import Buckets, add, copy
from offbeat.merges.shift import Shift
from offbeat.merges.statistics import copies, hold
from offbeat.rounds import Flats, Layout, Round
from offbeat.worlds import Channel, World


class Public(Shift):
    """A worker's public model, which is its base here, and what its parameters are owed."""

    common = False
    spares = True

    def __init__(self, layout: Layout, alone: bool, world: World, statistics: int) -> None:
        """The last tensors of the layout, so many, are running statistics."""
        super().__init__(layout, alone)
        self.statistics = statistics
        # All below is shared by the program and the background, under this.
        self._lock = world.condition("the public model")
        self._given: Flats | None = None  # what the round under way has taken
        self._behind = False  # rounds have landed that the parameters have not
        stepped = len(layout.parameters) - statistics
        self._stepped = [True] * stepped + [False] * statistics

    # --- the program -------------------------------------------------------------------------

    def moves(self) -> None:
        """An own step is being made: from where the rounds have brought this worker."""
        self.check()
        with self._lock:
            self._catch_up()
            self._moved = True

    def made(self) -> int | None:
        """Publish the model after an own step; which parameter is not finite, or None.

        Such a step is taken back.
        """
        with self._lock:
            bad = _first_bad(self._parameters)
            if bad is None:
                self._catch_up()
                self._publish()
            else:
                self._drop_owed()
                copy(self._base.views, self._parameters)
            self._moved = self._behind = False
        return bad

    def begin(self, round: Round) -> bool:
        """Take over what rounds have done."""
        self.adopt()
        return False

    def skip(self, round: Round) -> None:
        """Only one worker's step was left out of it."""
        self.adopt()

    def adopt(self) -> None:
        """Take over what rounds have done."""
        with self._lock:
            self._catch_up()

    def settled(self, channel: Channel | None = None) -> None:
        """Have the public model in the parameters: all have left, and it is the same everywhere."""
        with self._lock:
            self._drop_owed()
            self._behind = self._moved = False
            copy(self._base.views, self._parameters)

    # --- the background ----------------------------------------------------------------------

    def give(
        self, round: int, into: Flats, weight: float, waits: bool, buckets: Buckets = None
    ) -> Iterator[None]:
        """Write the public model, bucket by bucket: each worker's counts the same."""
        with self._lock:
            self._given = self._base
        for body, public in zip(into.bodies, self._base.bodies, strict=True):
            body.copy_(public)
            yield

    def land(self, round: Round, sums: Flats) -> Round:
        """Have the public model shifted by a round whose sums are here, and will not be needed."""
        with self._lock:
            given, self._given = self._given, None
            assert given is not None, "a round has taken it"
            if len(round.group) > 1:
                self._landed(given, sums, len(round.group))
            if given is not self._base:
                self._give_back(given)
        return round

    def fold(self, round: Round) -> None:
        """It has landed."""

    def show(self, agreed: Sequence[Tensor] | None = None) -> bool:
        with self._lock:
            return super().show(agreed)

    def state_dict(self) -> dict[str, Any]:
        self.adopt()
        return super().state_dict()

    def read(self, into: Flats) -> None:
        with self._lock:
            copy(self._base.views, into.views)

    def for_joiner(self) -> dict[str, Any]:
        with self._lock:
            return {"base": [each.clone() for each in self._base.views]}

    def join(self, state: dict[str, Any]) -> None:
        """Begin with another worker's public model."""
        with self._lock:
            super().join(state)

    # --- under lock --------------------------------------------------------------------------

    def _landed(self, given: Flats, sums: Flats, members: int) -> None:
        on_time = given is self._base
        torch._foreach_div_(sums.bodies, float(members))
        if self._moved or not all(self._stepped):
            if self._owed is None:
                self._owed = self._buffer()
                torch._foreach_zero_(self._owed.bodies)
            add(self._owed.bodies, sums.bodies, 1.0)
            add(self._owed.bodies, given.bodies, -1.0)
        if on_time:
            torch._foreach_copy_(self._base.bodies, sums.bodies)
        else:
            before, mean = (copies(each.views, self.statistics) for each in (self._base, sums))
            add(sums.bodies, given.bodies, -1.0)
            add(self._base.bodies, sums.bodies, 1.0)
            hold(self._base.views, before, mean)
        self._behind = not self._moved

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Have in the parameters what they are owed.

        Without rounding, where nothing but own steps and rounds changes them.
        """
        if not self._behind and self._owed is None:
            return
        copied = [own and not self._moved for own in self._stepped]
        mine = self._hidden or self._parameters
        if any(copied):
            copy(_those(self._base.views, copied), _those(mine, copied))
        if self._owed is not None and not all(copied):
            added, before = [not each for each in copied], copies(mine, self.statistics)
            add(_those(mine, added), _those(self._owed.views, added), 1.0)
            hold(mine, before, self._base.views)
        self._drop_owed()
        self._behind = False

    def _publish(self) -> None:
        if self._given is self._base:  # a round is under way with it
            self._base = self._buffer()
        copy(self._parameters, self._base.views)

    def _buffer(self) -> Flats:
        return self._spare.pop() if self._spare else Flats(self._layout)

    def _drop_owed(self) -> None:
        if self._owed is not None:
            self._give_back(self._owed)
            self._owed = None


class Offered(Public):
    """The rule of the paper: who is late averages once more, with its own model and one share.

    The public model stays as it was offered, whatever rounds have made of it; of rounds that a
    worker has missed it sees the newest.
    """

    def __init__(self, layout: Layout, alone: bool, world: World, statistics: int) -> None:
        super().__init__(layout, alone, world, statistics)
        self._news: Flats | None = None  # the mean of the newest round that it has not taken
        self._members = 1  # of that round
        self._late = False

    def moves(self) -> None:
        """An own step is being made, from where this worker is."""
        self.check()
        with self._lock:
            self._moved = True

    def settled(self, channel: Channel | None = None) -> None:
        """Have the mean of the last round."""
        self._late = False
        self.adopt()

    def _landed(self, given: Flats, sums: Flats, members: int) -> None:
        if self._news is None:
            self._news = self._buffer()
        for total, mean in zip(sums.bodies, self._news.bodies, strict=True):
            torch.div(total, float(members), out=mean)
        self._members, self._late = members, given is not self._base

    def _publish(self) -> None:
        super()._publish()
        self._late = True  # for what has landed before

    @torch.no_grad()
    def _catch_up(self) -> None:
        if self._news is None or self._moved:
            return
        mean, members, mine = self._news.views, self._members, self._hidden or self._parameters
        if self._late:  # (sum + own) / (members + 1)
            torch._foreach_lerp_(list(mine), list(mean), members / (members + 1))
        else:
            copy(mean, mine)
        self._give_back(self._news)
        self._news = None


def _those(tensors: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    return [each for each, is_chosen in zip(tensors, chosen, strict=True) if is_chosen]


def _first_bad(tensors: Sequence[Tensor]) -> int | None:
    """The first tensor that is not finite."""
    values = [each.detach() for each in tensors]
    norms = torch._foreach_norm([each for each in values if each.numel()])
    devices = {norm.device for norm in norms}
    if all(
        torch.stack([norm.float() for norm in norms if norm.device == device]).isfinite().all()
        for device in devices
    ):
        return None
    bad = (number for number, each in enumerate(values) if not each.isfinite().all())
    return next(bad, None)  # a norm may overflow
