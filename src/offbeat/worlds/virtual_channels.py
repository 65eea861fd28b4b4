"""Channels of the virtual world: collectives that meet at a place, letters between two workers.

A collective begins when its last member has joined and the previous one on that channel has ended,
and takes what the cluster's network says. A letter needs nobody at the other end: it is copied on
the way out and lies in a box until it is asked for. Members find each other by the channel's name,
its members, and how often they have opened it before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NoReturn

import torch
from torch import Tensor

from offbeat.clusters.network import Network
from offbeat.errors import WorldError
from offbeat.worlds import base
from offbeat.worlds.base import Op
from offbeat.worlds.checked import checked_peers, checked_rows
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Worker

Combine = Callable[[list[Tensor], list[Tensor]], None]
"""Fill the second list's tensors, or the first's own, from those of the first, all by member."""
Cost = Callable[[Sequence[int], int], float]

_COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "min": lambda into, other: torch.minimum(into, other, out=into),
}


class Places:
    """Where the members of each channel meet, until all of them have closed it."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.clock = clock
        self.network = network
        self._open: defaultdict[tuple[str, tuple[int, ...]], list[Place]] = defaultdict(list)

    def open(self, worker: Worker, name: str, members: tuple[int, ...]) -> Channel:
        """The worker's n-th channel of this name meets the n-th one of the others."""
        rank = worker.rank
        name = f"{name} of epoch {worker.epoch}" if worker.epoch else name
        places = self._open[name, members]
        place = next((each for each in places if rank not in each.opened), None)
        if place is None:
            places.append(place := Place(name, members, worker.epoch))
        place.opened.add(rank)
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

    __slots__ = ("boxes", "ends", "epoch", "left", "meetings", "members", "name", "opened")

    def __init__(self, name: str, members: tuple[int, ...], epoch: int = 0) -> None:
        self.name = name
        self.epoch = epoch
        self.members = members
        self.opened: set[int] = set()
        self.left = 0
        self.meetings: dict[int, _Meeting] = {}  # those not everyone has joined, by number
        self.ends = 0.0  # when the last collective so far does
        self.boxes: defaultdict[tuple[int, int], _Box] = defaultdict(_Box)


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
        return self._meet(what, tensor, tensor, combine, self._network.all_reduce_s, not_before)

    def broadcast(self, tensor: Tensor, source: int) -> base.Work:
        at = self.members.index(source)

        def combine(tensors: list[Tensor], _: list[Tensor]) -> None:
            _copy(tensors[at], tensors[:at] + tensors[at + 1 :])

        cost = self._network.broadcast_s
        return self._meet(f"broadcast from {source}", tensor, tensor, combine, cost)

    def all_gather(self, tensor: Tensor, into: Tensor) -> base.Work:
        checked_rows("all_gather", self.members, tensor.shape, into)
        return self._meet("all_gather", tensor, into, _gather, self._network.all_gather_s)

    def all_to_all(self, tensor: Tensor, into: Tensor) -> base.Work:
        checked_rows("all_to_all", self.members, tensor.shape[1:], tensor)
        checked_rows("all_to_all", self.members, tensor.shape[1:], into)
        return self._meet("all_to_all", tensor, into, _transpose, self._network.all_to_all_s)

    def send(self, tensor: Tensor, target: int) -> base.Work:
        self._post({target: tensor})
        return _Sent(self._clock, 0.0)

    def recv(self, tensor: Tensor, source: int) -> base.Work:
        return _Received(self._clock, self._checked(), source, self._worker, tensor)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> base.Work:
        checked_peers(self._rank, self.members, outgoing, incoming)
        sent = _Sent(self._clock, self._post(outgoing))
        return _All([sent, *(self.recv(tensor, source) for source, tensor in incoming.items())])

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

    def _post(self, outgoing: Mapping[int, Tensor]) -> float:
        """Put letters into their boxes; return when the last one arrives."""
        place, now = self._checked(), self._clock.now
        sizes = {target: tensor.nbytes for target, tensor in outgoing.items()}
        arrive_s = self._network.messages_s(self._rank, sizes)
        for target, tensor in outgoing.items():
            box = place.boxes[self._rank, target]
            box.last = max(box.last, now + arrive_s[target])  # in order per pair
            box.letters[box.sent] = (tensor.detach().clone(), box.last)
            box.sent += 1
            self._clock.wake_all(box.waiting)
            box.waiting.clear()
        return now + max(arrive_s.values(), default=0.0)

    def _meet(
        self,
        what: str,
        tensor: Tensor,
        into: Tensor,
        combine: Combine,
        cost: Cost,
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
            begins = max(clock.now, meeting.ready, place.ends)
            place.ends = begins + cost(self.members, tensor.nbytes)
            clock.at(place.ends, lambda: meeting.end(combine))
        return meeting


class _Meeting:
    """One collective: who has joined with which tensor, and who waits for its end."""

    __slots__ = (
        *("_clock", "_ended", "_first", "_number", "_place", "_waiting"),
        *("dtype", "intos", "missing", "ready", "shape", "tensors", "what"),
    )
    breaks = True  # with its epoch

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


class _Box:
    """Letters from one worker to another. Whoever asks first gets the first, waiting or not."""

    __slots__ = ("asked", "last", "letters", "sent", "waiting")

    def __init__(self) -> None:
        self.letters: dict[int, tuple[Tensor, float]] = {}  # by number; with its arrival
        self.sent = 0
        self.asked = 0
        self.last = 0.0
        self.waiting: list[Parked] = []


class _Received:
    breaks = True  # with its epoch

    def __init__(
        self, clock: Clock, place: Place, source: int, worker: Worker, tensor: Tensor
    ) -> None:
        self._clock = clock
        self._worker, self._epoch = worker, place.epoch
        self._box = place.boxes[source, worker.rank]
        self._number = self._box.asked
        self._box.asked += 1
        self._tensor: Tensor | None = tensor
        self._words = source, place.name

    def wait(self) -> None:
        if self._tensor is None:
            return
        while self._number not in self._box.letters:
            if self._worker.epoch != self._epoch:
                raise self._worker.over()
            parked = self._clock.park(self)
            self._box.waiting.append(parked)
            self._clock.blocked(parked)
        letter, arrives = self._box.letters.pop(self._number)
        into, self._tensor = self._tensor, None
        self._clock.sleep_until(arrives)
        into.copy_(letter)

    def __str__(self) -> str:
        return "a tensor from worker {} on channel {!r}".format(*self._words)


class _Sent:
    """What was copied on the way out; `until` is when the caller may go on."""

    def __init__(self, clock: Clock, until: float) -> None:
        self._clock = clock
        self._until = until

    def wait(self) -> None:
        self._clock.sleep_until(self._until)


class _All:
    def __init__(self, works: list[base.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _ranks(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
