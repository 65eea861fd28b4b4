"""The virtual world: a whole cluster in one process, in virtual time.

    results = offbeat.run(train, cluster="two-slow-of-eight", seed=0)

runs `train()` once per worker, each a greenlet. Compute costs what the cluster file says, messages
cost what its network says, and everything else takes no time at all. A run is deterministic: the
same function, cluster and seed give the same bits.

The cost model, in `offbeat.clusters`: an all-reduce begins when its last member has joined and the
previous one on that channel has ended; it takes the time of a ring or of recursive doubling over
the slowest link. A control value takes one latency to the store, and one back. Links do not
contend with each other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor

from offbeat.clusters import Cluster
from offbeat.errors import WorkerLeft, WorkerLostError, WorldError
from offbeat.records import Sink
from offbeat.worlds import base
from offbeat.worlds.base import Op, World, checked_members
from offbeat.worlds.clock import Clock, Parked, Task, Worker

_COMBINE: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "min": lambda into, other: torch.minimum(into, other, out=into),
}


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
    Python and NumPy that each worker otherwise has to itself (tens of microseconds a switch).
    `records` is called with a line for everything that happens: see `offbeat.records`.
    An exception in one worker ends the run and is raised here, with a note of its rank and time.
    """
    cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
    if workers is not None:
        cluster = cluster.resized(workers)
    city = _City(Clock(), cluster)
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

        task = city.clock.start(worker, "main", main, main=True)
        city.worlds.append(world)
        city.by_task[task.greenlet] = world
        if (moment := cluster.crash_at(rank)) is not None:
            city.clock.at(moment, lambda world=world: city.crash(world))  # type: ignore[misc]
    _CITIES.append(city)
    try:
        city.clock.run()
    finally:
        _CITIES.pop()
    return Run(results, city.clock.now, city.clock.events)


def current_virtual_world() -> VirtualWorld | None:
    """Return the world of the virtual worker that calls this, or None outside a virtual run."""
    return _CITIES[-1].by_task.get(getcurrent()) if _CITIES else None


class VirtualWorld(World):
    """One worker's view of the virtual cluster."""

    def __init__(self, city: _City, worker: Worker, cluster: Cluster, seed: int) -> None:
        super().__init__(worker.rank, cluster.workers, cluster, seed)
        self.worker = worker
        self.city = city
        self.control = _Control(city)
        self._clock = city.clock

    def now(self) -> float:
        return self._clock.now

    def sleep_until(self, moment: float) -> None:
        self._clock.sleep_until(moment)

    def channel(self, name: str, members: tuple[int, ...] | None = None) -> base.Channel:
        return _Channel(self, name, checked_members(name, members, self))

    def condition(self, name: str) -> base.Condition:
        return _Condition(self._clock, name)

    def spawn(self, name: str, run: Callable[[], None]) -> base.Activity:
        task = self._clock.start(self.worker, name, run)
        self.city.by_task[task.greenlet] = self
        return _Activity(self._clock, task)

    def close(self) -> None:
        """Nothing to let go of; the clock sees to it that no activity outlives the run."""

    def fail(self, error: BaseException) -> None:
        """Tell the others, in case that the program catches the error and ends quietly."""
        self._clock.at(self._clock.now, self._end_activities)
        if not isinstance(error, WorkerLostError):
            self.city.lose(self, f" ({type(error).__name__}: {error})")

    def _end_activities(self) -> None:
        for task in self.worker.tasks:
            if not task.main:
                self._clock.end(task)


