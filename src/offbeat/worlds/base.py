"""The verbs: all that a protocol or an algorithm may ask of the world it runs in.

A *world* is one worker's view of the cluster. The same few verbs stand on virtual time
(`virtual.py`), on processes under torchrun (`real.py`) and on a single process (`alone.py`), and
code above them cannot tell which. It never imports `torch.distributed`, `time` or `threading`.

    who          rank, size, members, epoch; among: the last two at once
    when         now, sleep_until, compute_s
    background   spawn, condition
    control      control.set / set_once / get / wait / add / delete: small values, seen by all
    data         channel(...).all_reduce / all_gather / all_to_all / broadcast: native collectives
                 channel(...).send / recv / exchange: between two workers, or among several
    together     meet, together (meeting.py): all have done something, or none has

Membership: `members` are the workers of this `epoch`, of the `size` that have begun. A rank is a
worker's for life. The loss of a member ends the epoch. Then every verb of every survivor raises
`WorkerLostError`; or, if the world `survives`, only what belongs to the old epoch does, by
`EpochOver`: its channels, and what was waited for on the control plane. Whoever has asked for it
(`regroups`) begins anew among those who are left.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal, Protocol

from torch import Tensor

from offbeat.clusters import Cluster
from offbeat.errors import TooFewWorkersError, WorkerLeft
from offbeat.records import Sink
from offbeat.worlds.meeting import Meeting
from offbeat.worlds.membership import Among, Membership
from offbeat.worlds.patience import stuck_s
from offbeat.worlds.regrouping import Dealing, Regrouping

Op = Literal["sum", "max", "min"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the tensors hold the result; raise what went wrong."""


class Channel(ABC):
    """A communicator that one activity at a time owns: it issues, all members in one order.

    Tensors belong to the channel from the call until `wait` returns. Members also wait in one
    order.
    """

    members: tuple[int, ...]
    epoch: int = 0

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum", not_before: float | None = None) -> Work:
        """Combine `tensor` over the members, in place, the same bits on each.

        `not_before` is the moment at which a modelled device has the tensor ready: the
        operation does not start earlier, yet the caller may issue it (in the middle of a
        backward pass, where nothing may block in virtual time).
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """Copy `tensor` of the rank `source` to every member."""

    @abstractmethod
    def send(self, tensor: Tensor, target: int) -> Work:
        """Hand `tensor` to the rank `target`, which receives it; in order per pair."""

    @abstractmethod
    def recv(self, tensor: Tensor, source: int) -> Work:
        """Fill `tensor` with what the rank `source` sends."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, into: Tensor) -> Work:
        """Collect the members' tensors: row i of `into`, `(len(members), *shape)`, is member i's.

        Both are contiguous.
        """

    @abstractmethod
    def all_to_all(self, tensor: Tensor, into: Tensor, not_before: float | None = None) -> Work:
        """Send row i of `tensor` to member i, and fill row i of `into` with what it sends here.

        Both are contiguous. `not_before` is as in `all_reduce`.
        """

    @abstractmethod
    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Work:
        """Send to and receive from several other ranks at once; whoever does, nobody deadlocks.

        In order with `send` and `recv` between the same two workers.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the channel's connections; every member calls it, after its last wait."""


