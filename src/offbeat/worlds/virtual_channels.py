"""Channels of the virtual world: collectives that meet at a place, letters between two workers.

A collective begins when its last member has joined and the previous one on that channel has ended,
and takes what the cluster's network says, plus what an exchange costs the host. Where links are
shared, that depends on what else is under way (virtual_traffic.py). Letters are in
virtual_letters.py. Members find each other by the channel's name, its members, and how often they
have opened it before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor

from offbeat.clusters.network import Collective, Network
from offbeat.errors import WorldError
from offbeat.worlds import base
from offbeat.worlds.base import Op
from offbeat.worlds.checked import checked_peers, checked_rows
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Worker
from offbeat.worlds.virtual_letters import All, Letters, Sent
from offbeat.worlds.virtual_traffic import Traffic

Combine = Callable[[list[Tensor], list[Tensor]], None]
"""Fill the second list's tensors, or the first's own, from those of the first, all by member."""

_COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "min": lambda into, other: torch.minimum(into, other, out=into),
}


class Places:
    """Where the members of each channel meet, until all of them have closed it."""

    def __init__(self, clock: Clock, network: Network, host_s: float = 0.0) -> None:
        self.clock = clock
        self.network = network
        self.host_s = host_s
        """What an exchange costs beyond the network."""
        self.traffic = Traffic(clock) if network.sharing == "fair" else None
        self.sent_bytes = 0.0  # by all workers, on all channels
        self._open: defaultdict[tuple[str, tuple[int, ...]], list[Place]] = defaultdict(list)

    def note_sent(self, collective: Collective, members: int, size_bytes: int) -> None:
        """Count what the members of a collective send, all of them together."""
        times = {"all_reduce": 2, "all_gather": members}.get(collective, 1)
        self.sent_bytes += times * (members - 1) * size_bytes

    def open(self, worker: Worker, name: str, members: tuple[int, ...]) -> Channel:
        """The worker's n-th channel of this name meets the n-th one of the others."""
        rank = worker.rank
        name = f"{name} of epoch {worker.epoch}" if worker.epoch else name
        places = self._open[name, members]
        place = next((each for each in places if rank not in each.opened), None)
        if place is None:
            places.append(place := Place(name, members, worker.epoch))
        place.opened[rank] = worker
        return Channel(self, place, worker)

    def leave(self, place: Place) -> None:
        """One more member is done with it; forget it after the last one."""
        place.left += 1
        if place.left == len(place.members):
            key = (place.name, place.members)
            self._open[key].remove(place)
            if not self._open[key]:
                del self._open[key]

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))


class Place:
    """What the members of one channel share."""

    __slots__ = (
        *("ends", "epoch", "left", "letters", "line", "meetings", "members", "name", "opened"),
    )

    def __init__(self, name: str, members: tuple[int, ...], epoch: int = 0) -> None:
        self.name = name
        self.epoch = epoch
        self.members = members
        self.opened: dict[int, Worker] = {}
        self.left = 0
        self.meetings: dict[int, _Meeting] = {}  # those not everyone has joined, by number
        self.ends = 0.0  # when the last collective so far does
        self.line: deque[_Meeting] = deque()  # where links are shared: the first is under way
        self.letters = Letters()


