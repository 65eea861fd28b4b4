"""Virtual time: a heap of wake-ups, and greenlets that run until they block.

    clock = Clock()
    clock.start(Worker(0), "main", function)
    clock.run()

Every blocking verb of the virtual world ends in one of three calls: `sleep_until`, which puts this
task's own wake-up on the heap; `park`, after which somebody else must `wake` it; `visit`, which has
something done elsewhere, at a later moment, that wakes it or has it wait there. Time moves only
between tasks, to the next wake-up, so a run is a function of its inputs: equal moments are taken
in the order in which they were put on the heap.

Tasks share one thread, and torch keeps some state per thread. A task that is resumed finds its own
grad mode and autocast again, and a worker's main task its own random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from offbeat.errors import DeadlockError, WorldError
from offbeat.worlds.generators import Generators
from offbeat.worlds.modes import (
    any_autocast,
    grad_enabled,
    graph_task,
    put_back,
    put_by,
    set_grad_enabled,
)
from offbeat.worlds.tasks import Parked, Task, Visit, Worker


class Clock:
    """The event loop of one virtual run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended = 0.0  # when the last task so far did; later alarms ring for nobody
        self.events = 0
        self.current: Task | None = None
        self.held = 0
        """Conditions that the current task is inside of: it must not block there."""
        self._heap: list[tuple[float, int, Task | Callable[[], None]]] = []
        self._sequence = count()
        self._hub = getcurrent()
        self._workers: list[Worker] = []
        self._drawing: Worker | None = None
        self._failed: BaseException | None = None

    # --- what a task calls -----------------------------------------------------------------

    def sleep_until(self, moment: float) -> None:
        """Block the current task until `moment`."""
        if moment > self.now:
            task = self._current()
            heappush(self._heap, (moment, next(self._sequence), task))
            self._switch(task)

    def park(self, reason: object, until: float | None = None) -> Parked:
        """Register the current task as waiting; it blocks in `blocked`, until `wake`.

        `str(reason)` says in a deadlock what it waits for.
        """
        task = self._current()
        parked = task.parked = Parked(task, reason)
        if until is not None:
            self.at(until, lambda: self.wake(parked))
        return parked

    def visit(self, moment: float, visit: Visit) -> None:
        """Have `visit.there` called at `moment`, and block the current task until that, or what it
        sets off, has woken it; `moment` is later than now.

        On the way it can be ended, but not woken.
        """
        task = visit.task = self._current()

        def there() -> None:
            if not task.done:
                task.parked = visit
                if task.worker.failure is None and not visit.is_over():
                    visit.there()
                else:
                    self.wake(visit)

        heappush(self._heap, (moment, next(self._sequence), there))
        self._switch(task)

    def blocked(self, parked: Parked) -> None:
        """Block the current task on what it has parked on."""
        if parked.task.parked is parked:
            self._switch(parked.task)

    def wake(self, parked: Parked, delay_s: float = 0.0) -> None:
        """Resume a parked task in `delay_s`; nothing happens if it has been woken before."""
        task = parked.task
        if task.parked is parked:
            task.parked = None
            moment = max(self.now + delay_s, task.worker.thaws_s)
            heappush(self._heap, (moment, next(self._sequence), task))

    def wake_all(self, waiting: Iterable[Parked]) -> None:
        """Resume parked tasks now, in this order."""
        heap, now, sequence = self._heap, self.now, self._sequence
        for parked in waiting:
            task = parked.task
            if task.parked is parked:
                task.parked = None
                heappush(heap, (max(now, task.worker.thaws_s), next(sequence), task))

    def join(self, task: Task) -> None:
        """Block the current task until another one has ended."""
        if not task.done:
            parked = self.park(f"the end of {task.name}")
            task.joining.append(parked)
            self.blocked(parked)

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have something called at `moment`, which must not block, and ends no task."""
        heappush(self._heap, (max(moment, self.now), next(self._sequence), call))

    def end_at(self, moment: float, call: Callable[[], None]) -> None:
        """Have the loop itself call something, which must not block, and may end tasks."""
        self.at(moment, _ByLoop(call))

    def start(self, worker: Worker, name: str, run: Callable[[], Any], main: bool = False) -> Task:
        """Add a task, to begin now, after those that are due already."""
        task = Task(worker, name, main)
        task.greenlet = greenlet(lambda: self._live(task, run), parent=self._hub)
        if not worker.tasks:
            self._workers.append(worker)
        worker.tasks.append(task)
        heappush(self._heap, (max(self.now, worker.thaws_s), next(self._sequence), task))
        return task

    def freeze(self, worker: Worker, until: float, thaw: Callable[[], None]) -> None:
        """Have none of a worker's tasks go on before then; the loop calls `thaw` first."""
        worker.thaws_s = until
        self.end_at(until, thaw)
        for each in sorted(each for each in self._heap if _is_of(worker, each[2])):
            self._heap.remove(each)
            self._heap.append((max(each[0], until), next(self._sequence), each[2]))
        heapify(self._heap)

    def kill(self, worker: Worker) -> None:
        """End a worker where it stands, as SIGKILL does: no clean-up code of its own may block."""
        worker.alive = False
        for task in list(worker.tasks):
            self.end(task)

    def interrupt(self, worker: Worker, error: BaseException) -> None:
        """Make every wait of a worker, this one and later ones, raise `error`."""
        worker.failure = error
        for task in worker.tasks:
            if not task.done and task.parked is not None:
                self.wake(task.parked)

    # --- the loop --------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every task has ended; raise what one of them raised."""
        heap, outside, grad = self._heap, Generators.now(), grad_enabled()
        set_grad_enabled(True)
        try:
            while heap:
                self.now, _, due = heappop(heap)
                self.events += 1
                if due.__class__ is not Task:
                    due()  # type: ignore[operator]
                elif not due.done:
                    self.current = due
                    due.greenlet.switch()
                    self.current = None
                    if self._failed is not None:
                        raise self._failed
            if blocked := self._blocked():
                raise DeadlockError(self._deadlock(blocked))
        finally:
            self._stop()
            outside.put_back()
            set_grad_enabled(grad)

    def _live(self, task: Task, run: Callable[[], Any]) -> None:
        """The body of a task's greenlet."""
        try:
            if task.draws:
                self._draw_as(task.worker)
            run()
        except GreenletExit:
            pass
        except BaseException as error:
            error.add_note(f"in worker {task.worker.rank} at virtual time {self.now:g} s")
            self._failed = self._failed or error
        finally:
            task.done = True
            self.ended = self.now
            if not task.main:
                task.worker.tasks.remove(task)
            self.wake_all(task.joining)
            set_grad_enabled(True)

    def _switch(self, task: Task) -> None:
        """Give way to the next task; come back with this one's own thread-local torch state.

        Whoever gives way leaves the defaults behind, so only what differs is kept and put back.
        """
        if task.ending:  # its clean-up code
            raise GreenletExit
        if self.held:
            raise WorldError(f"{task.name} blocks while it holds a condition")
        modes = None
        if graph_task() != -1 or not grad_enabled() or any_autocast():
            modes = put_by()

        heap = self._heap
        due = heap[0][2] if heap else None
        if due.__class__ is not Task:
            due = self._make_calls()
        if due is task:
            self.now = heappop(heap)[0]
            self.events += 1
        elif due is not None and due.greenlet:
            # A task that has begun is next: go there at once, not by way of the loop.
            self.now = heappop(heap)[0]
            self.events += 1
            self.current = due
            due.greenlet.switch()
        else:
            self._hub.switch()

        if modes is not None:
            put_back(*modes)
        worker = task.worker
        if task.draws and self._drawing is not worker:
            self._draw_as(worker)
        if worker.failure is not None:
            raise worker.failure
        if task.broken is not None:
            broken, task.broken = task.broken, None
            raise broken

    def _make_calls(self) -> Any:
        """Make the calls that are due; return the task that is next, None if the loop must see."""
        heap = self._heap
        while heap:
            due = heap[0][2]
            if due.__class__ is Task:
                return due
            if due.__class__ is _ByLoop:
                return None
            self.now = heappop(heap)[0]
            self.events += 1
            try:
                due()  # type: ignore[operator]
            except BaseException as error:
                self._failed = self._failed or error
                return None
        return None

    def _draw_as(self, worker: Worker) -> None:
        """Have the global random generators hold what this worker's main program left in them."""
        mine, before = worker.generators, self._drawing
        assert mine is not None, "only tasks that draw come here"
        if before is None:
            mine.put_back()
        else:
            before.generators.take()  # type: ignore[union-attr]  # it has some, or did not draw
            mine.put_back(instead_of=before.generators)
        self._drawing = worker

    def _current(self) -> Task:
        task = self.current
        if task is None or task.greenlet is not getcurrent():
            raise WorldError("a verb of the virtual world was called from outside its workers")
        if task.worker.failure is not None:
            raise task.worker.failure
        return task

    def end(self, task: Task) -> None:
        """End another task where it stands; from the loop only."""
        if task.done:
            return
        if task is self.current:
            raise WorldError(f"{task.name} cannot end itself")
        self.current = task
        task.ending = True
        task.greenlet.throw(GreenletExit)
        self.current = None
        task.done = True

    def _stop(self) -> None:
        for worker in self._workers:
            for task in list(worker.tasks):
                self.end(task)

    def _blocked(self) -> list[Task]:
        return [
            task
            for worker in self._workers
            for task in worker.tasks
            if not task.done and worker.alive
        ]

    def _deadlock(self, blocked: list[Task]) -> str:
        shown = [
            f"  worker {task.worker.rank}, {task.name}: waits for "
            f"{task.parked.reason if task.parked else 'nothing'}"
            for task in blocked
        ]
        return (
            f"at virtual time {self.now:g} s nothing is left to wake, "
            f"and {len(blocked)} of the tasks are blocked:\n" + "\n".join(shown)
        )


def _is_of(worker: Worker, due: Task | Callable[[], None]) -> bool:
    return isinstance(due, Task) and due.worker is worker


class _ByLoop:
    """A call that the loop must make itself: a task that ends others would not be resumed."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def __call__(self) -> None:
        self.call()
