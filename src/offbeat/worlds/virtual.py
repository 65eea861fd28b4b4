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

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from greenlet import getcurrent

from offbeat.clusters import Cluster, draws
from offbeat.errors import NobodyToJoinError, WorkerLeft, WorkerLostError
from offbeat.records import Sink
from offbeat.worlds import base
from offbeat.worlds.base import World
from offbeat.worlds.checked import HOW_TO_SURVIVE, checked_members, too_few
from offbeat.worlds.clock import Clock
from offbeat.worlds.entrance import check_alike
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
    store = Store(clock, cluster.network.control_latency_s)
    places = Places(clock, cluster.network, cluster.overhead.exchange_s)
    city = _City(clock, cluster, places, store)
    results: list[Any] = [None] * cluster.workers
    city.members = tuple(rank for rank in range(cluster.workers) if not cluster.join_at(rank))
    for rank in range(cluster.workers):
        worker = Worker(rank, seed * 1_000_003 + rank if own_random_state else None)
        world = VirtualWorld(city, worker, cluster, seed)
        world.records = records

        def main(rank: int = rank, world: VirtualWorld = world) -> None:
            with suppress(WorkerLeft, NobodyToJoinError):
                results[rank] = function()
            for thing in list(world.open):
                thing.close()

        start: Any = partial(clock.start, worker, "main", main, main=True)
        begin = partial(clock.at, cluster.join_at(rank) or 0.0, start) if world.joins else start
        begin()
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

    scripts_joins = True

    def __init__(self, city: _City, worker: Worker, cluster: Cluster, seed: int) -> None:
        super().__init__(worker.rank, cluster.workers, cluster, seed)
        self.worker = worker
        self.city = city
        self.control = self._store = city.store
        self.members = city.members
        if worker.rank not in city.members:  # alone, until it joins
            self.joins, self.epoch, self.members = True, -1, (worker.rank,)
            worker.epoch = -1
            self.control = self._store = Store(city.clock, 0.0)
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
        return InEpoch(self._store, self.worker) if self.survives else self.control

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
        if not isinstance(error, WorkerLostError) or isinstance(error, NobodyToJoinError):
            self.city.lose(self, f" ({type(error).__name__}: {error})")

    def let_in(self, attached: dict[str, Any]) -> None:
        self.city.store.set(f"entrance/{self.rank}", json.dumps(attached).encode())

    def join(self, attached: dict[str, Any]) -> None:
        for rank in self.city.members:
            theirs = json.loads(self.city.store.get(f"entrance/{rank}"))
            check_alike(self.rank, theirs, json.loads(json.dumps(attached)))
        self.city.join(self)
        self.let_in(attached)

    def enter(self, words: str) -> None:
        """Be a member."""
        self.joins, self.control, self._store = False, self.city.store, self.city.store
        self._change(words, self.rank)

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
        if self.epoch != self.city.epoch:
            self._change(str(error), error.rank)

    def _change(self, words: str, rank: int | None) -> None:
        """The members have."""
        self.worker.epoch, self.worker.loss = self.city.epoch, (words, rank)
        self.loss = words
        self._begin_epoch(self.city.epoch, self.city.members)
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
        words = f"worker {world.rank} was lost at virtual time {self.clock.now:g} s{why}"
        if world.rank not in self.members:
            return
        self.members = tuple(rank for rank in self.members if rank != world.rank)
        self._tell(world, words)

    def join(self, world: VirtualWorld) -> None:
        """Have a worker among the members, if they are all there to hear of it."""
        if not all(self.worlds[rank].open for rank in self.members):
            raise NobodyToJoinError(f"worker {world.rank} comes too late: the others have ended")
        self.members = tuple(sorted({*self.members, world.rank}))
        words = f"worker {world.rank} has joined"
        self._tell(world, words)
        world.enter(words)

    def _tell(self, world: VirtualWorld, words: str) -> None:
        """The members are others: have the others hear why."""
        moment, latency_s = self.clock.now, self.cluster.network.control_latency_s
        self.epoch += 1

        def told(others: list[VirtualWorld]) -> None:
            for other in others:
                if other is not world and other.worker.alive and not other.joins:
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
