"""What travels to whom in a round: the sum over a group, which is another one in every round.

Of P workers, S are a group. Who they are follows from the round's number: after every round the
workers are dealt out anew, as cards by an inverse S-way perfect shuffle, and S neighbours in the
row are a group. Where P and S are powers of two, that is the rotating butterfly of WAGMA-SGD: a
group spans S of the P ranks' bits, and the next round takes the next bits. After ceil(log_S P)
rounds every worker has heard of every other, for such P and S.

    P=8, S=4   round 0   0 1 2 3 | 4 5 6 7
               round 1   0 1 4 5 | 2 3 6 7
               round 2   0 2 4 6 | 1 3 5 7

Every `period` rounds, and in the last round of all, everybody is one group.

When workers have been lost, those who are left are dealt out, in the order of their ranks, and as
many empty places behind them as make groups of S again. So some groups are smaller.

    P=8, S=4, without worker 2   round 0   0 1 3 4 | 5 6 7
                                 round 1   0 1 5 6 | 3 4 7

A worker that joins is in no group until it has a model, and all have heard that it is here.

The header goes to everybody in every round, apart from the models and at the same time: starts,
presence and counts are everybody's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from offbeat.rounds.header import AWAY, Header, Share, Shares, read
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, Work, World, everyone

MOST_DEALS = 16
"""Ways of dealing out before they repeat: each costs a worker the connections of one group."""


@dataclass(frozen=True)
class Groups:
    """Who is in a group with whom, by round; the same on every worker."""

    workers: int
    size: int
    """Of a group; it divides the number of workers."""
    period: int
    left: tuple[int, ...] | None = None
    """Those who have not been lost; None: all."""

    def among(self, members: tuple[int, ...]) -> Groups:
        """The groups of those who are left."""
        return replace(self, left=None if members == everyone(self.workers) else members)

    @property
    def everyone(self) -> tuple[int, ...]:
        return everyone(self.workers) if self.left is None else self.left

    def of(self, round: int, rank: int) -> tuple[int, ...]:
        """The workers whose models meet in this round, of which this one is one."""
        if not self._deals or (round + 1) % self.period == 0:
            return self.everyone
        return self._dealt(round % self._deals, rank)

    def of_worker(self, rank: int) -> list[tuple[int, ...]]:
        """Every group of this worker, but that of all, once; all workers meet in one order."""
        return list(dict.fromkeys(self._dealt(number, rank) for number in range(self._deals)))

    @property
    def _places(self) -> int:
        """As many as there are members, and more, if need be: groups have `size` of them each."""
        return -(-len(self.everyone) // self.size) * self.size

    @property
    def _deals(self) -> int:
        """After how many rounds the same groups come again; 0, if there is one group only."""
        return deals(self._places, self.size) if len(self.everyone) > self.size else 0

    def _dealt(self, number: int, rank: int) -> tuple[int, ...]:
        places = _dealt(self._places, self.size, number)
        if self.left is None:
            return places[rank]
        members = self.left
        return tuple(members[at] for at in places[members.index(rank)] if at < len(members))


@lru_cache(maxsize=64)
def deals(workers: int, size: int) -> int:
    """After how many rounds the same groups come again."""
    number, step = 1, size % max(1, workers - 1)
    while step not in (0, 1) and number < MOST_DEALS:
        number, step = number + 1, step * size % (workers - 1)
    return number


@lru_cache(maxsize=4 * MOST_DEALS)
def _dealt(workers: int, size: int, round: int) -> tuple[tuple[int, ...], ...]:
    """By place: its group, when so many workers have been dealt out so often."""
    last = workers - 1  # it stays the last; the others' places are multiplied
    back = pow(size, -round, last) if last else 0
    row = sorted(range(workers), key=lambda rank: rank * back % last if rank < last else last)
    groups = [tuple(sorted(row[at : at + size])) for at in range(0, workers, size)]
    of = {rank: group for group in groups for rank in group}
    return tuple(of[rank] for rank in range(workers))


class SumInGroups:
    """All-reduces of one layout's buckets within groups, and of a header among all."""

    repeats = True
    launches = None  # a model is looked at when it is published, and travels when a round takes it

    def __init__(
        self, world: World, channel: Channel, layout: Layout, header: Header, groups: Groups
    ) -> None:
        self._world, self._rank = world, world.rank
        self._all = channel
        self._header = header
        self._groups = groups.among(channel.members)
        self._gone = header.gone(channel.members) if world.rank == channel.members[0] else {}
        self._last = layout.buckets[-1].numel
        # What travels is overwritten by the sum. The round may have to be made again.
        self._copy = Flats(layout, header.room) if world.survives else None
        self._devices = {bucket.device for bucket in layout.buckets}
        self._channels = {channel.members: channel}
        self._connect(channel)
        self._open(self._groups)
        self._new: set[int] = set()
        self._of_others = self._groups  # without the new ones

    def _open(self, groups: Groups) -> None:
        """Connect now, not in the first rounds."""
        for members in [*groups.of_worker(self._rank), groups.everyone]:
            if len(members) > 1 and members not in self._channels:
                self._channels[members] = self._world.channel("group", members, self._all.epoch)
                self._connect(self._channels[members])

    def _connect(self, channel: Channel) -> None:
        for device in self._devices:
            channel.all_reduce(torch.zeros(1, device=device)).wait()

    def without(self, new: Sequence[int]) -> None:
        """Leave these out of all groups, until all of them have said that they are here."""
        if new:
            self._new = set(new)
            have = tuple(rank for rank in self._all.members if rank not in new)
            self._of_others = self._groups.among(have)
            if self._rank in have:
                self._open(self._of_others)

    def group(self, round: int) -> tuple[int, ...]:
        """The workers whose sum this one has of a round, unless it is the last of all."""
        if self._rank in self._new:
            return (self._rank,)
        return (self._of_others if self._new else self._groups).of(round, self._rank)

    def reduce(self, pile: Pile, share: Share) -> Shares:
        """Have the sum over this round's group in the pile; return what all workers say.

        If all have left, it is the sum over all workers.
        """
        flats, everyone = pile.flats if self._copy is None else self._copy, self._all.members
        if self._copy is not None:
            torch._foreach_copy_(self._copy.bodies, pile.flats.bodies)
        margin, members = flats.margin, self.group(share.round)
        margin.write({**self._header.written(self._rank, share), **self._gone})
        header = self._all.all_reduce(flats.tensors[-1][self._last :])
        self._sum(flats, members, after=header)
        shares = read(self._header, margin.read(), margin.kind)
        if shares.all_left and members != everyone:
            for body in flats.bodies:  # each group's sum counts once for each of its members
                body.div_(len(members))
            members = everyone
            self._sum(flats, members)
        if self._copy is not None:
            pile.flats, self._copy = flats, pile.flats
        pile.group, pile.part = members, -1 if members == everyone else members[0]
        pile.blank = False
        if all(shares.presence[rank] != AWAY for rank in self._new):
            self._new = set()
        return shares

    def _sum(self, flats: Flats, members: tuple[int, ...], after: Work | None = None) -> None:
        bodies = flats.bodies if len(members) > 1 else ()
        works = [self._channels[members].all_reduce(body) for body in bodies]
        for work in [*([] if after is None else [after]), *works]:
            work.wait()
