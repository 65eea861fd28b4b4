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

The header goes to everybody in every round, apart from the models and at the same time: starts,
presence and counts are everybody's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from offbeat.rounds.header import Header, Share, Shares, read
from offbeat.rounds.layout import Layout, Numbers
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

    @property
    def everyone(self) -> tuple[int, ...]:
        return everyone(self.workers)

    def of(self, round: int, rank: int) -> tuple[int, ...]:
        """The workers whose models meet in this round, of which this one is one."""
        if self.size == self.workers or (round + 1) % self.period == 0:
            return self.everyone
        groups = _dealt(self.workers, self.size, round % deals(self.workers, self.size))
        return groups[rank]

    def of_worker(self, rank: int) -> list[tuple[int, ...]]:
        """Every group of this worker, but that of all, once; all workers meet in one order."""
        rounds = range(0 if self.size == self.workers else deals(self.workers, self.size))
        groups = (_dealt(self.workers, self.size, number)[rank] for number in rounds)
        return list(dict.fromkeys(groups))


@lru_cache(maxsize=64)
def deals(workers: int, size: int) -> int:
    """After how many rounds the same groups come again."""
    number, step = 1, size % max(1, workers - 1)
    while step not in (0, 1) and number < MOST_DEALS:
        number, step = number + 1, step * size % (workers - 1)
    return number


@lru_cache(maxsize=4 * MOST_DEALS)
def _dealt(workers: int, size: int, round: int) -> tuple[tuple[int, ...], ...]:
    """By rank: its group, when the workers have been dealt out so often."""
    last = workers - 1  # it stays the last; the others' places are multiplied
    back = pow(size, -round, last) if last else 0
    row = sorted(range(workers), key=lambda rank: rank * back % last if rank < last else last)
    groups = [tuple(sorted(row[at : at + size])) for at in range(0, workers, size)]
    of = {rank: group for group in groups for rank in group}
    return tuple(of[rank] for rank in range(workers))


class SumInGroups:
    """All-reduces of one layout's buckets within groups, and of a header among all."""

    repeats = False
    launches = None  # a model is looked at when it is published, and travels when a round takes it

    def __init__(
        self, world: World, channel: Channel, layout: Layout, header: Header, groups: Groups
    ) -> None:
        self._world = world
        self._all = channel
        self._header = header
        self._groups = groups
        self._numbers = torch.zeros(header.room)
        self._margin = Numbers(self._numbers)
        self._channels = {groups.everyone: channel}
        for members in groups.of_worker(world.rank):
            if len(members) > 1:
                self._channels[members] = world.channel("group", members)
        # Connect now, not in the first rounds.
        for each in self._channels.values():
            for device in {bucket.device for bucket in layout.buckets}:
                each.all_reduce(torch.zeros(1, device=device)).wait()
        channel.all_reduce(self._numbers).wait()

    def reduce(self, pile: Pile, share: Share) -> Shares:
        """Have the sum over this round's group in the pile; return what all workers say.

        If all have left, it is the sum over all workers.
        """
        self._margin.write(self._header.written(self._world.rank, share))
        header = self._all.all_reduce(self._numbers)
        members = self._groups.of(share.round, self._world.rank)
        self._sum(pile, members, after=header)
        shares = read(self._header, self._margin.read(), self._margin.kind)
        if shares.all_left and members != self._groups.everyone:
            for body in pile.flats.bodies:  # each group's sum counts once for each of its members
                body.div_(len(members))
            self._sum(pile, self._groups.everyone)
        return shares

    def _sum(self, pile: Pile, members: tuple[int, ...], after: Work | None = None) -> None:
        bodies = pile.flats.bodies if len(members) > 1 else ()
        works = [self._channels[members].all_reduce(body) for body in bodies]
        for work in [*([] if after is None else [after]), *works]:
            work.wait()
        pile.blank = False
