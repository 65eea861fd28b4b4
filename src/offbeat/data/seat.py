"""A seat: one worker's place at a deal. Its turns so far, and where a saved one goes on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from offbeat.data import runs
from offbeat.data.again import again_here
from offbeat.data.turn import Turn
from offbeat.worlds import VirtualWorld, World, world_size
from offbeat.worlds.current import present_world


class Seat:
    """What one worker knows of its own turns."""

    def __init__(self) -> None:
        self.epoch = 0
        """The epoch of the next turn."""
        self.turns = 0
        """How many turns have begun."""
        self.turn: Turn | None = None
        """The one that has begun last."""
        self.loads = 0
        self._number: int | None = None
        self._joined = False
        self._loaded: Mapping[str, Any] | None = None
        self._passed: Mapping[str, Any] | None = None  # loaded, of a turn that others have read
        self._gone: list[Any] = []
        self._told: ref[World] | None = None
        self._generator: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """What this deal is called in this job, the same on all workers.

        Deals are numbered as they come into use, which is in one order everywhere; one that a
        worker uses alone, later than all others, is then its own.
        """
        if self._number is None:
            self._number = next_number(present_world())
        return f"deal/{self._number}/{self.loads}"

    @property
    def counts(self) -> bool:
        """Whether this worker has joined, whose program may count epochs otherwise."""
        again = again_here()
        return self._joined or (again is not None and again.newcomer)

    def join(self) -> None:
        """Begin where the others are, if this worker has joined them; its first turn, once."""
        again = again_here()
        if again is None or not self.counts or self.turns or self._loaded is not None:
            return
        self._joined = True
        if (newest := again.newest(self.key)) is not None:
            self.turns, self.epoch = newest[0] - 1, newest[1]

    # --- the position ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of this worker: in the turn that is under way, or before the next."""
        if self._loaded is not None:
            return dict(self._loaded)
        if self.turn is not None and not self.turn.finished:
            return {"turn": self.turns, **self.turn.position(), "before": self.turn.before}
        again = again_here()
        extras = [] if again is None else again.extras(self.key, self.turns + 1)
        nothing = {"done": [], "hand": [], "mine": 0, "dealt": 0, "gone": [], "extras": extras}
        return {"epoch": self.epoch, "turn": self.turns + 1, **nothing, "before": self.before()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the next turn."""
        if self.turn is not None:
            self.turn.end()
        self.turn = self._generator = self._told = None
        self.loads += 1
        self._loaded, self._passed = state, None
        self.epoch, self.turns = state["epoch"], state["turn"] - 1
        self._tell()

    def resumed(self) -> Mapping[str, Any] | None:
        """The position to go on from, if it is of the epoch that comes next; once.

        Then it is known what all workers had: in this turn, and in those that some had come to.
        """
        if self._passed is not None:
            self._gone, self._passed = self._gathered(self._passed), None
        if (state := self._loaded) is None:
            return None
        is_next = state["epoch"] == self.epoch
        self._gone = self._gathered(state) if is_next else []
        self._loaded = None
        return state if is_next else None

    def left(self, count: int) -> tuple[list[range], list[list[int]]]:
        """What nobody had in hand or computed of the next turn, when it was saved: else all.

        And the batches of earlier turns that come in it.
        """
        return left_of(self.turns + 1, count, self._gone)

    def come_to(self, turn: int) -> None:
        """The next turn has this number, from 0: others may have read some in between."""
        if turn != self.turns and not self.counts:
            if self.turn is not None:
                self.turn.end()
            self.turns, self.turn = turn, None
            self._passed, self._loaded = self._loaded or self._passed, None

    def _gathered(self, state: Mapping[str, Any]) -> list[Any]:
        """What all workers had: number of the turn, whether all was dealt, what was dealt there."""
        world = present_world()
        if world is None or world.size == 1:
            return dealt_in(state)
        self._tell()
        with world.elsewhere("the first batch after load_state_dict()"):
            told = [json.loads(world.control.get(self._place(rank))) for rank in world.members]
        if world.control.add(self._place(-1), 1) == world.size:
            for rank in (*world.members, -1):
                world.control.kept().delete(self._place(rank))
        return [turn for position in told for turn in position]

    def _tell(self) -> None:
        """Tell the others what this worker has, where they can hear it; once."""
        world, state = present_world(), self._loaded or self._passed
        if state is None or world is None or world.size == 1 or self._tells(world):
            return
        self._told = ref(world)
        told = json.dumps(dealt_in(state)).encode()
        world.control.kept().set(self._place(world.rank), told)

    def _tells(self, world: World) -> bool:
        return self._told is not None and self._told() is world

    def _place(self, rank: int) -> str:
        return f"{self.key}/position/{rank}"

    def before(self, resumed: Mapping[str, Any] | None = None) -> list[Any] | None:
        """Of the last turn: its number, whether all of it was dealt, and what was dealt here."""
        if resumed is not None:
            return resumed["before"]  # type: ignore[no-any-return]
        turn = self.turn
        return None if turn is None else [self.turns, *turn.dealt(), turn.extras]

    # --- generators ------------------------------------------------------------------------

    def note_generator(self) -> None:
        """A DataLoader is about to draw a seed for its processes; before a resumed turn, in vain.

        It drew that seed when the turn began, before it was saved.
        """
        if self._loaded is not None and self._generator is None:
            self._generator = torch.get_rng_state()

    def put_generator_back(self) -> None:
        """As if nothing had been drawn since the state was loaded."""
        if self._generator is not None:
            torch.set_rng_state(self._generator)
            self._generator = None


def dealt_in(state: Mapping[str, Any]) -> list[Any]:
    """What a worker had been dealt in its turn, and in the one before."""
    numbers = [*state["done"], *state["hand"], *state.get("gone", [])]
    now = [state["turn"], False, numbers, state.get("extras", [])]
    return [now, [*state["before"], []][:4]] if state["before"] else [now]


def left_of(turn: int, count: int, dealt: Iterable[Any]) -> tuple[list[range], list[list[int]]]:
    """What is left of a turn of so many batches, and the batches of earlier turns in it."""
    gone: list[range] = []
    extras: list[list[int]] = []
    for each, exhausted, numbers, more in dealt:
        if each == turn:
            extras = extras or more
            gone += [range(count + len(more))] if exhausted else runs.unpacked(numbers)
    return runs.others(count + len(extras), gone), extras


def members() -> list[int]:
    """The workers that are there."""
    world = present_world()
    return list(range(world_size()) if world is None else world.members)


def next_number(world: World | None) -> int:
    """A number for what is dealt, the same on all workers: each counts for itself."""
    if isinstance(world, VirtualWorld):
        return next(_numbers.setdefault(world.worker, itertools.count()))
    return next(_process_numbers)


_numbers: WeakKeyDictionary[Any, itertools.count[int]] = WeakKeyDictionary()
_process_numbers = itertools.count()
