"""All-reduces of small tensors: to one worker, summed there, and back.

Gloo's all-reduce is a ring: of P workers each sends 2(P-1) messages, one after another. That is
best for the bandwidth of large tensors, and slow for small ones. A small tensor goes to the first
member, is summed there, and comes back: 2(P-1) messages in all, P times fewer.

Somebody has to answer at the first member, and nothing of Gloo's does. As a rule that is whoever
waits there: no thread is quicker. But a program may issue, and compute before it waits; then a
thread of the channel takes over after `_GRACE_S`, so that the others need not wait for that.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offbeat.worlds.base import Condition, Op
from offbeat.worlds.gloo import Groups, Work

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_COMBINE: dict[Op, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
_TAGS = range(1, 2**30, 2)  # of the messages: a question's, and the next one its answer's
_GRACE_S = 0.002


class Small:
    """A channel's small all-reduces: what they need from one to the next."""

    def __init__(self, world: RealWorld, groups: Groups) -> None:
        self._world = world
        self._groups = groups
        self._tags = cycle(_TAGS)
        self._rooms: defaultdict[Any, list[_Room]] = defaultdict(list)  # by shape and type
        self._unanswered: deque[_Answered] = deque()
        self._state: Condition | None = None  # of the thread that answers; made with it
        self._asleep = False
        self._closed = False

    def all_reduce(self, tensor: Tensor, op: Op) -> Work:
        group, asked = self._groups.on("cpu"), next(self._tags)
        if self._world.rank != self._groups.members[0]:
            works = [group.recv([tensor], 0, asked + 1), group.send([tensor], 0, asked)]
            return Work(self._world, self._groups, works, self._groups.time_out)
        rooms = self._rooms[tensor.shape, tensor.dtype]
        room = rooms.pop() if rooms else _Room(tensor, len(self._groups.members))
        work = _Answered(self._world, self._groups, tensor, op, asked, room, rooms)
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


class _Answered(Work):
    """A small all-reduce at the first member."""

    def __init__(
        self,
        world: RealWorld,
        groups: Groups,
        tensor: Tensor,
        op: Op,
        asked: int,
        room: _Room,
        rooms: list[_Room],
    ) -> None:
        self.issued = time.monotonic()
        self._group = group = groups.on("cpu")
        self._tensor = tensor
        self._op = op
        self._answered = asked + 1
        self._room = room
        self._rooms = rooms
        self._others = range(1, len(groups.members))
        self._answering = threading.Lock()
        self._done = False
        self._broken: str | None = None
        works = [group.recv([room.rows[each]], each, asked) for each in self._others]
        super().__init__(world, groups, works, groups.time_out)

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
        super().finish()
        _COMBINE[self._op](self._room.whole, 0, out=self._tensor)
        self._rooms.append(self._room)
        self._works = [
            self._group.send([self._tensor], each, self._answered) for each in self._others
        ]
        super().finish()

    def let_go(self) -> None:
        super().let_go()
        self._group = None


class _Room:
    """Where the first member puts what the others send."""

    def __init__(self, like: Tensor, members: int) -> None:
        self.whole = like.new_empty(members, *like.shape)
        self.rows = list(self.whole)
