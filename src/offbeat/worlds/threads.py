"""What the worlds of real time share: the monotonic clock, threads, conditions, pacing.

A thread that joins a collective while the main thread computes in pure Python waits for the
interpreter's switch interval, 5 ms by default. While a world with threads is open the interval is
0.1 ms, and it is put back afterwards.

A thread whose activity has ended waits for the next one: an activity may be as short as one
question to the store, and each thread has a connection of its own there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from offbeat.clusters import Cluster
from offbeat.errors import ClosedError, WorkerLostError, WorldError
from offbeat.worlds import base
from offbeat.worlds.base import World
from offbeat.worlds.scripted import Scripted

SWITCH_INTERVAL_S = 1e-4
_LET_GO_S = 10.0
_LOOK_S = 0.1


def within(limit_s: float, ended: Callable[[float], bool]) -> bool:
    """Wait for so long, look by look, of this process's own time; say whether it has ended.

    A process that was stopped finds that hours have passed, in which nobody else got to say a word.
    """
    return any(ended(_LOOK_S) for _ in range(max(1, round(limit_s / _LOOK_S))))


def comes_true(limit_s: float, is_so: Callable[[], bool], every_s: float = 1e-3) -> bool:
    """Ask until it is so, for this long at most: for what gives no sign. Say whether it is."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


class ThreadedWorld(World):
    """A world whose clock is the machine's and whose activities are threads."""

    def __init__(self, rank: int, size: int, cluster: Cluster | None, seed: int) -> None:
        if cluster is not None and cluster.workers != size:
            raise ValueError(
                f"the cluster {cluster.name!r} to pace by has {cluster.workers} workers, "
                f"this run has {size}: start as many processes, or resize the cluster file"
            )
        super().__init__(rank, size, cluster, seed)
        self._began = time.monotonic()
        self._failure: BaseException | None = None
        self._closed = False
        self._conditions: list[_Condition] = []
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []
        self._switch_interval_s = sys.getswitchinterval()
        self._scripted = Scripted(cluster, rank)

    def now(self) -> float:
        return time.monotonic() - self._began

    def sleep_until(self, moment: float) -> None:
        self.check()  # a worker that need not wait for anybody learns of a loss here
        while (rest_s := moment - self.now()) > 0:
            time.sleep(min(rest_s, 0.25))
            self.check()

    def condition(self, name: str) -> base.Condition:
        condition = _Condition(self)
        self._conditions.append(condition)
        return condition

    def spawn(self, name: str, run: Callable[[], None]) -> base.Activity:
        self.check()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        activity = _Activity(self, name, run)
        try:
            self._idle.pop().begin(activity)
        except IndexError:  # any thread may call this
            self._threads.append(_Thread(self._idle, activity))
        return activity

    def check(self) -> None:
        """Raise if this world has failed or is closed: every verb begins and ends with it."""
        if self._failure is not None:
            # Every thread raises the same one, and would add its own frames to the others'.
            lost = isinstance(self._failure, WorkerLostError)
            raise self._failure.with_traceback(None) if lost else self._failure
        if self._closed:
            raise ClosedError(f"worker {self.rank}: this world has been closed; attach again")

    def close(self) -> None:
        self._closed = True
        self._let_go()

    def fail(self, error: BaseException) -> None:
        self.failed(error)
        self._closed = True
        self._let_go()

    def failed(self, error: BaseException) -> None:
        """Note the first failure, and wake whoever waits so that it sees it."""
        if self._failure is None:
            self._failure = error
        self._interrupt()

    def _interrupt(self) -> None:
        """Have all who wait look again."""
        for condition in list(self._conditions):
            condition.interrupt()

    def _let_go(self) -> None:
        self._scripted.cancel()
        for thread in self._threads:
            thread.begin(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                within(_LET_GO_S, thread.ended)
        sys.setswitchinterval(self._switch_interval_s)
        if leaked := [thread.name for thread in self._threads if thread.is_alive()]:
            raise WorldError(f"worker {self.rank}: did not end with their world: {leaked}")


class _Activity:
    def __init__(self, world: ThreadedWorld, name: str, run: Callable[[], None]) -> None:
        self.name = f"offbeat-{name}"
        self._world = world
        self._run = run
        self._ended = threading.Event()

    def join(self) -> None:
        self._ended.wait()
        if self._world._failure is not None:
            raise self._world._failure

    def live(self) -> None:
        try:
            self._run()
        except BaseException as error:
            # One that finds its world closed has ended with it: that is no failure.
            if not (self._world._closed and isinstance(error, ClosedError)):
                self._world.failed(error)
        finally:
            self._ended.set()


class _Thread(threading.Thread):
    """Serves one activity after the other; `idle` is where it is found meanwhile."""

    def __init__(self, idle: list[_Thread], activity: _Activity) -> None:
        # A daemon, so that a script which never closes its world can still exit: see current.py.
        super().__init__(daemon=True)
        self._its_idle = idle
        self._next: SimpleQueue[_Activity | None] = SimpleQueue()
        self.begin(activity)
        self.start()

    def begin(self, activity: _Activity | None) -> None:
        """Serve this when it has ended what it serves now; None ends the thread."""
        self._next.put(activity)

    def ended(self, limit_s: float) -> bool:
        """Wait for so long; say whether it has."""
        self.join(limit_s)
        return not self.is_alive()

    def run(self) -> None:
        while (activity := self._next.get()) is not None:
            self.name = activity.name
            activity.live()
            del activity  # which knows what it was for
            self._its_idle.append(self)


class _Condition(base.Condition):
    def __init__(self, world: ThreadedWorld) -> None:
        self._world = world
        self._condition = threading.Condition()

    def __enter__(self) -> base.Condition:
        self._condition.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self._condition.release()

    def wait_for(self, predicate: Callable[[], bool], until: float | None = None) -> bool:
        self._world.check()
        while not predicate():
            rest_s = None if until is None else until - self._world.now()
            if rest_s is not None and rest_s <= 0:
                return False
            self._condition.wait(rest_s)
            self._world.check()
        return True

    def notify_all(self) -> None:
        self._condition.notify_all()

    def interrupt(self) -> None:
        with self._condition:
            self._condition.notify_all()