class Control(ABC):
    """Small values that every worker sees: the control plane (the job's store)."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish; does not wait."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Block until somebody has set `key`."""

    @abstractmethod
    def wait(self, key: str) -> None:
        """Block until somebody has set `key`; cheaper than `get` where the value says nothing."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a shared counter, and return its new value: nobody else gets the same."""

    @abstractmethod
    def set_once(self, key: str, value: bytes) -> bytes:
        """Publish, unless somebody has, and return what stands; not for a key that is waited for.

        To be asked at any time: it does not raise because an epoch is over, if none was named.
        """

    def stands(self, key: str) -> bytes:
        """What was published by `set_once`, if anything; also for a worker that was expelled."""
        raise NotImplementedError

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget a key that nobody will ask for again."""

    def kept(self) -> Control:
        """The same; what is written by it outlives the host of the store, if anything can.

        Of a counter, its final value: one that others read in between may differ.
        """
        return self


class Condition(ABC):
    """What a worker's activities share state under: `with condition:` to look or to change.

    Inside the block no other verb may block; only `wait_for` may.
    """

    @abstractmethod
    def __enter__(self) -> Condition: ...

    @abstractmethod
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    @abstractmethod
    def wait_for(self, predicate: Callable[[], bool], until: float | None = None) -> bool:
        """Release, block until `predicate` holds or the moment `until`, take again; say which."""

    @abstractmethod
    def notify_all(self) -> None:
        """Have every waiter look at its predicate again."""


class Activity(Protocol):
    """Something a worker does in the background."""

    def join(self) -> None:
        """Block until it has ended; raise what it raised."""


class Closeable(Protocol):
    """Something attached to a world."""

    def close(self) -> None: ...

    def abandon(self, error: BaseException) -> None: ...

    def away(self, where: str) -> AbstractContextManager[None]:
        """Hold up nobody meanwhile: the program is busy elsewhere, at `where`."""


class World(Meeting, Membership):
    """One worker's view of the cluster; see the module's docstring for the verbs."""

    rank: int
    size: int
    control: Control

    def __init__(self, rank: int, size: int, cluster: Cluster | None, seed: int) -> None:
        self.rank = rank
        self.size = size
        self.among = Among(0, everyone(size))
        self.survives = False
        """Whether the others go on when a worker is lost."""
        self.min_workers = 1
        """With how few of them."""
        self.too_few: TooFewWorkersError | None = None  # what steps raise at their end
        self.joins = False
        """Whether this worker is alone, and is to join a job that runs."""
        self.returns = False  # and was a member of it before
        self.entered = 0
        """The epoch since which this worker is a member."""
        self.attached: list[dict[str, Any]] = []
        """What is attached at a time, as those who may join must have it."""
        self.said_attached = False
        """Whether this worker has said so."""
        self.loss = ""
        """What has ended the epoch before this one, in words."""
        self.regroups: list[Regrouping] = []
        """Who is told when the members have changed."""
        self.dealing: Dealing | None = None  # who is told of it after all others
        self.dealt = 0
        """Batches of all workers in the turns that this one has begun at their beginning."""
        self.deals = False
        """Whether data are dealt here, so that workers have more batches or fewer."""
        self._postponed: Callable[[], None] | None = None  # a change, to the end of a round
        self.numbers = itertools.count()  # for names that must be alike on every worker
        self.open: list[Closeable] = []  # what to close when the worker's program ends
        self.records: Sink | None = None  # who wants to know what happens here
        self.stuck_s = stuck_s()
        self._is_elsewhere = False
        self._device = cluster.device(rank, seed) if cluster is not None else None
        self._leaves_at = math.inf
        if cluster is not None and (leaves_at := cluster.leave_at(rank)) is not None:
            self._leaves_at = leaves_at

    @property
    def sent_bytes(self) -> float | None:
        """What all workers have sent over channels so far; None where nobody counts."""
        return None

    @abstractmethod
    def now(self) -> float:
        """Seconds since this world began."""

    @abstractmethod
    def sleep_until(self, moment: float) -> None:
        """Block until `moment`; at once if it has passed."""

    def compute_s(self, step: int, samples: float, since: float) -> float:
        """Seconds that the modelled device needs for one micro-batch begun at `since`.

        0 where the hardware itself is the device. The caller computes, then sleeps until
        `since + compute_s`: in virtual time that is the whole charge, on paced processes the rest.
        A scripted leave takes effect here.
        """
        if since >= self._leaves_at:
            raise WorkerLeft(f"worker {self.rank} leaves at {self._leaves_at:g} s, as scripted")
        return 0.0 if self._device is None else self._device.seconds(step, samples, since)

    def codec_s(self, size_bytes: int) -> float:
        """Seconds that the modelled device needs for the codec of numbers of so many bytes.

        0 where the hardware itself does it.
        """
        return 0.0

    def remembers(self, epoch: int) -> bool:
        """Whether what was on the control plane in an epoch before is still there."""
        return True

    def survive(self, min_workers: int) -> None:
        """Go on when a worker is lost, with as few as these; every worker calls this."""
        self.survives, self.min_workers = True, min_workers
        self.too_few = None if len(self.members) >= min_workers else self.too_few

    def change_between_rounds(self, change: Callable[[], None]) -> None:
        """A worker joins: have the members changed at the end of a round, if rounds are made here.

        In the middle of it, it would have to be made again. `change` may be called twice.
        """
        self._postponed = change
        if not any(each.makes_rounds for each in self.regroups):
            self.round_over()

    def round_over(self) -> None:
        """A round has ended here; any activity calls this."""
        change, self._postponed = self._postponed, None
        if change is not None:
            change()

    def _begin_epoch(self, epoch: int, members: tuple[int, ...]) -> None:
        """Have the members changed; the caller breaks off what waits for the former ones."""
        self.among = Among(epoch, members)
        for each in list(self.regroups):
            each.epoch_over()
        if self.dealing is not None:
            self.dealing.epoch_over()

    @abstractmethod
    def condition(self, name: str) -> Condition:
        """Make a condition that this worker's own activities share."""

    @abstractmethod
    def spawn(self, name: str, run: Callable[[], None]) -> Activity:
        """Start `run` in the background; what it raises ends this worker's run."""

    @contextmanager
    def elsewhere(self, where: str) -> Iterator[None]:
        """The program waits in a collective of its own, called at `where`; what is open is away.

        Once: a collective inside a collective is one stay.
        """
        if self._is_elsewhere:
            yield
            return
        self._is_elsewhere = True
        try:
            with ExitStack() as stays:
                for thing in list(self.open):
                    if (away := getattr(thing, "away", None)) is not None:
                        stays.enter_context(away(where))
                yield
        finally:
            self._is_elsewhere = False

    @abstractmethod
    def close(self) -> None:
        """Leave together with everyone else; then let go of every resource."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell everyone that this worker cannot go on, and let go of every resource."""


@lru_cache(maxsize=8)
def everyone(size: int) -> tuple[int, ...]:
    """One tuple for all the workers of a virtual run."""
    return tuple(range(size))
