"""What the processes of a DataLoader have read, in memory that they share with their worker.

Each process writes for itself: which shards it was dealt, at which of its samples each began and
ended, and at which sample each task (batch) began. The worker, who knows how many tasks its loop
was given, finds from that which samples were.

    process 1   shard 4: samples 0 1 2 | shard 7: 3 4 5 6     tasks 0: 0 1   2: 2 3   4: 4 5
    process 2   shard 5: samples 0 1 2 3 4 5                  tasks 1: 0 1   3: 2 3   5: 4 5
    the loop was given tasks 0 to 2: shard 4 is done, 1 sample of shard 7 was seen, 2 of shard 5

Nobody locks. What is written last is what makes an entry count.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch

READERS = 1025
"""The worker itself, and at most so many processes less one."""
_TASKS = 4096  # many times as many as a loader fetches ahead
_FACTS = 4
_SHIFT = READERS.bit_length()


class Drawn(NamedTuple):
    """A shard that a reader was dealt."""

    place: int
    """In the order of the epoch."""
    reader: int
    seen: int
    """Samples of it that the loop was given, of those that this reader has read."""
    done: bool
    """Whether these are all."""


class Log:
    """The same object in the worker and in its processes, whether forked or spawned."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        lengths = [8, *[READERS] * 5, *[2 * shards] * 3, _TASKS * _FACTS]
        self._memory = torch.zeros(sum(lengths), dtype=torch.int64)
        self._memory.share_memory_()  # type: ignore[no-untyped-call]
        self._lengths = lengths
        self._map()

    def _map(self) -> None:
        """Numbers of the shared memory as an array: a tensor takes microseconds for each."""
        parts, at = [], self._memory.data_ptr()
        for length in self._lengths:
            parts.append((ctypes.c_int64 * length).from_address(at))
            at += 8 * length
        (self._facts, self._begun, self._ended, self._asks, self._totals, self._pids) = parts[:6]
        (self._owners, self._begins, self._ends, self._tasks) = parts[6:]

    def __getstate__(self) -> dict[str, object]:
        return {"_shards": self._shards, "_memory": self._memory, "_lengths": self._lengths}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._map()

    # --- facts of all turns ----------------------------------------------------------------

    def set_epoch(self, turn: int, epoch: int) -> None:
        """This turn is that epoch, and those after it follow."""
        self._facts[0], self._facts[1] = turn, epoch

    def epoch(self, turn: int) -> int:
        """The epoch of a turn."""
        return int(self._facts[1] + turn - self._facts[0])

    @property
    def loader(self) -> int:
        """The turn that whoever reads now has begun with; -1 if that is void."""
        return int(self._facts[2])

    @loader.setter
    def loader(self, first_turn: int) -> None:
        self._facts[2] = first_turn

    @property
    def replaced(self) -> bool:
        """Whether a state was loaded since, and so nobody looks at this any more."""
        return bool(self._facts[3])

    @replaced.setter
    def replaced(self, value: bool) -> None:
        self._facts[3] = value

    @property
    def begun(self) -> int:
        """How many turns have begun."""
        return int(max(self._begun))

    def is_own(self, turn: int) -> bool:
        """Whether the worker itself reads in this turn."""
        return bool(self._begun[0] == turn + 1)

    def pids(self, turn: int) -> list[int]:
        """The processes that are in this turn, or were."""
        readers = range(1, READERS)
        return [self._pids[each] for each in readers if self._begun[each] == turn + 1]

    # --- a reader writes -------------------------------------------------------------------

    def begin(self, reader: int, turn: int) -> None:
        """It begins a turn."""
        self._pids[reader], self._totals[reader], self._asks[reader] = os.getpid(), 0, 0
        self._begun[reader] = turn + 1

    def ask(self, reader: int) -> None:
        """It asks for a shard, and may be dealt one that is not here yet."""
        self._asks[reader] = 1

    def draw(self, reader: int, turn: int, place: int) -> None:
        """It was dealt a shard."""
        at = self._at(turn, place)
        self._ends[at], self._begins[at] = -1, self._totals[reader]
        self._owners[at] = (turn << _SHIFT) + reader + 1
        self._asks[reader] = 0

    def task(self, reader: int, turn: int, task: int) -> None:
        """It begins a task of its loader."""
        at = task % _TASKS * _FACTS
        self._tasks[at] = -1
        self._tasks[at + 1], self._tasks[at + 2] = reader, task
        self._tasks[at + 3] = self._totals[reader]
        self._tasks[at] = turn

    def sample(self, reader: int) -> None:
        """It gives one more sample to the task."""
        self._totals[reader] += 1

    def read(self, reader: int, turn: int, place: int) -> None:
        """It has read a shard to its end."""
        self._ends[self._at(turn, place)] = self._totals[reader]

    def end(self, reader: int, turn: int) -> None:
        """There are no more shards for it in this turn."""
        self._ended[reader], self._asks[reader] = turn + 1, 0

    def _at(self, turn: int, place: int) -> int:
        """This turn and the one before are known."""
        return turn % 2 * self._shards + place

    # --- the worker reads ------------------------------------------------------------------

    def asking(self, turn: int) -> list[int]:
        """The processes that are being dealt a shard in this turn."""
        readers = range(1, READERS)
        asks = [each for each in readers if self._asks[each] and self._begun[each] == turn + 1]
        return [self._pids[each] for each in asks]

    def exhausted(self, turn: int) -> bool:
        """Whether a reader was told that there are no more."""
        return turn + 1 in self._ended[:]

    def drawn(self, turn: int, tasks: int | None) -> list[Drawn]:
        """The shards of all readers in this turn, of which the loop was given so many tasks.

        None: all that were read.
        """
        totals = list(self._totals)  # before the tasks: what is counted, is in one that is there
        given = dict(enumerate(totals))
        if tasks is not None:
            for at in range(0, _TASKS * _FACTS, _FACTS):
                in_turn, reader, task, before = self._tasks[at : at + _FACTS]
                if in_turn == turn and task >= tasks and reader:
                    given[reader] = min(given[reader], before)
        first = turn % 2 * self._shards
        found = []
        for place in range(self._shards):
            in_turn, reader = divmod(self._owners[first + place] - 1, 1 << _SHIFT)
            if self._owners[first + place] and in_turn == turn:
                begins, ends = self._begins[first + place], self._ends[first + place]
                seen = max(0, min(given[reader], ends if ends >= 0 else given[reader]) - begins)
                found.append(Drawn(place, reader, seen, 0 <= ends <= given[reader]))
        return found
