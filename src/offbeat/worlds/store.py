"""The control plane of real processes: the job's own c10d store.

A client of the store serves one call at a time, and a call may wait for days: so every thread has
a client of its own. Clients are used again from one world to the next.

A thread that waits for a key can be woken only by setting that key, and others may wait for the
same one. So a worker that has been told of a loss writes `_WAKE` under the keys that it waits for;
whoever finds that there, told or not yet, knows that a loss is behind it. That is why `wait` looks
at the value: 25 us more than to wait alone.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.worlds import base
from offbeat.worlds.sockets import note_store

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

# poll(2) counts milliseconds in 31 bits; a wait that outlives this begins again.
LONG = timedelta(days=10)
_WAKE = b"\0a worker is lost"
Store = Any  # c10d's stores; torch's stubs know neither clone nor values of bytes


class Clients:
    """One world's clients of the store, by thread, under the prefix of its epoch."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._clients: dict[int, Store] = {}
        self._prefixed: dict[int, Store] = {}

    def mine(self) -> Store:
        """Return this thread's own client."""
        thread = threading.get_ident()
        if thread not in self._prefixed:
            self._clients[thread] = pool.borrow()
            self._prefixed[thread] = PrefixStore(self._prefix, self._clients[thread])
        return self._prefixed[thread]

    def get(self, key: str) -> bytes:
        """Block until somebody has set `key`, however long that takes."""
        client = self.mine()
        while True:
            try:
                return bytes(client.get(key))
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
                    raise

    @contextmanager
    def lent(self, back: bool) -> Iterator[Store]:
        """Lend a client to a thread that may be left behind in the middle of a call.

        Without `back`, to one that keeps it.
        """
        client = pool.borrow()
        yield PrefixStore(self._prefix, client)
        if back:
            pool.give_back({0: client})

    def give_back(self) -> None:
        """Leave them to the next world; nobody uses them any more."""
        self._prefixed.clear()
        pool.give_back(self._clients)

    def forget(self) -> None:
        """The same after a failure: one may be in the middle of a call, and is not used again."""
        others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        for thread in others:
            self._clients.pop(thread or 0, None)
        self.give_back()


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
        self._check(self._epoch)
        self._clients.mine().set(f"key/{key}", value)

    def get(self, key: str) -> bytes:
        self._world.check()
        key, waits_for = f"key/{key}", self._world.waits_for
        epoch = self._world.epoch if self._epoch is None else self._epoch
        waits_for.add((key, epoch))
        try:
            self._check(epoch)  # the loss may have come before it could see this key
            value = self._clients.get(key)
        finally:
            waits_for.discard((key, epoch))
        self._check(self._epoch)
        if value == _WAKE:
            raise self._world.verdict_on(RuntimeError(f"woken from waiting for {key!r}"), epoch)
        return value

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        self._check(self._epoch)
        return int(self._clients.mine().add(f"key/{key}", amount))

    def delete(self, key: str) -> None:
        self._check(self._epoch)
        self._clients.mine().delete_key(f"key/{key}")

    def wake_all(self, before: float = math.inf) -> None:
        """End every wait of this worker that began before that epoch: it will see why."""
        client = self._clients.mine()
        for key, epoch in list(self._world.waits_for):
            if epoch < before:
                client.set(key, _WAKE)


class _Pool:
    """Clients of the job's store, used again from one world to the next.

    A new one is a new connection, and the store looks up the name of whoever connects: where no
    name server answers, that takes 5 seconds.
    """

    def __init__(self) -> None:
        self._store: Store = None
        self._free: list[Store] = []
        self._lock = threading.Lock()

    def borrow(self) -> Store:
        store: Store = dist.distributed_c10d._get_default_store()  # whoever has initialised it
        with self._lock:
            if store is not self._store:
                self._store, self._free = store, []
            if self._free:
                return self._free.pop()
        client = self._connect(store)
        client.set_timeout(LONG)
        return client

    def _connect(self, store: Store) -> Store:
        server: Any = getattr(store, "_underlying_non_prefix_store", store)
        if isinstance(server, TCPStore):
            note_store(server.port)
        if hasattr(store, "clone"):
            return store.clone()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a torch before `clone`
        client = TCPStore(server.host, server.port, is_master=False)
        return PrefixStore(f"attempt-{attempt}", client)

    def give_back(self, clients: dict[int, Store]) -> None:
        with self._lock:
            self._free += clients.values()
        clients.clear()

    def close(self) -> None:
        self._store, self._free = None, []


pool = _Pool()
