"""Data between processes: a channel's process groups, and its collectives on them.

Data moves through process groups of our own, one per channel, made next to the default one: Gloo
for CPU tensors, NCCL for CUDA tensors (untested). They carry the epoch in their prefix. Small
tensors are reduced in another way than Gloo's: see `small.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as C10dWork
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.errors import ClosedError
from offbeat.worlds import base, gloo_devices
from offbeat.worlds.base import Op
from offbeat.worlds.checked import checked_peers, checked_rows
from offbeat.worlds.sockets import Sockets, cut, end, noting
from offbeat.worlds.store import Control

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld
    from offbeat.worlds.small import Small

_OPS: dict[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_TAG = 0  # of tensors between two workers
# Kept, since `own.py` replaces it to learn of the program's waits. Ours are none of them.
wait_for_c10d = C10dWork.wait


class Groups:
    """The process groups of one channel: one for each kind of device that its tensors live on."""

    def __init__(
        self,
        world: RealWorld,
        where: str,
        members: tuple[int, ...],
        time_out: timedelta,
        epoch: int = 0,
    ) -> None:
        self.members = members
        self.epoch = epoch
        self.where = where
        self._control = Control(world, world.clients, epoch)
        self.time_out = time_out
        self._world = world
        self._groups: dict[str, Any] = {}
        self._sockets: Sockets = {}
        self._lock = threading.Lock()
        self._under_way: list[Work] = []
        self._waiting = 0
        self._dropped = False

    @property
    def made(self) -> bool:
        """Whether there is any connection yet."""
        return bool(self._groups)

    def on(self, device_type: str) -> Any:
        """Return the group for such tensors; made at first use, which all members share."""
        group: Any = self._groups.get(device_type)
        if group is None:
            where = f"{self.where}/{device_type}"
            # Making a group cannot be interrupted, so first see that everyone is there to do it.
            self._world.barrier(f"make/{where}", len(self.members), self._control)
            group = self._groups[device_type] = self._connect(where, device_type)
        return group

    def _connect(self, where: str, device_type: str) -> Any:
        """Make a group in a thread that can be left behind: a member may end in the middle."""
        made: list[Any] = []

        def connect() -> None:
            try:
                back = device_type == "cpu"
                with self._world.clients.lent(back, self.epoch) as client:
                    with noting() as sockets:
                        group = self._new_group(PrefixStore(where, client), device_type)
                    self._sockets |= sockets
                    made.append(group)
            except BaseException as error:
                made.append(error)
            with self._world.connecting:
                self._world.connecting.notify_all()

        threading.Thread(target=connect, name="offbeat-connect", daemon=True).start()
        with self._world.connecting:
            self._world.connecting.wait_for(lambda: bool(made) or self.is_over())
        if not made:
            raise self._world.over()
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _new_group(self, store: Any, device_type: str) -> Any:
        rank, size = self.members.index(self._world.rank), len(self.members)
        if device_type != "cpu":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.time_out
            return dist.ProcessGroupNCCL(store, rank, size, options)
        group = dist.ProcessGroupGloo(store, rank, size, gloo_devices.options())
        group._set_default_timeout(self.time_out)  # of collectives; other waits say their own
        return group

    def begun(self, work: Work) -> None:
        self._under_way.append(work)

    def ended(self, work: Work) -> None:
        with suppress(ValueError):  # waited for twice
            self._under_way.remove(work)

    def is_over(self) -> bool:
        """Whether its members are others by now, or this worker has failed."""
        return self.epoch != self._world.epoch or self._world.has_failed

    def wait_for(self, work: Work) -> None:
        """Block until a work is done; or until this epoch is over, where that is survived."""
        if not self._world.survives:
            self._wait_for(work)
        elif not self._world.waiters.wait(lambda: self._wait_for(work), self.is_over):
            self._world.check()
            raise self._world.over()

    def _wait_for(self, work: Work) -> None:
        with self._lock:
            self._waiting += 1
        try:
            work.finish()
            self.ended(work)
        finally:
            with self._lock:
                self._waiting -= 1
            if self._dropped:
                self.drop()

    def close(self) -> None:
        """All members are through: close the connections, and wait for nothing.

        Whoever drops a group waits for Gloo's thread to look up, which it does every 10 ms, once
        for each connection. That thread itself closes at once those which it finds ended.
        """
        end(self._sockets, gloo_devices.ports)
        self.drop()

    def break_off(self) -> None:
        """A worker is lost: end the connections, and with them what is under way."""
        cut(self._sockets)
        if self._world.survives:  # it may block for as long as what is under way
            threading.Thread(target=self.drop, name="offbeat-drop", daemon=True).start()
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connections: a collective under way would keep them open, so let go of all.

        Of all at once: on an open connection Gloo reads nothing more behind a message whose
        receiver has gone, and who waits for a message that was taken back waits for ever. So if a
        thread is blocked in one, it does this when it is through.
        """
        self._dropped = True
        with self._lock:
            if self._waiting:
                return
            for work in self._under_way:
                work.let_go()
            self._under_way.clear()
            self._groups.clear()


