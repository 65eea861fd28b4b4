"""The virtual world's control plane: a dictionary at a store, one latency away from everybody.

A question is a *visit*: it travels for one latency, is answered there or waits for its key, and the
answer travels for another one. All workers of a run share one store. What a worker asks in an epoch
(`InEpoch`) is broken off when that ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

from offbeat.errors import EpochOver
from offbeat.worlds import base
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Visit, Worker

if TYPE_CHECKING:
    from offbeat.worlds.virtual_city import City


class Store(base.Control):
    """Values and counters by key."""

    def __init__(self, clock: Clock, latency_s: float) -> None:
        self.clock = clock
        self.latency_s = latency_s
        self.values: dict[str, bytes] = {}
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.waiting: defaultdict[str, list[tuple[Parked, _Question]]] = defaultdict(list)
        """Who waits for which key."""

    def set(self, key: str, value: bytes) -> None:
        if self.latency_s == 0.0:
            self._arrived(key, value)
        else:
            self.clock.at(self.clock.now + self.latency_s, lambda: self._arrived(key, value))

    def get(self, key: str) -> bytes:
        return self.ask(_Question(self, key))

    def ask(self, question: _Question) -> bytes:
        """Block until there is an answer."""
        clock, key = self.clock, question.key
        if self.latency_s:
            clock.visit(clock.now + self.latency_s, question)
        elif key in self.values:
            return self.values[key]
        else:
            parked = clock.park(question)
            self.waiting[key].append((parked, question))
            clock.blocked(parked)
        return question.answer

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        if self.latency_s:
            counting = _Counting(self, key, amount)
            self.clock.visit(self.clock.now + self.latency_s, counting)
            return counting.total
        self.counters[key] += amount
        return self.counters[key]

    def set_once(self, key: str, value: bytes) -> bytes:
        if self.latency_s:
            setting = _Setting(self, key, value)
            self.clock.visit(self.clock.now + self.latency_s, setting)
            return setting.stands
        return self.values.setdefault(key, value)

    def stands(self, key: str) -> bytes:
        return self.values.get(key, b"")

    def delete(self, key: str) -> None:
        self.values.pop(key, None)
        self.counters.pop(key, None)

    def _arrived(self, key: str, value: bytes) -> None:
        self.values[key] = value
        waiting = self.waiting.pop(key, None)
        if waiting is None:
            return

        def answer() -> None:
            for parked, question in waiting:
                question.answer = value
                self.clock.wake(parked, self.latency_s)

        if self.latency_s:  # the way back begins when all else has happened that is due now
            self.clock.at(self.clock.now, answer)
        else:
            answer()


class InEpoch(base.Control):
    """The same values as one worker sees them in one epoch: every verb raises when it is over."""

    def __init__(self, store: Store, worker: Worker) -> None:
        self._store = store
        self._worker = worker
        self._epoch = worker.epoch

    def set(self, key: str, value: bytes) -> None:
        self._check()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._check()
        value = self._store.ask(_QuestionInEpoch(self._store, key, self.is_over))
        self._check()
        return value

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        self._check()
        total = self._store.add(key, amount)
        self._check()
        return total

    def set_once(self, key: str, value: bytes) -> bytes:
        self._check()
        stands = self._store.set_once(key, value)
        self._check()
        return stands

    def delete(self, key: str) -> None:
        self._check()
        self._store.delete(key)

    def is_over(self) -> bool:
        """Whether its epoch has ended."""
        return self._worker.epoch != self._epoch

    def _check(self) -> None:
        if self.is_over():
            raise self._worker.over()


class InCity(InEpoch):
    """The same for a worker that is not a member yet, of an epoch that others are in."""

    def __init__(self, city: City, epoch: int) -> None:
        self._city = city
        self._epoch = epoch
        self._store = city.store

    def is_over(self) -> bool:
        return self._city.epoch != self._epoch

    def _check(self) -> None:
        if self.is_over():
            raise EpochOver("the members have changed")


class _Question(Visit):
    """Asks for a value: gets it, or waits for it at the store."""

    __slots__ = ("_store", "answer", "key")

    answer: bytes

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self.key = key

    def there(self) -> None:
        store, key = self._store, self.key
        if key in store.values:
            self.answer = store.values[key]
            store.clock.wake(self, store.latency_s)
        else:
            store.waiting[key].append((self, self))

    def __str__(self) -> str:
        return f"control key {self.key!r}"


class _QuestionInEpoch(_Question):
    """The same, which does not wait when its epoch is over."""

    __slots__ = ("is_over",)

    def __init__(self, store: Store, key: str, is_over: Callable[[], bool]) -> None:
        super().__init__(store, key)
        self.answer = b""  # to who does not wait for it
        self.is_over = is_over  # type: ignore[method-assign]


class _Counting(Visit):
    """Adds to a counter."""

    __slots__ = ("_store", "amount", "key", "total")

    total: int

    def __init__(self, store: Store, key: str, amount: int) -> None:
        self._store = store
        self.key = key
        self.amount = amount

    def there(self) -> None:
        store = self._store
        store.counters[self.key] = self.total = store.counters[self.key] + self.amount
        store.clock.wake(self, store.latency_s)

    def __str__(self) -> str:
        return self.key


class _Setting(Visit):
    """Sets a value that nobody has set."""

    __slots__ = ("_store", "_value", "key", "stands")

    stands: bytes

    def __init__(self, store: Store, key: str, value: bytes) -> None:
        self._store = store
        self.key = key
        self._value = value

    def there(self) -> None:
        self.stands = self._store.values.setdefault(self.key, self._value)
        self._store.clock.wake(self, self._store.latency_s)

    def __str__(self) -> str:
        return self.key