class Channel(base.Channel):
    """One member's end of a channel."""

    def __init__(self, places: Places, place: Place, worker: Worker) -> None:
        self.members, self.epoch = place.members, place.epoch
        self._worker = worker
        self._places = places
        self._clock = places.clock
        self._network = places.network
        self._place = place
        self._rank = worker.rank
        self._at = place.members.index(worker.rank)
        self._issued = 0
        self._closed = False

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", not_before: float | None = None
    ) -> base.Work:
        what, combine = _REDUCE[op]
        return self._meet(what, tensor, tensor, combine, "all_reduce", not_before)

    def broadcast(self, tensor: Tensor, source: int) -> base.Work:
        at = self.members.index(source)

        def combine(tensors: list[Tensor], _: list[Tensor]) -> None:
            _copy(tensors[at], tensors[:at] + tensors[at + 1 :])

        return self._meet(f"broadcast from {source}", tensor, tensor, combine, "broadcast")

    def all_gather(self, tensor: Tensor, into: Tensor) -> base.Work:
        checked_rows("all_gather", self.members, tensor.shape, into)
        return self._meet("all_gather", tensor, into, _gather, "all_gather")

    def all_to_all(
        self, tensor: Tensor, into: Tensor, not_before: float | None = None
    ) -> base.Work:
        checked_rows("all_to_all", self.members, tensor.shape[1:], tensor)
        checked_rows("all_to_all", self.members, tensor.shape[1:], into)
        return self._meet("all_to_all", tensor, into, _transpose, "all_to_all", not_before)

    def send(self, tensor: Tensor, target: int) -> base.Work:
        self._post({target: tensor})
        return Sent(self._clock, 0.0)

    def recv(self, tensor: Tensor, source: int) -> base.Work:
        place, worker = self._checked(), self._worker
        return place.letters.receive(self._clock, source, worker, tensor, place.name, place.epoch)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> base.Work:
        checked_peers(self._rank, self.members, outgoing, incoming)
        sent = self._post(outgoing)
        return All([sent, *(self.recv(tensor, source) for source, tensor in incoming.items())])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._places.leave(self._place)

    def _checked(self) -> Place:
        if self._closed:
            raise WorldError(
                f"worker {self._rank} uses channel {self._place.name!r} after it has closed it"
            )
        if self._worker.epoch != self._place.epoch:
            raise self._worker.over()
        return self._place

    def _post(self, outgoing: Mapping[int, Tensor]) -> base.Work:
        places, letters = self._places, self._checked().letters
        places.sent_bytes += sum(tensor.nbytes for tensor in outgoing.values())
        clock, network, host_s = self._clock, self._network, places.host_s
        if places.traffic is None:
            return letters.post(clock, network, host_s, self._rank, outgoing)
        return letters.post_shared(clock, network, places.traffic, host_s, self._rank, outgoing)

    def _meet(
        self,
        what: str,
        tensor: Tensor,
        into: Tensor,
        combine: Combine,
        collective: Collective,
        not_before: float | None = None,
    ) -> _Meeting:
        clock, place, number = self._clock, self._checked(), self._issued
        self._issued += 1
        meeting = place.meetings.get(number)
        if meeting is None:
            meeting = place.meetings[number] = _Meeting(clock, place, number, what, tensor)
        elif what != meeting.what or tensor.shape != meeting.shape or tensor.dtype != meeting.dtype:
            meeting.refuse(self._rank, what, tensor)
        meeting.tensors[self._at] = tensor
        meeting.intos[self._at] = into
        meeting.missing -= 1
        if not_before is not None:
            meeting.ready = max(meeting.ready, not_before)
        if not meeting.missing:
            del place.meetings[number]
            self._places.note_sent(collective, len(self.members), tensor.nbytes)
            if self._places.traffic is not None:
                self._stand_in_line(self._places.traffic, meeting, combine, collective)
                return meeting
            begins = max(clock.now, meeting.ready, place.ends)
            cost_s = self._network.collective_s(collective, self.members, tensor.nbytes)
            place.ends = begins + cost_s + self._places.host_s
            clock.at(place.ends, lambda: meeting.end(combine))
        return meeting

    def _stand_in_line(
        self, traffic: Traffic, meeting: _Meeting, combine: Combine, collective: Collective
    ) -> None:
        """Where links are shared: begin it when those before it on this channel have ended."""
        clock, line, host_s = self._clock, self._place.line, self._places.host_s
        load = self._network.load(collective, self.members, meeting.tensors[0].nbytes)

        def begin() -> None:
            traffic.begin(load, lambda: clock.at(clock.now + host_s, end))

        def end() -> None:
            meeting.end(combine)
            line.popleft()
            if line:
                clock.at(line[0].ready, line[0].begin)

        meeting.begin = begin
        line.append(meeting)
        if line[0] is meeting:
            clock.at(meeting.ready, begin)