class Work:
    """One collective, which may be several of c10d's works."""

    def __init__(
        self, world: RealWorld, groups: Groups, works: list[Any], *settings: timedelta
    ) -> None:
        self._world = world
        self._groups = groups
        self._works: list[Any] | None = works
        self._settings = settings
        groups.begun(self)

    def wait(self) -> None:
        try:
            self._groups.wait_for(self)
        except RuntimeError as error:
            raise self._world.verdict_on(error, self._groups.epoch) from error

    def finish(self) -> None:
        """Wait for each, without holding on to it: it would hold its connections open."""
        while self._works:
            wait_for_c10d(self._works.pop(), *self._settings)
        if self._works is None:
            raise RuntimeError("let go of")

    def let_go(self) -> None:
        self._works = None


class Channel(base.Channel):
    """A channel over process groups of its own."""

    def __init__(self, world: RealWorld, groups: Groups, small: Small) -> None:
        self.members = groups.members
        self.epoch = groups.epoch
        self._world = world
        self._groups = groups
        self._small = small
        self._closed = False

    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", not_before: float | None = None
    ) -> base.Work:
        if not_before is not None:
            self._world.sleep_until(not_before)
        if tensor.device.type == "cpu" and tensor.nbytes <= self._world.small_bytes:
            return self._begin(lambda: self._small.all_reduce(tensor, op))
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._issue(tensor, lambda group: group.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> base.Work:
        options = dist.BroadcastOptions()
        options.rootRank = self.members.index(source)
        return self._issue(tensor, lambda group: group.broadcast([tensor], options))

    def all_gather(self, tensor: Tensor, into: Tensor) -> base.Work:
        checked_rows("all_gather", self.members, tensor.shape, into)
        flat, flat_into = tensor.reshape(-1), into.view(-1)
        return self._issue(tensor, lambda group: group._allgather_base(flat_into, flat))

    def all_to_all(
        self, tensor: Tensor, into: Tensor, not_before: float | None = None
    ) -> base.Work:
        if not_before is not None:
            self._world.sleep_until(not_before)
        for table in (tensor, into):
            checked_rows("all_to_all", self.members, tensor.shape[1:], table)
        return self._issue(tensor, lambda group: group.alltoall_base(into, tensor, [], []))

    def send(self, tensor: Tensor, target: int) -> base.Work:
        return self.exchange({target: tensor}, {})

    def recv(self, tensor: Tensor, source: int) -> base.Work:
        return self.exchange({}, {source: tensor})

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> base.Work:
        """Post all, then wait.

        Gloo takes them in any order. NCCL (untested) connects two workers, and serves them, one
        call after the other: so all go through the pairs in the same order, and of each pair the
        lower rank sends first.
        """
        me = self._world.rank
        checked_peers(me, self.members, outgoing, incoming)
        both = [(incoming, "recv"), (outgoing, "send")]
        peers = sorted({*outgoing, *incoming}, key=lambda peer: (min(peer, me), max(peer, me)))
        posts = [
            (verb, tensors[peer], self.members.index(peer))
            for peer in peers
            for tensors, verb in (both if peer < me else both[::-1])
            if peer in tensors
        ]

        def begin() -> Work:
            works, on_cpu = [], True
            for verb, tensor, peer in posts:
                on_cpu = on_cpu and tensor.device.type == "cpu"
                group = self._groups.on(tensor.device.type)
                works.append(getattr(group, verb)([tensor], peer, _TAG))
            # NCCL's waits would block the host if they were given a limit.
            limit = (self._groups.time_out,) if on_cpu else ()
            return Work(self._world, self._groups, works, *limit)

        return self._begin(begin)

    def close(self) -> None:
        """Connections are closed when all members have come here: see `RealWorld.retire`."""
        if not self._closed:
            self._closed = True
            self.stop()
            self._world.retire(self, self._groups)

    def stop(self) -> None:
        """Nothing more will be issued."""
        self._small.close()

    def _issue(self, tensor: Tensor, verb: Callable[[Any], Any]) -> base.Work:
        def begin() -> Work:
            group = self._groups.on(tensor.device.type)
            return Work(self._world, self._groups, [verb(group)])

        return self._begin(begin)

    def _begin(self, begin: Callable[[], Work]) -> base.Work:
        self._world.check()
        if self._groups.is_over():
            raise self._world.over()
        if self._closed:
            raise ClosedError(
                f"worker {self._world.rank}: the channel {self._groups.where!r} was closed; "
                "open it again"
            )
        try:
            work = begin()
        except RuntimeError as error:
            raise self._world.verdict_on(error, self.epoch) from error
        if self._groups.is_over():  # all was broken off, perhaps before this work was under way
            self._groups.break_off()
            self._world.check()
            raise self._world.over()
        return work
