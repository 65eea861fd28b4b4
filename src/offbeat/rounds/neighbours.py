"""What travels to whom: to one's neighbours in a graph, and the weighted mean of what comes back.

A worker sends its pile to those who hear it, and makes sum_j W[i, j] y_j of its own and of what it
hears; in the order of ranks, so that those who hear the same have the same bits. The header lies in
the margin, as ever, but it is the sum over the neighbourhood: the other workers' slots are empty.

Bucket by bucket: the next one travels while this one is mixed, and two are all that a worker keeps
of what each neighbour sends.

When a worker was lost, the graph is that of those who are left (graph_of_some.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offbeat.errors import EpochOver, WorkerLostError
from offbeat.graph_of_some import among
from offbeat.graphs import Graph
from offbeat.rounds.header import Header, Share, Shares, read
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, Work, World

_IN_FLIGHT = 2


class Neighbours:
    """An exchange over one graph."""

    repeats = True
    launches = None  # what goes to neighbours is written at once, and looked at then

    def __init__(
        self,
        graph: Graph,
        check: Callable[[Graph], None],
        world: World,
        channel: Channel,
        layout: Layout,
        header: Header,
    ) -> None:
        """`check` raises ValueError if the method does not go with a graph of fewer workers."""
        self.graph = _of_those_left(graph, check, channel.members)
        self._copies = world.survives
        self._kept: list[Tensor] = []
        self._rank = world.rank
        self._channel = channel
        self._layout = layout
        self._header = header
        self._rooms: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}
        for bucket in layout.buckets:  # make the groups now, not in the first round
            channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()

    def group(self, round: int) -> tuple[int, ...]:
        return ()  # nobody has the sum of another one

    def without(self, new: Sequence[int]) -> None:
        raise AssertionError("among neighbours who joins is in the graph at once")

    def reduce(self, pile: Pile, share: Share) -> Shares:
        """Mix a pile with the neighbours' of this round, in place; what they say of theirs."""
        weights = self.graph.received(self._rank, share.round)
        targets = self.graph.sent(self._rank, share.round)
        flats = pile.flats
        flats.margin.write(self._header.written(self._rank, share))
        pile.blank = False
        if self._copies:
            self._keep(flats.tensors)
        try:
            self._exchange(flats, weights, targets)
        except EpochOver:  # it was mixed with a part of what the neighbours send
            torch._foreach_copy_(flats.tensors, self._kept)
            raise
        return read(self._header, flats.margin.read(), flats.margin.kind)

    def _keep(self, tensors: list[Tensor]) -> None:
        """Have what is given, in case that the round must be made again."""
        if not self._kept:
            self._kept = [torch.empty_like(each) for each in tensors]
        torch._foreach_copy_(self._kept, tensors)

    def _exchange(self, flats: Flats, weights: dict[int, float], targets: tuple[int, ...]) -> None:
        under_way: list[tuple[int, dict[int, Tensor], Work]] = []
        for number, tensor in enumerate(flats.tensors):
            heard = self._room(number, tensor, [rank for rank in weights if rank != self._rank])
            work = self._channel.exchange(dict.fromkeys(targets, tensor), heard)
            under_way.append((number, heard, work))
            if len(under_way) == _IN_FLIGHT:
                self._mix(flats.tensors, weights, *under_way.pop(0))
        for each in under_way:
            self._mix(flats.tensors, weights, *each)

    def _room(self, number: int, like: Tensor, ranks: list[int]) -> dict[int, Tensor]:
        """Where to put what comes from each of them."""
        found = {}
        for place, rank in enumerate(ranks):
            key = (number % _IN_FLIGHT, place, like.device, like.dtype)
            room = self._rooms.get(key)
            if room is None or len(room) < len(like):
                room = self._rooms[key] = torch.empty_like(like)
            found[rank] = room[: len(like)]
        return found

    def _mix(
        self,
        mine: list[Tensor],
        weights: dict[int, float],
        number: int,
        heard: dict[int, Tensor],
        work: Work,
    ) -> None:
        work.wait()
        own, end = mine[number], self._layout.buckets[number].numel
        for tensor in heard.values():
            own[end:] += tensor[end:]  # the margin: each worker has its own place in it
        bodies = [
            ((own if rank == self._rank else heard[rank])[:end], weight)
            for rank, weight in weights.items()
        ]
        mixed, first = bodies[0]
        if first != 1.0:
            mixed.mul_(first)
        for body, weight in bodies[1:]:
            mixed.add_(body, alpha=weight)
        if len(bodies) > 1 and self._rank != next(iter(weights)):
            own[:end].copy_(mixed)


def _of_those_left(graph: Graph, check: Callable[[Graph], None], members: tuple[int, ...]) -> Graph:
    """The graph without those who were lost, on which the method must go, too."""
    if len(members) == graph.size:
        return graph
    lost = [rank for rank in range(graph.size) if rank not in members]
    try:
        left = among(graph, members)
        check(left)
    except ValueError as error:
        raise WorkerLostError(f"without the workers {lost}, {error}", rank=lost[0]) from error
    return left