class _Meeting:
    """One collective: who has joined with which tensor, and who waits for its end."""

    __slots__ = (
        *("_clock", "_ended", "_first", "_number", "_place", "_waiting"),
        *("begin", "dtype", "intos", "missing", "ready", "shape", "tensors", "what"),
    )
    breaks = True  # with its epoch

    begin: Callable[[], None]
    """Where links are shared: begins it."""

    def __init__(self, clock: Clock, place: Place, number: int, what: str, tensor: Tensor) -> None:
        count = len(place.members)
        self.tensors: list[Tensor] = [None] * count  # type: ignore[list-item]  # by member
        self.intos: list[Tensor] = [None] * count  # type: ignore[list-item]
        self.missing = count
        self.ready = 0.0
        self._clock = clock
        self._place = place
        self._number = number
        self.what = what
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._first = tensor
        self._ended = False
        self._waiting: list[Parked] = []

    def refuse(self, rank: int, what: str, tensor: Tensor) -> NoReturn:
        """A member does not bring what the others bring."""
        if what != self.what:
            raise WorldError(f"{self.name}: worker {rank} calls {what}, the others {self.what}")
        others = (at for at, each in enumerate(self.tensors) if each is self._first)
        raise WorldError(
            f"{self.name}: worker {rank} brings {tuple(tensor.shape)} of {tensor.dtype}, "
            f"worker {self._place.members[next(others)]} {tuple(self.shape)} of {self.dtype}"
        )

    def end(self, combine: Combine) -> None:
        """Everyone is there and the time is up; the clock calls this."""
        thaws_s = max(each.thaws_s for each in self._place.opened.values())
        if thaws_s > self._clock.now:  # one is frozen, and does not take part before that
            self._clock.at(thaws_s, lambda: self._end_late(combine))
        else:
            self._end(combine)

    def _end_late(self, combine: Combine) -> None:
        """A member has thawed. If some go on in another epoch, the tensors are theirs again."""
        epoch = self._place.epoch
        if all(each.epoch == epoch and not each.expelled for each in self._place.opened.values()):
            self.end(combine)

    def _end(self, combine: Combine) -> None:
        combine(self.tensors, self.intos)
        self._ended = True
        self._clock.wake_all(self._waiting)
        del self.tensors, self.intos, self._first, self._waiting

    def wait(self) -> None:
        while not self._ended:
            if (task := self._clock.current) and task.worker.epoch != self._place.epoch:
                raise task.worker.over()
            parked = self._clock.park(self)
            self._waiting.append(parked)
            self._clock.blocked(parked)

    @property
    def name(self) -> str:
        return f"{self.what}, number {self._number} on channel {self._place.name!r}"

    def __str__(self) -> str:
        """What a member waits for: put together only if somebody asks."""
        if not self.missing:
            return f"the end of {self.name}"
        members = zip(self._place.members, self.tensors, strict=True)
        absent = [rank for rank, tensor in members if tensor is None]
        return f"{self.name}: not there yet: {_ranks(absent)}"


def _reduce(fold: Callable[[Tensor, Tensor], Tensor]) -> Combine:
    def combine(tensors: list[Tensor], _: list[Tensor]) -> None:
        # By rank, into the first one's tensor: each sum is bit for bit the same.
        _copy(reduce(fold, tensors), tensors[1:])

    return combine


_REDUCE: dict[Op, tuple[str, Combine]] = {
    op: (f"all_reduce {op}", _reduce(fold)) for op, fold in _COMBINE.items()
}


def _gather(tensors: list[Tensor], intos: list[Tensor]) -> None:
    _copy(torch.stack(tensors), intos)


def _transpose(tensors: list[Tensor], intos: list[Tensor]) -> None:
    for into, rows in zip(intos, torch.stack(tensors, 1), strict=True):
        into.copy_(rows)


def _copy(source: Tensor, targets: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, [source] * len(targets))


def _ranks(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
