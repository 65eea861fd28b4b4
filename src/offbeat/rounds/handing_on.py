"""The members have changed in the middle of a round: who has its result hands it on.

A round that one worker has completed must be completed by all who are left. It holds what the lost
worker gave. Where a round is the sum over all, any result will do. Where it is that of a group
(groups.py), so will that of anybody in the same group; and if nobody of a group has one, those who
are left of it add up again what they gave. The header, which is everybody's, is the same for all.

    workers 0, 1   round 7 of 0 1 ──┐ both have it ──✗ worker 0 tells worker 2 what the header says
    workers 2, 3   round 7 of 2 3 ──✗ 3 is lost ──────✗ worker 2 has its own model again
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.rounds.header import read
from offbeat.rounds.joining import Joining
from offbeat.rounds.layout import Flats
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel

Told = list[list[int]]
"""By member: rounds that it has completed and started, whether it has the latest one's result, and
of which group that is and what it gives is; the least rank of a group, or -1 for all. Then, whether
it joins, and has nothing to give."""


class HandingOn(Joining):
    """The part of an engine that completes a round which others have completed."""

    __slots__ = ()

    def _tells(self, knows: int) -> list[int]:
        """What this worker says of itself when it regroups; it knows of so many rounds."""
        gives = () if self._given is None else self._exchange.group(self._given[1].round)
        result = [bool(self._latest), self._latest_part, min(gives, default=-1)]
        return [knows, self._started, *result, self._joining]

    def _give_missed(self, channel: Channel, told: Told) -> None:
        """Have the latest round completed by everybody, if anybody has, but for who is new."""
        by_rank = dict(zip(channel.members, told, strict=True))
        newest = max(knows for knows, *_ in told)
        have = {rank: each[3] for rank, each in by_rank.items() if each[0] == newest and each[2]}
        behind = {rank: each[4] for rank, each in by_rank.items() if 0 <= each[0] < newest}
        of_all = -1 in have.values()
        for part in [-1] if of_all else sorted(set(behind.values())):
            donors = [rank for rank, its in have.items() if its == part]
            lacking = [rank for rank, its in behind.items() if of_all or its == part]
            if self._world.rank in lacking:
                self._take_missed(channel, newest, donors, lacking, min(have))
            elif lacking and self._world.rank in [*donors[:1], *([] if donors else [min(have)])]:
                self._give_result(channel, lacking, bool(donors))

    def _give_result(self, channel: Channel, lacking: list[int], same: bool) -> None:
        """Give the latest result, or only its header, where theirs is another one."""
        tensors = [*self._latest, *self._as_mask(self._latest_group)]
        if not same:
            tensors = [self._latest[-1][-self._header.room :]]
        works = [channel.send(each, rank) for rank in lacking for each in tensors]
        for work in works:
            work.wait()

    def _take_missed(
        self, channel: Channel, newest: int, donors: list[int], lacking: list[int], informant: int
    ) -> None:
        """Complete the round that others have completed, with their result or with their header."""
        began_s, number = self._world.now(), self.log.completed
        assert number == newest - 1, "whoever completes a round has the others' part of it"
        with self._state:
            assert self._given is not None, "this worker's part is in that round"
            (pile, share), result = self._given, self.piles.nothing()
            if self._exchange.launches is not None:
                self._exchange.launches.missed()
        result.buckets, result.group = pile.buckets, self._exchange.group(share.round)
        if donors:
            self._receive(channel, donors[0], result)
        else:
            self._sum_again(channel, informant, lacking, pile, result)
        with self._state:
            self._given, self._aside = self._aside, None
            pile.flats, result.flats = result.flats, pile.flats
            pile.group, pile.part = result.group, result.part
            result.blank = False
            self.piles.give_back(result)
        margin = pile.flats.margin
        shares = read(self._header, margin.read(), margin.kind)
        self._complete(number, pile, shares, began_s)

    def _receive(self, channel: Channel, donor: int, result: Pile) -> None:
        """Take over a result."""
        for each in result.tensors:
            channel.recv(each, donor).wait()
        for mask in self._as_mask(result.group):
            channel.recv(mask, donor).wait()
            result.part = int(mask[-1])
            result.group = tuple(rank for rank, is_in in enumerate(mask[:-1].tolist()) if is_in)

    def _as_mask(self, group: tuple[int, ...]) -> list[Tensor]:
        """A group as a tensor, by rank, and its part behind; none, where rounds are of all."""
        mask = [int(rank in group) for rank in range(self._world.size)]
        return [torch.tensor([*mask, self._latest_part])] if group else []

    def _sum_again(
        self, channel: Channel, informant: int, lacking: list[int], pile: Pile, result: Pile
    ) -> None:
        """Add up what those of a group gave who are left of it; in one order, so to the same bits.

        The header is that of the round which others have completed.
        """
        me, room = self._world.rank, Flats(pile.layout)
        channel.recv(result.flats.tensors[-1][-self._header.room :], informant).wait()
        bodies = pile.flats.bodies
        works = [channel.send(body, rank) for rank in lacking if rank != me for body in bodies]
        torch._foreach_zero_(result.flats.bodies)
        for rank in lacking:
            given = bodies if rank == me else room.bodies
            for each in [] if rank == me else given:
                channel.recv(each, rank).wait()
            torch._foreach_add_(result.flats.bodies, given)
        for work in works:
            work.wait()
        result.part, result.group = min(result.group), tuple(lacking)
