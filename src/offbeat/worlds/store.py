"""The control plane of real processes: the job's own c10d store.

A client of the store serves one call at a time, and a call may wait for days: so every thread has
a client of its own. Clients are used again from one world to the next.

A thread that waits for a key can be woken only by setting that key, and others may wait for the
same one. So a worker that has been told of a loss writes `_WAKE` under the keys that it waits for;
whoever finds that there, told or not yet, knows that a loss is behind it. That is why `wait` looks
at the value: 25 us more than to wait alone.

Where the store has a standby (pool.py), what one worker leaves behind for the others, in case it is
lost, is written to both: `kept`. Nothing else is. When the store is lost, a call that belongs to an
epoch, or waits, raises as it does when a worker is lost: all begin anew, in another epoch. Any
other call is made again, of the standby.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.worlds import base
from offbeat.worlds.pool import LONG, STANDBY, Store, StoreMovedError, pool

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

__all__ = ["LONG", "Clients", "Control", "pool"]
_WAKE = b"\0a worker is lost"
T = TypeVar("T")


class Clients:
    """One world's clients of the store, by thread, under the prefix of its epoch."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._clients: dict[tuple[int, str], Store] = {}
        self._prefixed: dict[tuple[int, str], Store] = {}

    def mine(self, epoch: int | None = None) -> Store:
        """Return this thread's own client; of the store that this epoch has begun with."""
        return self._at(_place(epoch))

    def standby(self) -> Store | None:
        """Return this thread's own client of the standby, if there is one."""
        return self._at(STANDBY) if pool.has_standby else None

    def _at(self, place: str) -> Store:
        key = threading.get_ident(), place
        if key not in self._prefixed:
            self.use({place: pool.borrow(place)})
        return self._prefixed[key]

    def borrowed(self) -> dict[str, Store]:
        """Clients of both stores for a thread that must not wait for them: see `use`."""
        places = [pool.place, *([STANDBY] if pool.has_standby else [])]
        return {place: pool.borrow(place) for place in places}

    def use(self, clients: dict[str, Store]) -> None:
        """Have these be this thread's own, by place."""
        for place, client in clients.items():
            self._clients[threading.get_ident(), place] = client
            self._prefixed[threading.get_ident(), place] = PrefixStore(self._prefix, client)

    def get(self, key: str, epoch: int | None = None) -> bytes:
        """Block until somebody has set `key`, however long that takes."""
        client = self.mine(epoch)
        while True:
            try:
                return bytes(client.get(key))
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise

    @contextmanager
    def lent(self, back: bool, epoch: int) -> Iterator[Store]:
        """Lend a client to a thread that may be left behind in the middle of a call.

        Without `back`, to one that keeps it.
        """
        place = _place(epoch)
        client = pool.borrow(place)
        yield PrefixStore(self._prefix, client)
        if back:
            pool.give_back(place, client)

    def give_back(self) -> None:
        """Leave them to the next world; nobody uses them any more."""
        self._prefixed.clear()
        for (_, place), client in self._clients.items():
            pool.give_back(place, client)
        self._clients.clear()

    def forget(self) -> None:
        """The same after a failure: one may be in the middle of a call, and is not used again."""
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        for key in list(self._clients):
            if key[0] in others:
                del self._clients[key]
        self.give_back()


def _place(epoch: int | None) -> str:
    """Which store to use; raises if that is not the one that this epoch has begun with."""
    place = pool.place  # read first: whoever moves ends the epochs before it does so
    if epoch is not None and epoch < pool.since:
        raise StoreMovedError("the job's store is lost")
    return place


class Control(base.Control):
    """Values in the store; every verb raises once a loss is known, and is not survived.

    With an epoch, also if that is over. Without one, only what waits when an epoch ends does.
    """

    def __init__(self, world: RealWorld, clients: Clients, epoch: int | None = None) -> None:
        self._world = world
        self._clients = clients
        self._epoch = epoch

    def _check(self, epoch: int | None = None) -> None:
        self._world.check()
        if epoch is not None and epoch != self._world.epoch:
            raise self._world.over()

    def set(self, key: str, value: bytes) -> None:
        self.call(lambda client: client.set(f"key/{key}", value))

    def get(self, key: str) -> bytes:
        self._world.check()
        key, waits_for = f"key/{key}", self._world.waits_for
        epoch = self._world.epoch if self._epoch is None else self._epoch
        waits_for.add((key, epoch))
        try:
            self._check(epoch)  # the loss may have come before it could see this key
            place = pool.place
            value = self._clients.get(key, epoch)
        except RuntimeError as error:
            self._world.lose_store(place, error)
            raise self._world.verdict_on(error, epoch) from error
        finally:
            waits_for.discard((key, epoch))
        self._check(self._epoch)
        if value == _WAKE:
            raise self._world.verdict_on(RuntimeError(f"woken from waiting for {key!r}"), epoch)
        return value

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self.call(lambda client: client.add(f"key/{key}", amount)))

    def set_once(self, key: str, value: bytes) -> bytes:
        told = value.decode()
        return bytes(self.call(lambda client: client.compare_set(f"key/{key}", "", told)))

    def stands(self, key: str) -> bytes:
        key = f"key/{key}"
        with suppress(RuntimeError):  # the store is lost
            client = self._clients.mine()
            return bytes(client.get(key)) if client.check([key]) else b""
        return b""

    def delete(self, key: str) -> None:
        self.call(lambda client: client.delete_key(f"key/{key}"))

    def kept(self) -> Control:
        return _Kept(self._world, self._clients, self._epoch) if pool.has_standby else self

    def wake_all(self, before: float = math.inf) -> None:
        """End every wait of this worker that began before that epoch: it will see why."""
        with suppress(RuntimeError):  # with the store, every wait has ended
            client = self._clients.mine()
            for key, epoch in list(self._world.waits_for):
                # Not one that has a value by now: nobody waits for it, and others may yet read it.
                if epoch < before and client.compare_set(key, "", _WAKE.decode()) == _WAKE:
                    # c10d's other server wakes nobody by compare_set. A `set` would, but what
                    # another worker has set in between would be lost. To append nothing keeps it.
                    client.append(key, "")

    def call(self, call: Callable[[Store], T]) -> T:
        """Have this thread's client make a call that does not wait for others."""
        while True:
            self._check(self._epoch)
            place = pool.place
            try:
                return call(self._clients.mine(self._epoch))
            except RuntimeError as error:
                self._world.lose_store(place, error)
                if self._epoch is not None:
                    raise self._world.verdict_on(error, self._epoch) from error


class _Kept(Control):
    """What it writes is in the standby, too, before it is in the store."""

    def set_once(self, key: str, value: bytes) -> bytes:
        """What stands in the standby is what everybody brings to the store."""
        stands = value
        with self._standby() as client:
            if client is not None:
                stands = bytes(client.compare_set(f"key/{key}", "", value.decode()))
        told = stands.decode()
        return bytes(super().call(lambda client: client.compare_set(f"key/{key}", "", told)))

    def call(self, call: Callable[[Store], T]) -> T:
        with self._standby() as client:
            if client is not None:
                call(client)
        return super().call(call)

    @contextmanager
    def _standby(self) -> Iterator[Store | None]:
        """This thread's client of the standby, as long as that is there."""
        self._check(self._epoch)
        client = None
        with _or_dropped():  # a thread that has none yet connects, and may not get there
            client = self._clients.standby()
        with _or_dropped():
            yield client


@contextmanager
def _or_dropped() -> Iterator[None]:
    """A call of the standby that fails is the last one."""
    try:
        yield
    except RuntimeError:
        pool.drop_standby()
