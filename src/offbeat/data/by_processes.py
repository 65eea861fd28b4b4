"""Shards that the processes of a DataLoader read: each asks the job's store for the next one.

A process has no part in its worker's world, which may be lost or closed while it reads ahead. So it
has a connection of its own to the store, and writes into a log (log.py) what it has read: from that
the worker knows the position of its loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from offbeat.data import runs
from offbeat.data.counter import Counter
from offbeat.data.log import Log
from offbeat.data.seat import dealt_in, left_of
from offbeat.data.started import task_here
from offbeat.errors import DealError
from offbeat.worlds import Control
from offbeat.worlds.pool import STORE, pool
from offbeat.worlds.remote import JobStore

_ITSELF, _PROCESSES = "itself", "by processes of a DataLoader"


class Reader:
    """One process in one turn; or, outside of an attached block, a worker itself."""

    def __init__(self, log: Log, turn: int, number: int, readers: int) -> None:
        self._log = log
        self.turn = turn
        self.number = number
        """0 is the worker itself."""
        self.readers = readers
        """How many there are of this worker."""

    @property
    def index(self) -> int:
        """Which of these it is."""
        return max(self.number - 1, 0)

    def ask(self) -> None:
        """A shard is asked for."""
        self._log.ask(self.number)

    def samples(
        self,
        places: Iterable[int],
        order: Sequence[int],
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        resumed: Mapping[str, Any] | None,
    ) -> Iterator[Any]:
        """Those of one shard after the other, but for what was seen before."""
        seen = {} if resumed is None else dict(resumed["read"])
        log, number, turn = self._log, self.number, self.turn
        task_now, task = task_here(), -1
        for place in places:
            log.draw(number, turn, place)
            for sample in islice(read(shards[order[place]]), seen.get(order[place], 0), None):
                if (now := task_now()) is not None and now != task:
                    task = now
                    log.task(number, turn, task)
                log.sample(number)
                yield sample
            log.read(number, turn, place)
        log.end(number, turn)


class StoreDeal:
    """Who gets which shard, by a counter in the job's store; alone, by turns."""

    def __init__(self, store: JobStore | None, key: str) -> None:
        self._store = store
        self._key = key

    def places(
        self,
        reader: Reader,
        count: int,
        resumed: Mapping[str, Any] | None,
        alike: Mapping[str, Any],
    ) -> Iterator[int]:
        """What this reader is dealt: first its part of what its worker had in hand, if resumed."""
        control = None if self._store is None else self._store.control()
        if control is not None:
            self._compare(control, reader.turn, _PROCESSES)
        dealt = [] if resumed is None else self._dealt(control, resumed)
        rest, extras = left_of(reader.turn + 1, count, dealt)
        if extras:
            raise RuntimeError(
                "a position was loaded in which shards of an earlier epoch, of a worker that was "
                "lost, come once more: make the DataLoader with num_workers=0, for this epoch"
            )
        if resumed is not None and resumed["turn"] == reader.turn + 1:
            hand = [place for run in runs.unpacked(resumed["hand"]) for place in run]
            yield from hand[reader.index :: reader.readers]
        left = [place for run in rest for place in run]
        if control is None:
            yield from left[reader.index :: reader.readers]
        else:
            alike = {**alike, "what is left of the epoch": len(left)}
            yield from self._counted(control, reader, left, alike)

    def _counted(
        self, control: Control, reader: Reader, left: list[int], alike: Mapping[str, Any]
    ) -> Iterator[int]:
        assert self._store is not None
        rank, key = self._store.rank, f"{self._key}/{reader.turn}"
        counter = Counter(key, rank, self._store.size, alike)
        while True:
            reader.ask()
            if (number := counter.add(control, 1) - 1) >= len(left):
                break
            yield left[number]
        if control.add(f"{key}/ended/{rank}", 1) == reader.readers:
            control.delete(f"{key}/ended/{rank}")
            counter.end(control)

    def _dealt(self, control: Control | None, state: Mapping[str, Any]) -> list[Any]:
        """What all workers had been dealt when their states were saved."""
        if control is None:
            return dealt_in(state)
        assert self._store is not None
        mine = json.dumps(dealt_in(state))
        control.set_once(self._place(self._store.rank), mine.encode())
        found = []
        for rank in range(self._store.size):
            try:
                found += json.loads(control.get(self._place(rank)))
            except RuntimeError as error:
                raise DealError(
                    f"worker {self._store.rank} goes on from a state, and worker {rank} has not "
                    "come to that: every worker must load its own state"
                ) from error
        return found

    def _place(self, rank: int) -> str:
        return f"{self._key}/position/{rank}"

    # --- who reads ---------------------------------------------------------------------------

    def compare_own(self, turn: int) -> None:
        """A worker that reads in its own world, where no process is, finds out if others do not."""
        assert self._store is not None
        if pool.place != STORE:
            return  # but at its standby, where no process can be
        with suppress(RuntimeError):  # of a store that is lost: the world notices that
            self._compare(self._store.control(), turn, _ITSELF)

    def _compare(self, control: Control, turn: int, how: str) -> None:
        assert self._store is not None
        mine = f"{self._store.rank} {how}"
        rank, theirs = (
            control.set_once(f"{self._key}/{turn}/by", mine.encode()).decode().split(" ", 1)
        )
        control.delete(f"{self._key}/{turn - 2}/by")  # who comes to that later, finds nothing
        if theirs != how:
            raise DealError(
                f"worker {rank} reads its shards {theirs}, worker {self._store.rank} {how}: make "
                "the DataLoader with num_workers=0 on every worker, or on none"
            )
