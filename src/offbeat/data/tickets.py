"""Who gets which batch: numbers from one counter that all workers share.

A worker adds to the counter what it wants to have, and the numbers below the new value are its own.
Nobody meets anybody: whoever comes first says what it deals, and who comes later compares.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import ref

from offbeat.errors import DisagreementError
from offbeat.worlds import World
from offbeat.worlds.current import present_world

MOST = 8
"""Batches that a worker takes at a time, far from the end."""
SHARES = 16
"""It takes at most such a part of what it will still compute, at its speed so far."""
_ENDED = 1 << 40
"""The field above the counter: workers that ask for no more."""


class Tickets:
    """One worker's part of one turn: the numbers 0 to `count` - 1, dealt among all."""

    def __init__(self, world: World | None, key: str, count: int, alike: Mapping[str, Any]) -> None:
        # By reference: who deals is known to its world, which must be able to go.
        self._world = None if world is None or world.size == 1 else ref(world)
        self._key = key
        self._count = count
        self._alike = alike
        self._hand: deque[range] = deque()
        self._mine = 0  # numbers dealt to this worker
        self._dealt = 0  # and to all, when it asked last
        self._asked = self._ended = False

    def take(self) -> int | None:
        """Return the next number of this worker; None if there are no more."""
        if not self._hand and self._dealt < self._count:
            self._ask()
        if self._hand:
            run = self._hand.popleft()
            if len(run) > 1:
                self._hand.appendleft(run[1:])
            return run[0]
        self.end()
        return None

    def end(self) -> None:
        """Ask for no more; the last worker to do so forgets the turn."""
        if self._ended:
            return
        self._ended = True
        self._hand.clear()
        world = present_world()
        if self._world is None or self._world() is not world or world is None:
            return  # a world that has been closed since took its keys with it
        if world.control.add(self._key, _ENDED) // _ENDED == world.size:
            world.control.delete(self._key)
            world.control.delete(f"{self._key}/first")

    def _ask(self) -> None:
        world = None if self._world is None else self._world()
        if world is None:
            self._dealt_now(range(self._count), self._count)
            return
        wanted = self._wanted(world.size)
        total = world.control.add(self._key, wanted) % _ENDED
        if not self._asked:
            self._compare(world, first=total == wanted)
        self._asked = True
        last = min(total, self._count)
        self._dealt_now(range(min(total - wanted, last), last), last)

    def _dealt_now(self, numbers: range, dealt: int) -> None:
        if numbers:
            self._hand.append(numbers)
        self._mine += len(numbers)
        self._dealt = dealt

    def _wanted(self, workers: int) -> int:
        """How many to ask for: several far from the end, then one at a time.

        A slow worker that hoards makes everybody wait at the end. So it takes a small part of what
        it may expect to compute itself, judged by what it was dealt so far.
        """
        share = (self._mine + 1) / (self._dealt + workers)
        return max(1, min(MOST, int((self._count - self._dealt) * share / SHARES)))

    def _compare(self, world: World, first: bool) -> None:
        """Tell the others what is dealt here, or raise if it is something else."""
        mine, control = {**self._alike, "worker": world.rank}, world.control
        if first:
            control.set(f"{self._key}/first", json.dumps(mine).encode())
            return
        theirs = json.loads(control.get(f"{self._key}/first"))
        for what, value in self._alike.items():
            if theirs.get(what) != value:
                raise _disagreement(what, theirs, mine)


def _disagreement(
    what: str, theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> DisagreementError:
    error = DisagreementError(
        f"workers disagree about {what}: worker {theirs['worker']} has {theirs.get(what)}, worker "
        f"{mine['worker']} has {mine[what]}. Every worker must make the same Deal, over the same "
        "data, and iterate over it as often as the others"
    )
    # The others may be in the middle of a round, and learn of it by this worker's end.
    error.everywhere = False
    return error
