"""What the tasks of one virtual worker wait for: each other, and what they share."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.worlds import base
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Task


class Activity:
    """A background of a virtual worker."""

    def __init__(self, clock: Clock, task: Task) -> None:
        self._clock = clock
        self._task = task

    def join(self) -> None:
        self._clock.join(self._task)


class Condition(base.Condition):
    """Tasks do not interrupt each other, so holding it only forbids to block.

    Whoever lets go of it looks at the predicates of those who wait, so that none of them is woken
    to find that it must wait on.
    """

    def __init__(self, clock: Clock, name: str, wake_s: float) -> None:
        self._clock = clock
        self._name = name
        self._wake_s = wake_s
        self._waiting: list[tuple[Parked, Callable[[], bool]]] = []
        self._notified = False

    def __enter__(self) -> base.Condition:
        self._clock.held += 1
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._clock.held -= 1
        if self._notified:
            self._look()

    def wait_for(self, predicate: Callable[[], bool], until: float | None = None) -> bool:
        clock = self._clock
        while not predicate():
            if until is not None and clock.now >= until:
                return False
            parked = clock.park(self._name, until)
            self._waiting.append((parked, predicate))
            clock.held -= 1
            if self._notified:
                self._look()
            try:
                clock.blocked(parked)
            finally:
                clock.held += 1
                if until is not None:  # nobody may ever notify those whose time is up
                    self._waiting = [each for each in self._waiting if each[0].waits]
        return True

    def notify_all(self) -> None:
        self._notified = True

    def _look(self) -> None:
        self._notified = False
        waiting, self._waiting = self._waiting, []
        for parked, predicate in waiting:
            if predicate():
                self._clock.wake(parked, self._wake_s)
            elif parked.waits:
                self._waiting.append((parked, predicate))
