"""What travels to whom in a round: here, the sum over all workers.

A round is the buckets, in order; or some of them (fragments.py). The header lies in the margin of
the last one, so that it costs no message of its own, if that one travels. All buckets but the last
may be launched while the backward pass still runs:

    worker 0    backward ──b0────b1──┐ step: b2 + header, wait ─┐ update
    worker 1    backward ────b0────b1┐ step: b2 + header, wait ─┐ update
    worker 2    away: its background   b0, b1, b2 + header ─────┐ update later

Who is away gives what its pile holds; zeros, if that is nothing.

If a gradient was changed after its bucket had been launched, the header says so, and all buckets go
once more, on every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from offbeat.errors import EpochOver, ExpelledError, WorkerLostError
from offbeat.rounds.header import Header, Share, Shares, read
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile
from offbeat.rounds.shared import own
from offbeat.worlds.base import Channel, Work, World

Write = Callable[[int, Flats, float, bool, tuple[int, ...] | None], Iterator[None]]
"""Writes what a worker gives to a round, times a weight: stops after every bucket. The fourth
argument says whether the program waits for that round, and changes nothing meanwhile; the last,
which buckets are given, or None for all."""


class Early(Protocol):
    """Whoever launches buckets before their round: see overlap.py."""

    def keep(self, pile: Pile, here: bool) -> bool:
        """Make sure that the pile can be filled anew; say whether its buckets have changed."""

    def restore(self, pile: Pile) -> None:
        """Fill the pile anew."""

    def finished(self) -> None:
        """The round is over."""


class Launches:
    """The buckets of the next round that are under way: the first ones, before its header.

    What travels is overwritten by the sum. Where a loss is survived, it is a copy: the round may
    have to be made again, with the same contributions. Its buffer serves round after round, in the
    next epoch, too, since the first write to new memory takes longer than a copy. Not one of a
    round that was broken off: what was under way may still write to it.
    """

    def __init__(self, channel: Channel, copies: Callable[[], Pile] | None = None) -> None:
        self._channel = channel
        self._copies = copies
        self._copy: Pile | None = None  # of the round that is under way
        self._idle: list[Pile] = []
        self._under_way: list[Work] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def launch(self, pile: Pile, not_before: float | None = None) -> None:
        """Send the next bucket on its way; the last one only when the header is in it."""
        number = len(self._under_way)
        tensor = pile.tensors[number]
        if self._copies is not None:
            if self._copy is None:
                self._copy = self._idle_one() or self._copies()
            self._copy.buckets = pile.buckets
            tensor = self._copy.tensors[number].copy_(tensor)
        try:
            work = self._begin(pile, tensor, not_before)
        except (EpochOver, ExpelledError) as over:  # perhaps in a backward pass: who waits raises
            work = _Broken(over)
        self._under_way.append(work)

    def _idle_one(self) -> Pile | None:
        """A buffer of before; in one go, since two threads may ask, each in its own epoch."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _begin(self, pile: Pile, tensor: Tensor, not_before: float | None) -> Work:
        return self._channel.all_reduce(own(tensor), not_before=not_before)

    def _launch_rest(self, pile: Pile) -> None:
        while len(self._under_way) < len(pile.tensors):
            self.launch(pile)

    def see_and_launch(self, pile: Pile) -> None:
        """See whether the next bucket is finite, and launch it, if it is not the last one.

        So the first one travels while the others are looked at.
        """
        order, number = pile.order, len(self._under_way)
        pile.look_for_bad(pile.layout.buckets[order[number]].parameters)
        pile.unseen = number < len(order) - 1
        if number < len(pile.tensors) - 1:
            self.launch(pile)

    def end(self, pile: Pile) -> None:
        """Launch those that are left, and wait for all."""
        self._launch_rest(pile)
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()
        if self._copy is not None:
            pile.flats, self._copy.flats = self._copy.flats, pile.flats
            self._idle.append(self._copy)
            self._copy = None

    def go_on_after(self, before: Launches) -> None:
        """These are of the next epoch: use the buffer that the last one's do not need."""
        self._idle = before._idle  # the very list: who launches in the old epoch takes it away

    def prepare(self) -> None:
        """Have a buffer whose memory is in use already."""
        if self._copies is not None and not self._idle:
            self._idle.append(self._copies())
            self._idle[0].flats.touch()

    def missed(self) -> None:
        """The round has ended for others, with what this worker gave; they hand on its sum."""


class _Broken:
    """A bucket that could not be launched, because its epoch is over."""

    def __init__(self, over: WorkerLostError) -> None:
        self._over = over

    def wait(self) -> None:
        raise self._over


class Exchange(Protocol):
    """What travels to whom; made alike on every worker."""

    repeats: bool
    """Whether a round can be made again, if a worker is lost in the middle of it. Then the pile
    is as it was, and one that has its result can give it to another."""

    @property
    def launches(self) -> Launches | None:
        """What sends buckets on their way before their round; None where all of a pile go at once.

        Then a round takes only piles that have been looked at.
        """

    def reduce(self, pile: Pile, share: Share) -> Shares:
        """Exchange a pile, in place; return what everyone says of its part."""

    def group(self, round: int) -> tuple[int, ...]:
        """The workers whose sum this one gets of a round; none, if that of all."""

    def without(self, new: Sequence[int]) -> None:
        """These have joined, and have nothing to give yet; until they say that they are here."""


MakeExchange = Callable[[World, Channel, Layout, Header], Exchange]
MakeLaunches = Callable[[World, Channel, Callable[[], Pile] | None], Launches]


def _plain(world: World, channel: Channel, copies: Callable[[], Pile] | None) -> Launches:
    return Launches(channel, copies)


class SumOverAll:
    """All-reduces of one layout's buckets, with a header; or what `launches` makes of them."""

    repeats = True

    def __init__(
        self,
        world: World,
        channel: Channel,
        layout: Layout,
        header: Header,
        launches: MakeLaunches | None = None,
    ) -> None:
        self._world = world
        self._header = header
        copies = partial(Pile, layout, header.room) if world.survives else None
        self.launches = (launches or _plain)(world, channel, copies)
        self._gone = header.gone(channel.members) if world.rank == channel.members[0] else {}
        for bucket in layout.buckets:  # make the groups now, not in the first round
            channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()

    def reduce(self, pile: Pile, share: Share) -> Shares:
        """Exchange a pile, of which some buckets may be under way; what everyone says of it.

        If somebody's buckets have changed since they were launched, all must do it again.
        """
        margin = pile.flats.margin
        margin.write({**self._header.written(self._world.rank, share), **self._gone})
        pile.blank = False
        self.launches.end(pile)
        margin = pile.flats.margin  # of the sum
        return read(self._header, margin.read(), margin.kind)

    def group(self, round: int) -> tuple[int, ...]:
        return ()

    def without(self, new: Sequence[int]) -> None:
        """Who is away gives zeros."""
