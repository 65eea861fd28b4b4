"""The real world: processes under torchrun, over `torch.distributed`.

Data moves through process groups of our own (`gloo.py`), next to the default one. Control values
live in the job's own c10d store (`store.py`). A worker that ends is noticed by its neighbour
(`liveness.py`), and then every verb of everybody raises; or, where losses are survived, by all
others (`mesh.py`), and then what belongs to the epoch before does. A worker that joins a job which
runs begins in a world of its own, with nobody else there, and then enters (`entrance.py`). What
the program itself does in torch.distributed meanwhile is known too (`own.py`), and it may not end
its process group (`ending.py`).
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offbeat import launched
from offbeat.clusters import Cluster
from offbeat.errors import ClosedError, EpochOver, WorkerLostError
from offbeat.worlds import base, ending
from offbeat.worlds.checked import checked_members, too_few
from offbeat.worlds.entrance import Entrance, check_alike
from offbeat.worlds.gloo import Channel, Groups
from offbeat.worlds.liveness import Liveness
from offbeat.worlds.mesh import Mesh
from offbeat.worlds.own import OwnCollectives
from offbeat.worlds.patience import stuck_s
from offbeat.worlds.small import Small
from offbeat.worlds.stand_in import stand_in
from offbeat.worlds.store import Clients, Control, pool
from offbeat.worlds.threads import ThreadedWorld
from offbeat.worlds.waiters import Waiters

# Up to which size one worker beats the ring: between hosts, messages cost less and bytes more than
# within one.
_SMALL_BYTES, _SMALL_BYTES_ON_ONE_HOST = 2**16, 3 * 2**19
_opened = 0
_made_default_group = False
_lost: set[int] = set()  # by the worlds of this process, which the others went on without


def under_torchrun() -> bool:
    """Say whether the environment describes a job of torch.distributed."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class RealWorld(ThreadedWorld):
    """One process of a job, and its view of the others."""

    control: Control

    def __init__(
        self,
        cluster: Cluster | None = None,
        seed: int = 0,
        time_out_s: float = 1800.0,
        survivors: int | None = None,
        freeze_s: float | None = None,
    ) -> None:
        global _opened, _made_default_group
        stuck_s()  # which may be wrong: before anybody counts on this worker
        joins = launched.joins() and not _opened
        if joins and survivors is None:
            raise ValueError(
                "this worker was started to join the others, who survive a loss: it must attach "
                "with survive=True, and a method that can, as they have"
            )
        stand_in()
        if not dist.is_initialized():
            # Kept until the process exits: a second one on the same store would meet the
            # addresses that the first has left there.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
            _made_default_group = True
        super().__init__(dist.get_rank(), dist.get_world_size(), cluster, seed)
        self._time_out = timedelta(seconds=time_out_s)
        self._groups: list[Groups] = []
        self._retired: list[Groups] = []
        self._channels: list[Channel] = []
        self._openings: Counter[str] = Counter()
        _opened += 1
        self.clients = Clients(f"offbeat/{_opened}/{self.epoch}")
        if joins:  # alone, until it enters
            self.joins, self.epoch, self.members = True, -launched.worker_id() - 1, (self.rank,)
            self._entered = self.clients
            self.clients = Clients(f"offbeat/alone/{launched.worker_id()}")
        self.waits_for: set[tuple[str, int]] = set()
        """The keys that this worker's threads wait for, and the epoch in which they began."""
        self.control = Control(self, self.clients)
        self.connecting = self.condition("the other members, to connect")
        self.waiters = Waiters()
        self._lost: int | None = None
        self._liveness: Liveness | Mesh | None = None
        if survivors is not None:
            self.survives, self.min_workers, self.freeze_s = True, survivors, freeze_s
        self.members = tuple(rank for rank in self.members if rank not in _lost)
        # Agreed upon: launchers differ in what they tell, and who reduces in another way hangs.
        within_one = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")
        self.control.add("within one host", int(within_one))
        if joins:
            self._liveness = Mesh(self, self._entered)
            self._liveness.watch(alone=True)
        elif len(self.members) > 1:
            self._liveness = (Mesh if self.survives else Liveness)(self, self.clients)
            self._liveness.watch()
        agreed = self.control.add("within one host", 0) == len(self.members)
        self.small_bytes = _SMALL_BYTES_ON_ONE_HOST if agreed else _SMALL_BYTES
        self._own = OwnCollectives(self)
        if cluster is not None:
            self.barrier("begin", len(self.members))  # paced devices count from one moment
            self._began += self.now()
        ending.guard(self)
        if self.survives and not joins:
            self.clients.mine().set("members", json.dumps(self.members))
            launched.say_survives(dist.distributed_c10d._get_default_store(), _opened)

    # --- joining ---------------------------------------------------------------------------

    def let_in(self, attached: dict[str, Any]) -> None:
        mine = {"small_bytes": self.small_bytes, "attached": attached}
        self.clients.mine().set(f"entrance/{self.rank}", json.dumps(mine))

    def join(self, attached: dict[str, Any]) -> None:
        store = dist.distributed_c10d._get_default_store()
        theirs = launched.world_number(store)
        if theirs != _opened:
            raise WorkerLostError(
                f"worker {self.rank} was started to join the others, but they attach for the "
                f"{theirs}. time by now: one can join only in the first attached block of a script"
            )
        assert isinstance(self._liveness, Mesh)
        entrance = Entrance(self.rank, self._entered, self.check)
        told = entrance.others()
        check_alike(self.rank, told["attached"], json.loads(json.dumps(attached)))
        self.small_bytes = told["small_bytes"]
        self._liveness.join(f"worker {self.rank} has joined", entrance)
        self.let_in(attached)

    def say_joined(self) -> None:
        launched.say_joined(dist.distributed_c10d._get_default_store())

    def control_in_epoch(self) -> base.Control:
        return Control(self, self.clients, self.epoch)

    def survive(self, min_workers: int) -> None:
        """It has been said when the world was opened; or has not."""
        if not self.survives:
            raise ValueError(
                "survive=True, but another attachment has opened this world without it: "
                "say the same for all that are attached at a time"
            )
        self.min_workers = max(self.min_workers, min_workers)

    @property
    def has_failed(self) -> bool:
        """Whether every verb raises."""
        return self._failure is not None or self._closed

    def over(self) -> EpochOver:
        """What is raised by whatever belongs to an epoch that has ended."""
        return EpochOver(self.loss, self._lost)

    def begin_epoch(
        self, epoch: int, members: tuple[int, ...], words: str, lost: int, joins: bool
    ) -> bool:
        """Go on among these; False if this worker does not."""
        error = WorkerLostError(f"{words}; seen by worker {self.rank} of {self.size}", rank=lost)
        if self.rank not in members:
            super().failed(error)
            return False
        if len(members) < self.min_workers:
            self.too_few = self.too_few or too_few(error, members, self.min_workers)
            if not self.regroups:
                self.failed(self.too_few)
                return False
        self.loss, self._lost = words, lost
        _lost.update(set(range(self.size)) - set(members))
        _lost.difference_update(members)
        control = self.control
        if self.joins:  # its own place is behind it
            self.clients, self.joins = self._entered, False
            self.control = Control(self, self.clients)
        before = [groups for groups in self._groups if groups.epoch <= self.epoch]
        channels = [channel for channel in self._channels if channel.epoch <= self.epoch]
        self._retired.clear()
        self._begin_epoch(epoch, members)
        for channel in channels:
            channel.stop()
            with suppress(ValueError):  # the program has closed it meanwhile
                self._channels.remove(channel)
        for groups in before:
            groups.break_off()
            with suppress(ValueError):
                self._groups.remove(groups)
        self._interrupt()
        control.wake_all(before=self.epoch)
        return True

    def _interrupt(self) -> None:
        super()._interrupt()
        self.waiters.look()

    def channel(self, name: str, members: tuple[int, ...] | None = None) -> base.Channel:
        self.check()
        epoch = self.epoch  # before its members: if they change meanwhile, it is over
        members = checked_members(name, members, self)
        self._sweep()
        where = f"channel/{name}/{'-'.join(map(str, members)) if len(members) < self.size else ''}"
        where = f"{epoch}/{where}" if epoch else where
        self._openings[where] += 1  # a name may be used again once its channel was closed
        where = f"{where}/{self._openings[where]}"
        groups = Groups(self, where, members, self._time_out, epoch)
        self._groups.append(groups)
        self._channels.append(channel := Channel(self, groups, Small(self, groups)))
        return channel

    def retire(self, channel: Channel, groups: Groups) -> None:
        """Close connections when all their members have come here, and not before.

        A connection that one side closes may lose what the other has not read yet. Nobody waits
        for the others, who may close their channels in another order: who was early looks again
        when the next channel is opened or closed.
        """
        self.check()
        if groups.is_over():
            return
        self._channels.remove(channel)
        if not groups.made:
            self._groups.remove(groups)
            return
        self.control.add(f"closed/{groups.where}", 1)
        self._retired.append(groups)
        self._sweep()

    def _sweep(self) -> None:
        for groups in list(self._retired):
            if self.control.add(f"closed/{groups.where}", 0) == len(groups.members):
                with suppress(ValueError):  # another thread of ours has seen it, too
                    self._retired.remove(groups)
                    self._groups.remove(groups)
                    groups.close()

    def check(self) -> None:
        if not dist.is_initialized() and not self._closed:
            raise ClosedError(
                f"worker {self.rank}: the default process group is gone: destroy_process_group() "
                "was called inside the attached block; call it after the block"
            )
        super().check()

    def close(self) -> None:
        """Agree, drain, then let go."""
        if self._closed:
            return
        self.check()
        if self._liveness is not None:
            if self.survives:
                self.meet("close")
                self._closed = True  # all have: whoever still regroups need not
                self._interrupt()
                self.control.wake_all()
            else:
                self.barrier("close", len(self.members))
            self._liveness.close()
        super().close()
        self.clients.give_back()

    def fail(self, error: BaseException) -> None:
        if self._closed:
            return
        if self._failure is None and self._liveness is not None:
            self._liveness.report(self.rank, f"{type(error).__name__}: {error}")
            self._liveness.wait_for_verdict()
        if self._liveness is not None:
            self._liveness.stop()
        super().fail(error)

    def failed(self, error: BaseException) -> None:
        """An activity or the watch has seen a failure: name it to all, and break every wait."""
        if self._liveness is not None and not isinstance(error, WorkerLostError):
            self._liveness.report(self.rank, f"{type(error).__name__}: {error}")
        super().failed(error)
        if isinstance(self._liveness, Liveness):
            self._liveness.say_goodbye()
        for groups in list(self._groups):
            groups.break_off()
        self.control.wake_all()

    def verdict_on(self, error: Exception, epoch: int = 0) -> BaseException:
        """A collective has broken: find out who is gone."""
        error.__traceback__ = None  # its frames hold the group, and with it the connections open
        if self._liveness is not None:
            self._liveness.wait_for_verdict(epoch)
        if self._failure is not None:
            return self._failure
        if self.epoch > epoch:
            return self.over()
        return WorkerLostError(
            f"worker {self.rank}: a collective failed, but no worker was seen to end: {error}",
            rank=None,
        )

    def barrier(self, name: str, size: int, control: base.Control | None = None) -> None:
        """Wait, over the store alone, until `size` workers have come to the barrier `name`."""
        control = self.control if control is None else control
        if control.add(f"barrier/{name}", 1) == size:
            control.set(f"barrier/{name}/all", b"1")
        control.get(f"barrier/{name}/all")

    def _let_go(self) -> None:
        self._own.close()
        ending.release(self)
        for channel in self._channels:
            channel.stop()
        try:
            super()._let_go()
        finally:
            every = list(self._groups)
            if isinstance(self._liveness, Liveness):
                every.append(self._liveness.groups)
            self.waiters.close()
            for groups in every:
                if self._failure is None:
                    groups.close()
                elif self.survives:
                    groups.break_off()
                else:
                    groups.drop()
            if self._failure is not None:
                self.clients.forget()


@atexit.register
def _end_default_group() -> None:
    pool.close()
    if _made_default_group and dist.is_initialized():
        dist.destroy_process_group()
