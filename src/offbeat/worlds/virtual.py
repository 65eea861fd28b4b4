"""The virtual world: a whole cluster in one process, in virtual time.

    results = offbeat.run(train, cluster="two-slow-of-eight", seed=0)

runs `train()` once per worker, each a greenlet. Compute costs what the cluster file says, messages
cost what its network says, and everything else what its overhead says: nothing, by default. A run
is deterministic: the same function, cluster and seed give the same bits.

The cost model, in `offbeat.clusters`: an all-reduce begins when its last member has joined and the
previous one on that channel has ended; it takes the time of a ring or of recursive doubling over
the slowest link. A control value takes one latency to the store, and one back. Transfers do not
compete for a link, unless the file says so. Overhead is charged by the verbs: `step_s` with
compute, `exchange_s` with every collective and letter, `wake_s` where a condition has somebody go
on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent

from offbeat.clusters import Cluster, draws
from offbeat.errors import WorkerLeft, WorkerLostError
from offbeat.records import Sink
from offbeat.worlds import base
from offbeat.worlds.base import World, checked_members
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Task, Worker
from offbeat.worlds.virtual_channels import Places
from offbeat.worlds.virtual_store import Store

_OVERHEAD_STREAM = -2


@dataclass
class Run:
    """What came out of a virtual run."""

    results: list[Any]
    """What each worker's function returned, by rank; None for one that crashed."""
    seconds: float
    """Virtual seconds until the last worker had ended."""
    events: int
    """Wake-ups that the clock has served."""


def run(
    function: Callable[[], Any],
    cluster: Cluster | str,
    *,
    workers: int | None = None,
    seed: int = 0,
    own_random_state: bool = True,
    records: Sink | None = None,
) -> Run:
    """Run `function` on every worker of a virtual cluster, and return what they returned.

    `workers` resizes the cluster. `own_random_state=False` leaves out the generators of torch,
    Python and NumPy that each worker otherwise has to itself (some 4 microseconds a switch).
    `records` is called with a line for everything that happens: see `offbeat.records`.
    An exception in one worker ends the run and is raised here, with a note of its rank and time.
    """
    cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    if workers is not None:
        cluster = cluster.resized(workers)
    clock = Clock()
    network = cluster.network
    store = Store(clock, network.control_latency_s)
    places = Places(clock, network, cluster.overhead.exchange_s)
    city = _City(clock, cluster, places, store)
    results: list[Any] = [None] * cluster.workers
    for rank in range(cluster.workers):
        worker = Worker(rank, seed * 1_000_003 + rank if own_random_state else None)
        world = VirtualWorld(city, worker, cluster, seed)
        world.records = records

        def main(rank: int = rank, world: VirtualWorld = world) -> None:
            with suppress(WorkerLeft):
                results[rank] = function()
            for thing in list(world.open):
                thing.close()

        clock.start(worker, "main", main, main=True)
        city.worlds.append(world)
        if (moment := cluster.crash_at(rank)) is not None:
            clock.end_at(moment, lambda world=world: city.crash(world))  # type: ignore[misc]
    _CITIES.append(city)
    try:
        clock.run()
    finally:
        _CITIES.pop()
    return Run(results, clock.ended, clock.events)


def current_virtual_world() -> VirtualWorld | None:
    """Return the world of the virtual worker that calls this, or None outside a virtual run."""
    if not _CITIES:
        return None
    city = _CITIES[-1]
    task = city.clock.current
    if (
        task is None or task.greenlet is not getcurrent()
    ):  # another thread, or a greenlet of its own
        return None
    return city.worlds[task.worker.rank]


class VirtualWorld(World):
    """One worker's view of the virtual cluster."""

    def __init__(self, city: _City, worker: Worker, cluster: Cluster, seed: int) -> None:
        super().__init__(worker.rank, cluster.workers, cluster, seed)
        self.worker = worker
        self.city = city
        self.control = city.store
        self._clock = city.clock
        self._overhead = cluster.overhead
        self._key = draws.key(seed, worker.rank, _OVERHEAD_STREAM)

    def now(self) -> float:
        return self._clock.now

    def sleep_until(self, moment: float) -> None:
        self._clock.sleep_until(moment)

    def compute_s(self, step: int, samples: float, since: float) -> float:
        device_s = super().compute_s(step, samples, since)
        return device_s + self._overhead.of_step_s(self._key, step)

    def channel(self, name: str, members: tuple[int, ...] | None = None) -> base.Channel:
        return self.city.places.open(self.rank, name, checked_members(name, members, self))

    def condition(self, name: str) -> base.Condition:
        return _Condition(self._clock, name, self._overhead.wake_s)

    def spawn(self, name: str, run: Callable[[], None]) -> base.Activity:
        return _Activity(self._clock, self._clock.start(self.worker, name, run))

    def close(self) -> None:
        """Nothing to let go of; the clock sees to it that no activity outlives the run."""

    def fail(self, error: BaseException) -> None:
        """Tell the others, in case that the program catches the error and ends quietly."""
        self._clock.end_at(self._clock.now, self._end_activities)
        if not isinstance(error, WorkerLostError):
            self.city.lose(self, f" ({type(error).__name__}: {error})")

    def _end_activities(self) -> None:
        for task in list(self.worker.tasks):
            if not task.main:
                self._clock.end(task)


@dataclass
class _City:
    """What the workers of one virtual run share."""

    clock: Clock
    cluster: Cluster
    places: Places
    store: Store
    worlds: list[VirtualWorld] = field(default_factory=list)

    def crash(self, world: VirtualWorld) -> None:
        """End a worker where it stands."""
        if not world.worker.tasks[0].done:
            self.clock.kill(world.worker)
            self.lose(world, "")

    def lose(self, world: VirtualWorld, why: str) -> None:
        """Have every other worker learn, one control latency later, that this one is gone."""
        moment = self.clock.now

        def told() -> None:
            for other in self.worlds:
                if other is not world and other.worker.alive:
                    lost = WorkerLostError(
                        f"worker {world.rank} was lost at virtual time {moment:g} s{why}",
                        rank=world.rank,
                    )
                    self.clock.interrupt(other.worker, lost)

        self.clock.at(moment + self.cluster.network.control_latency_s, told)


_CITIES: list[_City] = []


class _Activity:
    def __init__(self, clock: Clock, task: Task) -> None:
        self._clock = clock
        self._task = task

    def join(self) -> None:
        self._clock.join(self._task)


class _Condition(base.Condition):
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
