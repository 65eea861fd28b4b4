"""The turns of one worker over its shards: numbered alike on all workers, whoever reads.

A worker does not hear of it when the processes of its DataLoader begin a turn: they write it into
their log. Some live for one turn, some for many.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.data import runs
from offbeat.data.log import Log
from offbeat.data.reading import Reading
from offbeat.data.started import Started
from offbeat.worlds.threads import comes_true

_PATIENCE_S = 60.0


class Turns:
    """How many turns have begun, what each was, and where a saved one goes on."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._begun = 0
        self._first = self._epoch = 0  # a turn, and its epoch
        self._here = -1  # the turn that this worker has begun last itself, in its world
        self._log: Log | None = None
        self._started: deque[Started] = deque(maxlen=8)
        self._base = 0  # the first turn of the loader that has started this process
        self._own = 0, 0  # this process, and its turns
        self._state: Mapping[str, Any] | None = None
        self._loaded_at = -1
        self.loads = 0
        """How often a state was loaded."""
        self.reading = Reading()
        """This worker's own turn that has begun last."""

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned: what a forked one knows, too."""
        return {**vars(self), "_started": deque(), "reading": Reading()}

    @property
    def begun(self) -> int:
        """How many turns have begun."""
        return self._begun if self._log is None else max(self._begun, self._log.begun)

    @property
    def epoch(self) -> int:
        """Of the next turn."""
        return self._epoch_of(self.begun)

    def set_epoch(self, epoch: int) -> None:
        """The next turn is that epoch, and those after it follow."""
        self._first, self._epoch = self.begun, epoch
        if self._log is not None:
            self._log.set_epoch(self._first, self._epoch)

    def _epoch_of(self, turn: int) -> int:
        if self._log is not None:
            return self._log.epoch(turn)
        return self._epoch + turn - self._first

    # --- who begins them ---------------------------------------------------------------------

    def begin_here(self, in_world: bool) -> tuple[int, int]:
        """This worker reads itself; return the number of its turn, and the epoch."""
        turn = self.begun
        self._begun = turn + 1
        if in_world:
            self._here = turn
        else:
            self.log.begin(0, turn)
        if self._log is not None:
            self._log.loader = -1
        return turn, self._epoch_of(turn)

    def starts(self, iterator: object, certain: bool) -> None:
        """A DataLoader is about to start a process; it is `certain` that this will read here."""
        if any(each.is_of(iterator) for each in self._started):
            return
        self._started.append(Started(iterator))
        self._base = self.begun
        if certain:
            self._begun = self._base + 1
        assert self.log is not None, "made here, where all processes will find it"

    @property
    def log(self) -> Log:
        """What is shared with processes: made when the first of them is about to start."""
        if self._log is None:
            self._log = Log(self._shards)
            self._log.set_epoch(self._first, self._epoch)
        return self._log

    def begin_in_process(self, reader: int) -> tuple[int, int]:
        """A process begins its next turn; return its number, and the epoch."""
        if self._log is None:
            raise RuntimeError("shards can be read by processes of a DataLoader, not by others")
        pid, turns = self._own
        turns = turns if pid == os.getpid() else 0
        self._own = os.getpid(), turns + 1
        if self._log.replaced:
            raise RuntimeError(
                "load_state_dict() was called after the processes of this DataLoader were started: "
                "make a new DataLoader then"
            )
        if turns == 0:
            self._log.loader = self._base
        elif self._log.loader != self._base:
            raise RuntimeError(
                "a DataLoader with persistent_workers goes on, but another loop has begun to read "
                "the same shards since: give each a DealShards of its own"
            )
        turn = self._base + turns
        self._log.begin(reader, turn)
        return turn, self._epoch_of(turn)

    # --- the position ------------------------------------------------------------------------

    @property
    def loaded(self) -> Mapping[str, Any] | None:
        """The position to go on from, if no turn has begun since it was loaded."""
        return self._state if self._loaded_at == self.begun else None

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the next turn."""
        if self._log is not None:
            self._log.replaced = True
        self._log, self._here, self.reading = None, -1, Reading()
        self._started.clear()
        self.loads += 1
        self._begun = state["turn"] - 1
        self.set_epoch(state["epoch"])
        self._state, self._loaded_at = state, self._begun

    def resumed(self, turn: int | None = None) -> Mapping[str, Any] | None:
        """The state that was loaded, if its epoch came next; and if this turn is the one there."""
        if self._state is None or self._epoch_of(self._loaded_at) != self._state["epoch"]:
            return None
        return self._state if turn in (None, self._loaded_at) else None

    @property
    def here(self) -> bool:
        """Whether this worker reads the latest turn itself, in its world."""
        return self._here == self.begun - 1

    def position(self, order: Sequence[int], alone: bool) -> dict[str, Any] | None:
        """In the latest turn, whose shards come in this order; None if that is over.

        Not for a turn that this worker reads itself, in its world.
        """
        turn = self.begun - 1
        tasks = self._tasks(turn)
        state = self.resumed(turn)
        drawn = self.log.drawn(turn, tasks)
        seen_before = {} if state is None else dict(state["read"])
        read: dict[int, int] = {}
        done = [] if state is None else runs.unpacked([*state["done"], *state["gone"]])
        known = {each.place for each in drawn}
        hand = [] if state is None else runs.unpacked(state["hand"])
        places = [each for run in hand for each in run if each not in known]
        for place in places:
            read[order[place]] = seen_before.get(order[place], 0)
        for each in drawn:
            shard = order[each.place]
            if each.done:
                done.append(range(each.place, each.place + 1))
            else:
                places.append(each.place)
                read[shard] = seen_before.get(shard, 0) + each.seen
        all_dealt = runs.length(done) == self._shards if alone else self.log.exhausted(turn)
        if all_dealt and not places and not self.log.asking(turn):
            return None
        mine = runs.length(done) + len(places)
        return {
            "epoch": self._epoch_of(turn),
            "turn": turn + 1,
            "done": runs.packed(done),
            "hand": [[place, place + 1] for place in places],
            "read": [[shard, seen] for shard, seen in read.items() if seen],
            "mine": mine,
            "dealt": mine,
            "gone": [],
            "extras": [],
            "before": self.before(turn),
        }

    def before(self, turn: int) -> list[Any] | None:
        """Of the turn before that one, if others have read it, as in `Seat.before`."""
        turn -= 1
        if turn < self._loaded_at and self._state is not None:
            return self._state["before"]  # type: ignore[no-any-return]
        if turn < 0 or self._log is None or turn == self._here:
            return None
        if self._log.exhausted(turn):
            return [turn + 1, True, [], []]
        state, places = self.resumed(turn), [each.place for each in self._log.drawn(turn, None)]
        numbers = [] if state is None else [*state["done"], *state["hand"], *state["gone"]]
        return [turn + 1, False, [*numbers, *([each, each + 1] for each in places)], []]

    def _tasks(self, turn: int) -> int | None:
        """How many tasks of its loader the loop was given; None if there is no loader."""
        if self.log.is_own(turn):
            return None
        if not (pids := self.log.pids(turn)):
            return 0
        started = next((each for each in self._started if each.has(pids[0])), None)
        if started is None:
            raise RuntimeError(
                "how far the loop is in the shards of this DataLoader is not known: it was made "
                "too long ago. Save inside its loop, or between epochs"
            )
        if not comes_true(_PATIENCE_S, lambda: not (started.alive and self.log.asking(turn))):
            raise RuntimeError(f"the job's store does not answer for {_PATIENCE_S:g} s")
        return started.tasks()
