"""Waiting for what cannot be interrupted: in a thread that may be left behind.

A collective of which a member is gone ends with an error, as a rule, when its connections are cut;
but not always, and a member that is frozen does not even break it. So where a loss is survived, it
is a thread of its own that waits in there, and whoever wants the result waits for that thread, or
for the end of the epoch. A thread that was left behind ends whenever its call does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Waiters:
    """Threads that wait; one for each wait at a time, used again."""

    def __init__(self) -> None:
        self._idle: list[_Waiter] = []
        self._busy: set[_Waiter] = set()

    def wait(self, call: Callable[[], None], is_over: Callable[[], bool]) -> bool:
        """Block until the call has returned, and raise what it raised; False if it was left."""
        try:
            waiter = self._idle.pop()
        except IndexError:  # any thread may call this
            waiter = _Waiter()
        self._busy.add(waiter)
        waiter.begin(call)
        with waiter.changed:
            while not waiter.done and not is_over():
                waiter.changed.wait()
            done = waiter.done
        self._busy.discard(waiter)
        if not done:
            waiter.begin(None)  # when it is through
            return False
        error, waiter.error = waiter.error, None
        self._idle.append(waiter)
        if error is not None:
            raise error
        return True

    def look(self) -> None:
        """Have everybody see whether it is over."""
        for waiter in list(self._busy):
            with waiter.changed:
                waiter.changed.notify_all()

    def close(self) -> None:
        """End those that nobody needs."""
        while self._idle:
            self._idle.pop().begin(None)


class _Waiter(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="offbeat-waiter", daemon=True)
        self.changed = threading.Condition()
        self.done = False
        self.error: BaseException | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def begin(self, call: Callable[[], None] | None) -> None:
        """Make this call next; None ends the thread."""
        if call is not None:
            self.done = False
        self._calls.put(call)

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                error.__traceback__ = None  # its frames hold the group, and its connections
                self.error = error
            del call
            with self.changed:
                self.done = True
                self.changed.notify_all()
