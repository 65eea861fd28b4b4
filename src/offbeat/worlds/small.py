"""All-reduces of small tensors: to one worker, summed there, and back.

Gloo's all-reduce is a ring: of P workers each sends 2(P-1) messages, one after another. That is
best for the bandwidth of large tensors, and slow for small ones. A small tensor goes to the first
member, is summed there, and comes back: 2(P-1) messages in all, P times fewer. Two members send
theirs to each other, and both sum up: then nobody waits for an answer.

Gloo sends nothing until the receiver has said that it is ready. So those who receive say so ahead,
as soon as they have read what came before: what the others send is there when a worker comes last.

With more than two, somebody has to answer at the first member, and nothing of Gloo's does. As a
rule that is whoever waits there: no thread is quicker. But a program may issue, and compute before
it waits; then a thread of the channel takes over after `_GRACE_S`, so that the others need not wait
for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.errors import EpochOver
from offbeat.worlds.base import Condition, Op
from offbeat.worlds.gloo import Groups, Work

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_COMBINE: dict[Op, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
_COMBINE_TWO: dict[Op, Any] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_TAGS = range(1, 2**30, 2)  # of answers; the even ones belong to what is sent ahead
_GRACE_S = 0.002


class Small:
    """A channel's small all-reduces: what they need from one to the next."""

    def __init__(self, world: RealWorld, groups: Groups) -> None:
        self._world = world
        self._groups = groups
        self._me = groups.members.index(world.rank)
        self._size = len(groups.members)
        self._tags = cycle(_TAGS)
        self._rooms: dict[Any, _Rooms] = {}  # by shape and type
        self._unanswered: deque[_Answered] = deque()
        self._state: Condition | None = None  # of the thread that answers; made with it
        self._asleep = False
        self._closed = False

    def all_reduce(self, tensor: Tensor, op: Op) -> Work:
        kind = tensor.shape, tensor.dtype
        if (rooms := self._rooms.get(kind)) is None:
            # All members issue in one order, so they number the kinds alike.
            rooms = _Rooms(self._world, self._groups, 2 * len(self._rooms) + 2)
            self._rooms[kind] = rooms
        if self._size == 2:
            return _Swapped(self._world, self._groups, tensor, op, 1 - self._me, rooms)
        answered = next(self._tags)
        if self._me:
            group = self._groups.on("cpu")
            works = [group.recv([tensor], 0, answered), group.send([tensor], 0, rooms.tag)]
            return Work(self._world, self._groups, works, self._groups.time_out)
        work = _Answered(self._world, self._groups, tensor, op, answered, rooms)
        self._unanswered.append(work)
        if self._state is None:
            self._state = self._world.condition("small all-reduces")
            self._world.spawn("answers", self._answer)
        elif self._asleep:
            with self._state:
                self._state.notify_all()
        return work

    def close(self) -> None:
        """Have the thread end."""
        self._closed = True
        if self._state is not None:
            with self._state:
                self._state.notify_all()

    def _answer(self) -> None:
        """Answer what nobody waits for: in order, since the others wait in order too."""
        assert self._state is not None
        while True:
            with self._state:
                self._asleep = True
                self._state.wait_for(lambda: bool(self._unanswered) or self._closed)
                self._asleep = False
            if self._closed:
                return
            work = self._unanswered[0]
            if not work.taken and (rest_s := work.issued + _GRACE_S - time.monotonic()) > 0:
                time.sleep(rest_s)
            self._unanswered.popleft()
            if not work.taken:
                try:
                    self._groups.wait_for(work)
                except RuntimeError:  # the work knows; who waits for it raises
                    continue
                except EpochOver:
                    return


class _Swapped(Work):
    """A small all-reduce between two members."""

    def __init__(
        self, world: RealWorld, groups: Groups, tensor: Tensor, op: Op, other: int, rooms: _Rooms
    ) -> None:
        self._tensor = tensor
        self._op = op
        self._is_first = other == 1
        self._rooms = rooms
        self._room: _Room | None = rooms.take(tensor, [other], rows=1)
        works = [groups.on("cpu").send([tensor], other, rooms.tag)]
        super().__init__(world, groups, works, groups.time_out)

    def finish(self) -> None:
        super().finish()
        if (room := self._room) is not None:  # it has not been waited for before
            self._rooms.wait_for(room)
            mine, theirs = self._tensor, room.rows[0]
            pair = (mine, theirs) if self._is_first else (theirs, mine)  # the same bits on both
            _COMBINE_TWO[self._op](*pair, out=mine)
            self._room = None
            self._rooms.give_back(room)


class _Answered(Work):
    """A small all-reduce at the first of several members."""

    def __init__(
        self,
        world: RealWorld,
        groups: Groups,
        tensor: Tensor,
        op: Op,
        answered: int,
        rooms: _Rooms,
    ) -> None:
        self.issued = time.monotonic()
        self._group = groups.on("cpu")
        self._tensor = tensor
        self._op = op
        self._answered = answered
        self._others = range(1, len(groups.members))
        self._rooms = rooms
        self._room = rooms.take(tensor, self._others, rows=len(groups.members))
        self._answering = threading.Lock()
        self._done = False
        self._broken: str | None = None
        super().__init__(world, groups, [], groups.time_out)

    @property
    def taken(self) -> bool:
        """Whether somebody answers, or has answered."""
        return self._done or self._answering.locked()

    def finish(self) -> None:
        with self._answering:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            if not self._done:
                try:
                    self._answer()
                except RuntimeError as error:
                    self._broken = str(error)
                    raise
                self._done = True

    def _answer(self) -> None:
        self._room.rows[0].copy_(self._tensor)
        self._rooms.wait_for(self._room)
        _COMBINE[self._op](self._room.whole, 0, out=self._tensor)
        self._works = [
            self._group.send([self._tensor], each, self._answered) for each in self._others
        ]
        self._rooms.give_back(self._room)
        super().finish()

    def let_go(self) -> None:
        super().let_go()
        self._group = None


class _Rooms:
    """Where a member receives what others send it, of one shape and type.

    Messages of one tag are received in the order in which that was asked for, and every one of them
    goes to a room that was readied before: rooms are taken in the order of their readying.
    """

    def __init__(self, world: RealWorld, groups: Groups, tag: int) -> None:
        self.tag = tag
        self._world = world
        self._groups = groups
        self._ready: deque[_Room] = deque()
        self._lock = threading.Lock()

    def take(self, like: Tensor, senders: Sequence[int], rows: int) -> _Room:
        """Return a room for what the senders will send next."""
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            room = _Room(like, senders, rows)
            self._make_ready(room)
            return room

    def wait_for(self, room: _Room) -> None:
        """Block until all have sent."""
        room.received.finish()
        self._groups.ended(room.received)

    def give_back(self, room: _Room) -> None:
        """It has been read: have it ready for what will be sent after that."""
        with self._lock:
            self._make_ready(room)
            self._ready.append(room)

    def _make_ready(self, room: _Room) -> None:
        group = self._groups.on("cpu")
        rows = room.rows[len(room.rows) - len(room.senders) :]
        works = [
            group.recv([row], sender, self.tag)
            for row, sender in zip(rows, room.senders, strict=True)
        ]
        room.received = Work(self._world, self._groups, works, self._groups.time_out)


class _Room:
    """A place for what the senders send; with more rows than senders, the first is one's own."""

    def __init__(self, like: Tensor, senders: Sequence[int], rows: int) -> None:
        self.senders = senders
        self.whole = like.new_empty(rows, *like.shape)
        self.rows = list(self.whole)
        self.received: Work
