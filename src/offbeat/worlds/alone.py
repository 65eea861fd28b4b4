"""A world of one: no process group, the same verbs, the same code path above them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from offbeat.clusters import Cluster
from offbeat.worlds import base
from offbeat.worlds.base import Op
from offbeat.worlds.checked import checked_members, checked_peers, checked_rows
from offbeat.worlds.threads import ThreadedWorld


class AloneWorld(ThreadedWorld):
    """One worker in one process."""

    def __init__(self, cluster: Cluster | None = None, seed: int = 0) -> None:
        super().__init__(0, 1, cluster, seed)
        self.control = _Control(self)
        self._scripted.begin(self._began)

    def control_in_epoch(self) -> base.Control:
        return self.control

    def channel(
        self, name: str, members: tuple[int, ...] | None = None, epoch: int | None = None
    ) -> base.Channel:
        return _Channel(self, checked_members(name, members, self.rank, self.members))


class _Done:
    def wait(self) -> None:
        """What one worker does alone is done at once."""


class _Later:
    def __init__(self, world: AloneWorld, moment: float) -> None:
        self._world = world
        self._moment = moment

    def wait(self) -> None:
        self._world.sleep_until(self._moment)


class _Channel(base.Channel):
    def __init__(self, world: AloneWorld, members: tuple[int, ...]) -> None:
        self.members = members
        self._world = world

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", not_before: float | None = None
    ) -> base.Work:
        self._world.check()
        return _Done() if not_before is None else _Later(self._world, not_before)

    def broadcast(self, tensor: Tensor, source: int) -> base.Work:
        self._world.check()
        return _Done()

    def send(self, tensor: Tensor, target: int) -> base.Work:
        raise ValueError(f"worker 0 is alone: there is no worker {target} to send to")

    def recv(self, tensor: Tensor, source: int) -> base.Work:
        raise ValueError(f"worker 0 is alone: there is no worker {source} to receive from")

    def all_gather(self, tensor: Tensor, into: Tensor) -> base.Work:
        self._world.check()
        checked_rows("all_gather", self.members, tensor.shape, into)
        into[0] = tensor
        return _Done()

    def all_to_all(
        self, tensor: Tensor, into: Tensor, not_before: float | None = None
    ) -> base.Work:
        self._world.check()
        for table in (tensor, into):
            checked_rows("all_to_all", self.members, tensor.shape[1:], table)
        into.copy_(tensor)
        return _Done() if not_before is None else _Later(self._world, not_before)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> base.Work:
        self._world.check()
        checked_peers(0, self.members, outgoing, incoming)
        return _Done()

    def close(self) -> None:
        """There are no connections."""


class _Control(base.Control):
    def __init__(self, world: AloneWorld) -> None:
        self._world = world
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._changed = world.condition("a control key")
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._world.check()
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        self._world.check()
        with self._lock:
            self._counters[key] = total = self._counters.get(key, 0) + amount
            return total

    def set_once(self, key: str, value: bytes) -> bytes:
        self._world.check()
        with self._changed:
            return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)
            self._counters.pop(key, None)
