"""Who gets which batch: numbers from one counter that all workers share (counter.py).

Far from the end of the epoch a worker asks for several numbers at a time, and for the next ones
while it still has some, in the background: so its loop does not wait for the store. But a slow
worker that hoards makes everybody wait in the end. So all this goes by what the worker may still
expect to compute itself, judged by what it was dealt so far; in the end it asks for one number at a
time, when it needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

from offbeat.data import runs
from offbeat.data.again import Answer, Share, dealing
from offbeat.data.counter import Counter
from offbeat.errors import ClosedError, EpochOver
from offbeat.worlds import Activity, Control, World
from offbeat.worlds.current import present_world

_MOST = 8  # numbers that a worker asks for at a time
_OF_A_SHARE = 16  # it asks for this part of what it expects to compute, or for
_OF_COMPUTED = 2  # this part of what it has computed, and so knows how fast it is
_RESERVE = 4  # but it expects at least so many times what it holds
_APART_S = 1e-9  # between workers that ask at the same moment


class Tickets:
    """One worker's part of one turn."""

    def __init__(
        self,
        world: World | None,
        key: str,
        count: int,
        alike: Mapping[str, Any],
        rest: list[range],
    ) -> None:
        """Deal the `rest` of the numbers below `count`: all, if none was dealt before."""
        # By reference: who deals is known to its world, which must be able to go.
        self._world: ref[World] | None = None
        if world is not None and world.size > 1:
            self._world, world.deals = ref(world), True
            self._counter = Counter(key, world.rank, len(world.members), alike)
        self._key = key
        self._count = count
        self._rest = rest
        self.share: Share | None = None
        """What is left, where losses are survived."""
        self._version = 0
        self.hand: deque[range] = deque()
        """Dealt to this worker, and not taken."""
        self.mine = 0
        """How many were dealt to this worker so far."""
        self.dealt = count - runs.length(rest)
        """And to all, when this one asked last."""
        self._asking: Activity | None = None
        self._answer = Answer([], 0, count)
        self._ended = False

    def take(self, ahead: int = 0) -> int | None:
        """Return the next number of this worker; None if there are no more.

        `ahead` have been taken that the program has not come to yet.
        """
        while not self.hand:
            self.settle()
            self._renew()
            if not self.hand and self.dealt < self._count:
                self._merge(self._ask(ahead))
            if not self.hand and self._is_over():
                self.end()
                return None
        run = self.hand.popleft()
        if len(run) > 1:
            self.hand.appendleft(run[1:])
        if len(self.hand) < 2 and self._asking is None and self._ample(ahead + 1):
            self._ask_ahead(ahead + 1 + runs.length(self.hand))
        return run[0]

    def can_wait(self, ahead: int) -> bool:
        """Whether this worker had better not ask for more while it has `ahead` to compute."""
        alone = self._world is None
        return bool(ahead) and not (alone or self.hand or self._asking or self._ample(ahead))

    def settle(self) -> None:
        """Have in hand what was asked for."""
        if self._asking is not None:
            asking, self._asking = self._asking, None
            asking.join()
            self._merge(self._answer)

    def end(self) -> None:
        """Ask for no more; the last worker to do so forgets the turn."""
        if self._ended:
            return
        self._ended = True
        world = present_world()
        if self._world is None or self._world() is not world or world is None:
            return  # a world that has been closed since took its keys with it
        self.settle()
        with suppress(EpochOver):
            self._counter.end(world.control)

    @property
    def exhausted(self) -> bool:
        """Whether all numbers are known to have been dealt."""
        return self.dealt >= self._count

    # --- asking ----------------------------------------------------------------------------

    def _ask(self, held: int) -> Answer:
        """Return what this worker is dealt, who holds so many, and how many all have been dealt."""
        world = None if self._world is None else self._world()
        if world is None:
            return Answer(self._rest, self._count, self._count)
        wanted = self._wanted(len(world.members), held)
        # In virtual time many may ask at the very same moment. Served by rank, and not by chance of
        # what was before, a run that is resumed goes on as if it had not been interrupted.
        world.sleep_until(world.now() + _APART_S * world.rank)
        if self.share is None:
            total = self._counter.add(world.control, wanted)
            return _dealt(self._rest, self._count, total, wanted)
        return dealing(world).ask(
            self.share,
            lambda control, share: self._add(control, share, len(world.members), wanted),
        )

    def _add(self, control: Control, share: Share, size: int, wanted: int) -> Answer:
        """Ask for more of a turn in which workers may be lost: each time with a new counter."""
        version, rest, count = share.version, share.rest, share.total
        counter = self._counter.at(version, size)
        total = counter.add(control, wanted)
        self._counter = counter
        return _dealt(rest, count, total, wanted)._replace(version=version)

    def _ask_ahead(self, held: int) -> None:
        def ask() -> None:
            try:
                self._answer = self._ask(held)
            except ClosedError:  # the program has left meanwhile
                self._answer = Answer([], self.dealt, self._count, self._version)

        world = None if self._world is None else self._world()
        if world is not None:
            self._asking = world.spawn("asks for batches ahead", ask)

    def _wanted(self, workers: int, held: int) -> int:
        """How many to ask for: few as long as this worker may be slower than it seems."""
        expected, computed = self._expected(workers), self.mine - held
        most = min(_MOST, max(expected / _OF_A_SHARE, computed / _OF_COMPUTED))
        return max(1, int(min(most, expected / _RESERVE - held)))

    def _merge(self, answer: Answer) -> None:
        self.hand.extend(answer.numbers)
        self.mine += runs.length(answer.numbers)
        self.dealt, self._count, self._version = answer.dealt, answer.total, answer.version

    def _renew(self) -> None:
        """Workers may have been lost since this one asked last: then there may be more."""
        world = None if self._world is None else self._world()
        if world is None or self.share is None:
            return
        if (answer := dealing(world).renewed(self.share, self._version)) is not None:
            self._merge(answer)

    def _is_over(self) -> bool:
        """Whether there are no more, for good."""
        world = None if self._world is None else self._world()
        if world is None or self.share is None:
            return True
        return dealing(world).ends(self.share, self._version)

    def _ample(self, held: int) -> bool:
        """Whether this worker will come to what it holds long before the end."""
        world = None if self._world is None else self._world()
        held += runs.length(self.hand)
        return world is not None and self._expected(len(world.members)) >= _RESERVE * held

    def _expected(self, workers: int) -> float:
        """How many more this worker will compute, at its speed so far."""
        return (self._count - self.dealt) * (self.mine + 1) / (self.dealt + workers)


def _dealt(rest: list[range], count: int, total: int, wanted: int) -> Answer:
    """What belongs to who has added `wanted`, and has seen that it was `total` then."""
    before = count - runs.length(rest)
    return Answer(runs.part(rest, total - wanted, total), min(before + total, count), count)