@dataclass
class _City:
    """What the workers of one virtual run share."""

    clock: Clock
    cluster: Cluster
    worlds: list[VirtualWorld] = field(default_factory=list)
    by_task: dict[Any, VirtualWorld] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    waiting: defaultdict[str, list[Parked]] = field(default_factory=lambda: defaultdict(list))
    meetings: dict[tuple[str, tuple[int, ...], int], _Meeting] = field(default_factory=dict)
    ends: defaultdict[tuple[str, tuple[int, ...]], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    mail: defaultdict[tuple[str, int, int], deque[_Letter]] = field(
        default_factory=lambda: defaultdict(deque)
    )

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
    """Tasks do not interrupt each other, so holding it only forbids to block."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._waiting: list[Parked] = []

    def __enter__(self) -> base.Condition:
        self._clock.holder().held += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._clock.holder().held -= 1

    def wait_for(self, predicate: Callable[[], bool], until: float | None = None) -> bool:
        task = self._clock.holder()
        while not predicate():
            if until is not None and self._clock.now >= until:
                return False
            parked = self._clock.park(self._name, until)
            self._waiting.append(parked)
            task.held -= 1
            try:
                self._clock.blocked(parked)
            finally:
                task.held += 1
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for parked in waiting:
            self._clock.wake(parked)


class _Control(base.Control):
    """A dictionary at the store, one latency away."""

    def __init__(self, city: _City) -> None:
        self._city = city
        self._clock = city.clock
        self._latency_s = city.cluster.network.control_latency_s

    def set(self, key: str, value: bytes) -> None:
        if self._latency_s == 0.0:
            self._arrived(key, value)
        else:
            self._clock.at(self._clock.now + self._latency_s, lambda: self._arrived(key, value))

    def get(self, key: str) -> bytes:
        self._clock.sleep_until(self._clock.now + self._latency_s)
        if key not in self._city.values:
            parked = self._clock.park(f"control key {key!r}")
            self._city.waiting[key].append(parked)
            self._clock.blocked(parked)
        value = self._city.values[key]
        self._clock.sleep_until(self._clock.now + self._latency_s)
        return value

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        self._clock.sleep_until(self._clock.now + self._latency_s)
        self._city.counters[key] += amount
        total = self._city.counters[key]
        self._clock.sleep_until(self._clock.now + self._latency_s)
        return total

    def delete(self, key: str) -> None:
        self._city.values.pop(key, None)
        self._city.counters.pop(key, None)

    def _arrived(self, key: str, value: bytes) -> None:
        self._city.values[key] = value
        for parked in self._city.waiting.pop(key, ()):
            self._clock.wake(parked)


class _Channel(base.Channel):
    def __init__(self, world: VirtualWorld, name: str, members: tuple[int, ...]) -> None:
        self.members = members
        self._world = world
        self._city = world.city
        self._name = name
        self._issued = 0

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", not_before: float | None = None
    ) -> base.Work:
        def combine(tensors: list[Tensor]) -> None:
            # By rank, into the first one's tensor: each sum is bit for bit the same.
            total = reduce(_COMBINE[op], tensors)
            for each in tensors[1:]:
                each.copy_(total)

        cost = self._city.cluster.network.all_reduce_s
        return self._meet(f"all_reduce {op}", tensor, combine, cost, not_before)

    def broadcast(self, tensor: Tensor, source: int) -> base.Work:
        at = self.members.index(source)

        def copy(tensors: list[Tensor]) -> None:
            for each in tensors:
                if each is not tensors[at]:
                    each.copy_(tensors[at])

        cost = self._city.cluster.network.broadcast_s
        return self._meet(f"broadcast from {source}", tensor, copy, cost, None)

    def send(self, tensor: Tensor, target: int) -> base.Work:
        clock, key = self._city.clock, (self._name, self._world.rank, target)
        size_bytes = tensor.numel() * tensor.element_size()
        takes_s = self._city.cluster.network.point_to_point_s(self._world.rank, target, size_bytes)
        arrives = clock.now + takes_s
        self._city.mail[key].append(letter := _Letter(tensor.clone(), arrives))
        if letter.arrives < self._city.ends[self._name, key[1:]]:  # in order per pair
            letter.arrives = self._city.ends[self._name, key[1:]]
        self._city.ends[self._name, key[1:]] = letter.arrives
        for parked in self._city.waiting.pop(f"{key}", ()):
            clock.wake(parked)
        return _Sent()

    def recv(self, tensor: Tensor, source: int) -> base.Work:
        return _Received(self._city, tensor, (self._name, source, self._world.rank))

    def _meet(
        self,
        what: str,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], None],
        cost: Callable[[tuple[int, ...], int], float],
        not_before: float | None,
    ) -> _Meeting:
        place = (self._name, self.members)
        key = (*place, self._issued)
        self._issued += 1
        meeting = self._city.meetings.get(key)
        if meeting is None:
            meeting = self._city.meetings[key] = _Meeting(self._city, key, what)
        meeting.join(self._world.rank, what, tensor, not_before)
        if len(meeting.tensors) == len(self.members):
            del self._city.meetings[key]
            takes_s = cost(self.members, tensor.numel() * tensor.element_size())
            begins = max(meeting.ready, self._city.ends[place])
            self._city.ends[place] = begins + takes_s
            meeting.hold(combine, begins + takes_s)
        return meeting


class _Meeting:
    """One collective: who has joined with which tensor, and who waits for its end."""

    def __init__(self, city: _City, key: tuple[str, tuple[int, ...], int], what: str) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.ready = 0.0
        self._clock = city.clock
        self._key = key
        self._what = what
        self._ended = False
        self._waiting: list[Parked] = []

    def join(self, rank: int, what: str, tensor: Tensor, not_before: float | None) -> None:
        if what != self._what:
            raise WorldError(f"{self}: worker {rank} calls {what}, the others {self._what}")
        for other, theirs in self.tensors.items():
            if theirs.shape != tensor.shape or theirs.dtype != tensor.dtype:
                raise WorldError(
                    f"{self}: worker {rank} brings {tuple(tensor.shape)} of {tensor.dtype}, "
                    f"worker {other} {tuple(theirs.shape)} of {theirs.dtype}"
                )
            break
        self.tensors[rank] = tensor
        self.ready = max(self.ready, self._clock.now, not_before or 0.0)

    def hold(self, combine: Callable[[list[Tensor]], None], ends: float) -> None:
        def end() -> None:
            combine([self.tensors[member] for member in self._key[1]])
            self._ended = True
            for parked in self._waiting:
                self._clock.wake(parked)

        self._clock.at(ends, end)

    def wait(self) -> None:
        while not self._ended:
            missing = [member for member in self._key[1] if member not in self.tensors]
            parked = self._clock.park(
                f"{self}: not there yet: {_ranks(missing)}" if missing else f"the end of {self}"
            )
            self._waiting.append(parked)
            self._clock.blocked(parked)

    def __str__(self) -> str:
        return f"{self._what}, number {self._key[2]} on channel {self._key[0]!r}"


@dataclass
class _Letter:
    tensor: Tensor
    arrives: float


class _Sent:
    def wait(self) -> None:
        """The tensor was copied on the way out."""


class _Received:
    def __init__(self, city: _City, tensor: Tensor, key: tuple[str, int, int]) -> None:
        self._city = city
        self._tensor = tensor
        self._key = key
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        box = self._city.mail[self._key]
        while not box:
            name, source, _ = self._key
            parked = self._city.clock.park(f"a tensor from worker {source} on channel {name!r}")
            self._city.waiting[f"{self._key}"].append(parked)
            self._city.clock.blocked(parked)
        letter = box.popleft()
        self._city.clock.sleep_until(letter.arrives)
        self._tensor.copy_(letter.tensor)
        self._done = True


def _ranks(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
