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
from functools import partial
from typing import Any

from greenlet import getcurrent

from offbeat.clusters import Cluster, draws
from offbeat.errors import WorkerLeft, WorkerLostError
from offbeat.records import Sink
from offbeat.worlds import base
from offbeat.worlds.base import World
from offbeat.worlds.checked import HOW_TO_SURVIVE, checked_members, too_few
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Task, Worker
from offbeat.worlds.virtual_channels import Places
from offbeat.worlds.virtual_store import InEpoch, Store

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
        city.members += (rank,)
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

    def codec_s(self, size_bytes: int) -> float:
        return size_bytes / self.city.cluster.network.codec_bytes_per_s

    def channel(self, name: str, members: tuple[int, ...] | None = None) -> base.Channel:
        return self.city.places.open(self.worker, name, checked_members(name, members, self))

    def control_in_epoch(self) -> base.Control:
        return InEpoch(self.city.store, self.worker) if self.survives else self.control

    @property
    def sent_bytes(self) -> float:
        return self.city.places.sent_bytes

    def condition(self, name: str) -> base.Condition:
        return _Condition(self._clock, name, self._overhead.wake_s)

    def spawn(self, name: str, run: Callable[[], None]) -> base.Activity:
        return _Activity(self._clock, self._clock.start(self.worker, name, run))

    def close(self) -> None:
        """Nothing to let go of; the clock sees to it that no activity outlives the run."""

    def fail(self, error: BaseException) -> None:
        """Tell the others, in case that the program catches the error and ends quietly."""
        if not self.worker.alive:  # it crashes, and its program unwinds
            return
        self._clock.end_at(self._clock.now, self._end_activities)
        if not isinstance(error, WorkerLostError):
            self.city.lose(self, f" ({type(error).__name__}: {error})")

    def lost(self, error: WorkerLostError) -> None:
        """Hear of a loss: this worker's epoch, or its run, is over."""
        if not self.survives:
            error = WorkerLostError(f"{error}. {HOW_TO_SURVIVE}", rank=error.rank)
            self._clock.interrupt(self.worker, error)
            return
        members = self.city.members
        if len(members) < self.min_workers:
            self.too_few = self.too_few or too_few(error, members, self.min_workers)
            if not self.regroups:
                self._clock.interrupt(self.worker, self.too_few)
                return
        if members != self.members:
            self.worker.epoch, self.worker.loss = self.city.epoch, (str(error), error.rank)
            self.loss = str(error)
            self._begin_epoch(self.city.epoch, members)
            self._break_off()

    def _break_off(self) -> None:
        """Make what this worker waits for raise, if it ends with an epoch; later waits do not."""
        for task in self.worker.tasks:
            parked = None if task.done else task.parked
            if parked is not None and getattr(parked.reason, "breaks", False):
                task.broken = self.worker.over()
                self._clock.wake(parked)

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
    members: tuple[int, ...] = ()
    """Of the newest epoch: who has not been lost. Workers hear of it one after another."""
    epoch: int = 0

    def crash(self, world: VirtualWorld) -> None:
        """End a worker where it stands."""
        if not world.worker.tasks[0].done:
            self.clock.kill(world.worker)
            self.lose(world, "")

    def lose(self, world: VirtualWorld, why: str) -> None:
        """Have every other worker learn, one control latency later, that this one is gone.

        Those who survive hear of it one after another, within another latency: so some know of a
        loss while the others still make a round with what the lost one gave.
        """
        moment, latency_s = self.clock.now, self.cluster.network.control_latency_s
        words = f"worker {world.rank} was lost at virtual time {moment:g} s{why}"
        if world.rank not in self.members:
            return
        self.members = tuple(rank for rank in self.members if rank != world.rank)
        self.epoch += 1

        def told(others: list[VirtualWorld]) -> None:
            for other in others:
                if other is not world and other.worker.alive:
                    other.lost(WorkerLostError(words, rank=world.rank))

        if not world.survives:
            self.clock.at(moment + latency_s, lambda: told(self.worlds))
            return
        for other in self.worlds:
            later = draws.uniform(draws.key(_SEED, other.rank), self.epoch)
            self.clock.at(moment + latency_s * (1 + later), partial(told, [other]))


_SEED = 7162843
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
