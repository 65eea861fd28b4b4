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
from dataclasses import dataclass
from functools import partial
from typing import Any

from greenlet import getcurrent

from offbeat.clusters import Cluster, draws
from offbeat.errors import EpochOver, NobodyToJoinError, WorkerLeft, WorkerLostError
from offbeat.records import Sink
from offbeat.worlds import base
from offbeat.worlds.base import World
from offbeat.worlds.checked import checked_members, fatal, is_of_script, too_few
from offbeat.worlds.clock import Clock
from offbeat.worlds.entrance import check_all_alike
from offbeat.worlds.membership import THROUGH, Among
from offbeat.worlds.tasks import Worker
from offbeat.worlds.virtual_channels import Places
from offbeat.worlds.virtual_city import City
from offbeat.worlds.virtual_store import InCity, InEpoch, Store
from offbeat.worlds.virtual_waits import Activity, Condition

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
    city = City(clock, cluster, places, store)
    results: list[Any] = [None] * cluster.workers
    city.members = tuple(rank for rank in range(cluster.workers) if not cluster.join_at(rank))
    for rank in range(cluster.workers):
        worker = Worker(rank, seed * 1_000_003 + rank if own_random_state else None)
        world = VirtualWorld(city, worker, cluster, seed)
        world.records = records

        def main(rank: int = rank) -> None:
            with suppress(WorkerLeft, NobodyToJoinError):
                results[rank] = function()
            for thing in list(city.worlds[rank].open):
                thing.close()
            city.look_again()

        start: Any = partial(clock.start, worker, "main", main, main=True)
        begin = partial(clock.at, cluster.join_at(rank) or 0.0, start) if world.joins else start
        begin()
        city.worlds.append(world)
        if (moment := cluster.crash_at(rank)) is not None:
            clock.end_at(moment, partial(city.crash, rank))
        for at_s, for_s in cluster.freezes(rank):
            clock.at(at_s, partial(city.freeze, rank, for_s))
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

    def __init__(self, city: City, worker: Worker, cluster: Cluster, seed: int) -> None:
        super().__init__(worker.rank, cluster.workers, cluster, seed)
        self.worker = worker
        self.city = city
        self.control = self._store = city.store
        self.among = Among(self.epoch, city.members)
        if worker.rank not in city.members:  # alone, until it joins
            self.joins, self.among = True, Among(-1, (worker.rank,))
            worker.epoch = -1
            self.control = self._store = Store(city.clock, 0.0)
        self._clock = city.clock
        self._overhead = cluster.overhead
        self._key = draws.key(seed, worker.rank, _OVERHEAD_STREAM)
        self._seed = seed

    def now(self) -> float:
        return self._clock.now

    def sleep_until(self, moment: float) -> None:
        self._clock.sleep_until(moment)

    def compute_s(self, step: int, samples: float, since: float) -> float:
        device_s = super().compute_s(step, samples, since)
        return device_s + self._overhead.of_step_s(self._key, step)

    def codec_s(self, size_bytes: int) -> float:
        return size_bytes / self.city.cluster.network.codec_bytes_per_s

    def channel(
        self, name: str, members: tuple[int, ...] | None = None, epoch: int | None = None
    ) -> base.Channel:
        if epoch is not None and epoch != self.epoch:
            raise self.worker.over()
        members = checked_members(name, members, self.rank, self.members)
        return self.city.places.open(self.worker, name, members)

    def control_in_epoch(self) -> base.Control:
        return InEpoch(self._store, self.worker) if self.survives else self.control

    @property
    def sent_bytes(self) -> float:
        return self.city.places.sent_bytes

    def condition(self, name: str) -> base.Condition:
        return Condition(self._clock, name, self._overhead.wake_s)

    def spawn(self, name: str, run: Callable[[], None]) -> base.Activity:
        return Activity(self._clock, self._clock.start(self.worker, name, run))

    def close(self) -> None:
        """Nothing to let go of; the clock sees to it that no activity outlives the run."""

    def fail(self, error: BaseException) -> None:
        """Tell the others, in case that the program catches the error and ends quietly."""
        if not self.worker.alive:  # it crashes, and its program unwinds
            return
        self._clock.end_at(self._clock.now, self._end_activities)
        self.regroups.clear()  # nothing here goes on among the others
        self.dealing = None
        if not isinstance(error, WorkerLostError) or isinstance(error, NobodyToJoinError):
            self.city.lose(self, f" ({type(error).__name__}: {error})", is_of_script(error))

    def let_in(self) -> None:
        self.city.store.set(f"entrance/{self.rank}", json.dumps(self.attached).encode())

    def through(self, what: str, epoch: int) -> None:
        self.city.store.set(f"through/{what}/{self.rank}/{epoch}", b"1")

    def others_attached(self) -> int:
        return min(map(len, self._attached_by_others()))

    def join(self) -> None:
        city = self.city
        while self.joins:
            for theirs in self._attached_by_others():
                check_all_alike(self.rank, theirs, self.attached)
            store, members = InCity(city, city.epoch), city.members
            with suppress(EpochOver):  # the members have changed, or one of them has ended
                for rank in members if city.epoch else ():
                    for what in THROUGH:
                        store.wait(f"through/{what}/{rank}/{city.epoch}")
                city.join(self)
        self.let_in()

    def _attached_by_others(self) -> list[list[Any]]:
        """Wait until all members have said what they have attached; that."""
        while True:
            self.city.check_open(self)
            store = InCity(self.city, self.city.epoch)
            with suppress(EpochOver):
                return [json.loads(store.get(f"entrance/{each}")) for each in self.city.members]

    def again(self) -> VirtualWorld:
        worker, city = self.worker, self.city
        worker.failure, worker.expelled, worker.tasks[0].broken = None, False, None
        again = city.worlds[self.rank] = VirtualWorld(city, worker, city.cluster, self._seed)
        again.returns = True
        again.survives, again.min_workers = self.survives, self.min_workers
        again.expect_answers(self.freeze)
        return again

    def enter(self, words: str) -> None:
        """Be a member."""
        self.joins, self.control, self._store = False, self.city.store, self.city.store
        self.entered = self.city.epoch
        self._change(words, self.rank)

    def lost(self, error: WorkerLostError) -> None:
        """Hear of a loss: this worker's epoch, or its run, is over."""
        if not self.survives:
            assert error.rank is not None
            self._clock.interrupt(self.worker, fatal(str(error), error.rank, error.raised))
            return
        members = self.city.members
        if len(members) < self.min_workers:
            self.too_few = self.too_few or too_few(error, members, self.min_workers)
            if not self.regroups:
                self._clock.interrupt(self.worker, self.too_few)
                return
        if self.epoch != self.city.epoch:
            self._change(str(error), error.rank)

    def hear_of_join(self, error: WorkerLostError) -> None:
        """Another worker joins: go on with it when no round is under way here."""

        def change() -> None:
            if self.epoch != self.city.epoch:
                self.lost(error)
                # Who is in a round need not wait for this one.
                self.city.tell(self, error, VirtualWorld.lost)

        self.change_between_rounds(change)

    def _change(self, words: str, rank: int | None) -> None:
        """The members have."""
        self.worker.epoch, self.worker.loss = self.city.epoch, (words, rank)
        self.loss = words
        self._begin_epoch(self.city.epoch, self.city.members)
        self.break_off()

    def break_off(self) -> None:
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


_CITIES: list[City] = []
