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
from contextlib import suppress
from typing import Literal

import torch.distributed as dist

from offbeat import launched
from offbeat.clusters import Cluster
from offbeat.errors import ClosedError, EpochOver, ExpelledError, WorkerLostError
from offbeat.worlds import base, connecting, ending, left_behind  # noqa: F401 - at exit, after all else
from offbeat.worlds.channels import WithChannels
from offbeat.worlds.checked import is_of_script, no_store, too_few
from offbeat.worlds.entrance import Entrance, check_all_alike
from offbeat.worlds.liveness import Liveness
from offbeat.worlds.membership import Among
from offbeat.worlds.mesh import Mesh
from offbeat.worlds.own import OwnCollectives
from offbeat.worlds.patience import stuck_s
from offbeat.worlds.pool import StoreMovedError, pool
from offbeat.worlds.scripted import BEGAN, comes
from offbeat.worlds.stand_in import has_joined, make_default_group, stand_in
from offbeat.worlds.store import Clients, Control
from offbeat.worlds.waiters import Waiters

# Up to which size one worker beats the ring: on one host messages cost more, and bytes less.
_SMALL_BYTES, _SMALL_BYTES_ON_ONE_HOST = 2**16, 3 * 2**19
_opened = 0
_made_default_group = False
_lost: set[int] = set()  # by the worlds of this process, which the others went on without


def under_torchrun() -> bool:
    """Say whether the environment describes a job of torch.distributed."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class RealWorld(WithChannels):
    """One process of a job, and its view of the others."""

    control: Control

    def __init__(
        self,
        cluster: Cluster | None = None,
        seed: int = 0,
        time_out_s: float = 1800.0,
        survivors: int | None = None,
        freeze: float | Literal["auto"] | None = None,
        after: RealWorld | None = None,
    ) -> None:
        """`after` this one, which was expelled: to join the others again."""
        global _opened, _made_default_group
        stuck_s()  # which may be wrong: before anybody counts on this worker
        stand_in()
        if not dist.is_initialized():
            make_default_group()
            _made_default_group = True
        super().__init__(dist.get_rank(), dist.get_world_size(), cluster, seed, time_out_s)
        if pool.open():  # what is known of ranks is of other workers
            _lost.clear()
            connecting.forget()
        comes_s = 0.0 if cluster is None or _opened else cluster.join_at(self.rank) or 0.0
        joins = after is not None or comes_s > 0 or (launched.joins() and not _opened)
        if joins and survivors is None:
            raise ValueError(
                "this worker was started to join the others, who survive a loss: it must attach "
                "with survive=True, and a method that can, as they have"
            )
        if cluster is not None and not (joins or _opened):
            _lost.update(rank for rank in range(self.size) if cluster.join_at(rank))
        _opened += after is None
        self.clients = Clients(f"offbeat/{_opened}/{self.epoch}")
        self._settings = cluster, seed, time_out_s
        self._lives: int = 0 if after is None else after._lives + 1
        if joins:  # alone, until it enters
            self.joins, self.among = True, Among(-launched.worker_id() - 1, (self.rank,))
            self._entered, self.returns = self.clients, after is not None
            self.clients = Clients(f"offbeat/alone/{launched.worker_id()}/{self._lives}")
        began = comes(comes_s, self._entered) if comes_s else getattr(after, "_began", None)
        self.waits_for: set[tuple[str, int]] = set()
        """The keys that this worker's threads wait for, and the epoch in which they began."""
        self.control = Control(self, self.clients)
        self.connecting = self.condition("the other members, to connect")
        self.waiters = Waiters()
        self._lost: int | None = None
        self._gives_up = False
        self._liveness: Liveness | Mesh | None = None
        if survivors is not None:
            self.survives, self.min_workers = True, survivors
            self.expect_answers(freeze)
        self.among = Among(self.epoch, tuple(rank for rank in self.members if rank not in _lost))
        self.small_bytes = _SMALL_BYTES
        with suppress(ExpelledError):  # what is attached here hears it again, and joins them
            self._meet_others()
        self._own = OwnCollectives(self)
        self._began = self._began if began is None else began
        self._scripted.begin(self._began)
        ending.guard(self)

    def _meet_others(self) -> None:
        """Connect to all others, and know from them what must be alike."""
        on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")
        self.control.add("within one host", on_one_host)
        began_with = self.members  # some may be lost before all are here
        if self.joins:
            self._liveness = Mesh(self, self._entered)
            self._liveness.watch(alone=True)
        elif len(self.members) > 1:
            self._liveness = (Mesh if self.survives else Liveness)(self, self.clients)
            self._liveness.watch()
        if self.survives and not self.joins:  # from here on
            self.control.call(lambda client: client.set("members", json.dumps(began_with)))
            self.control.kept().call(lambda client: launched.say_survives(client, _opened))
        # The first says it for all, since launchers differ, and who reduces in another way hangs.
        all_within = self.control.add("within one host", 0) >= len(self.members)
        mine = b"%d" % (_SMALL_BYTES_ON_ONE_HOST if all_within else _SMALL_BYTES)
        self.small_bytes = int(self.control.kept().set_once("small bytes", mine))
        if self._settings[0] is not None:
            self.meet("begin")  # paced devices count from one moment
            self._began += self.now()
            self.clients.mine().set(BEGAN, b"1")

    def let_in(self) -> None:
        mine = {"small_bytes": self.small_bytes, "attached": self.attached}
        with suppress(RuntimeError):  # the store is lost: nobody can join
            self.clients.mine().set(f"entrance/{self.rank}", json.dumps(mine))

    def through(self, what: str, epoch: int) -> None:
        if not self.joins:
            with suppress(RuntimeError):  # the store is lost: it is said in the next epoch
                self.clients.mine().set(f"through/{what}/{self.rank}/{epoch}", b"1")

    def again(self) -> RealWorld:
        self.fail(self.over())
        least, freeze = self.min_workers, self.freeze
        return RealWorld(*self._settings, survivors=least, freeze=freeze, after=self)

    def others_attached(self) -> int:
        return len(self._entrance().others()["attached"])

    def join(self) -> None:
        assert isinstance(self._liveness, Mesh)
        entrance = self._entrance()
        told = entrance.others()
        check_all_alike(self.rank, told["attached"], self.attached)
        self.small_bytes = told["small_bytes"]
        self._liveness.join(f"worker {self.rank} has joined", entrance)
        self.let_in()

    def _entrance(self) -> Entrance:
        theirs = launched.world_number(self._entered.mine())
        if theirs != _opened:
            raise WorkerLostError(
                f"worker {self.rank} was started to join the others, but they attach for the "
                f"{theirs}. time by now: one can join only in the first attached block of a script"
            )
        return Entrance(self.rank, self._entered, self.check)

    def say_joined(self) -> None:
        launched.say_joined(self.clients.mine())
        has_joined()
        assert isinstance(self._liveness, Mesh)
        self._liveness.has_joined()

    def control_in_epoch(self) -> base.Control:
        return Control(self, self.clients, self.epoch)

    def remembers(self, epoch: int) -> bool:
        return epoch >= pool.since

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
        self, epoch: int, members: tuple[int, ...], words: str, lost: int | None, joins: bool
    ) -> bool:
        """Go on among these; False if this worker does not."""
        error = WorkerLostError(f"{words}; seen by worker {self.rank} of {self.size}", rank=lost)
        if self.rank not in members:
            mine = f"{words}, and the others go on without worker {self.rank}, which was silent"
            expelled = ExpelledError(words if lost == self.rank else mine, rank=self.rank)
            super().failed(error if self._gives_up else expelled)
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
            self.clients, self.joins, self.entered = self._entered, False, epoch
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
        if pool.since != epoch:  # else all waits have ended with the store
            control.wake_all(before=self.epoch)
        return True

    def lose_store(self, place: str, error: RuntimeError) -> None:
        """A call of the store there has failed: go on with its standby, or raise."""
        if not isinstance(self._liveness, Mesh):
            raise no_store(self.rank, error) if self._liveness is None else error
        if not isinstance(error, StoreMovedError):
            self._liveness.lose(place, str(error).partition("\n")[0][:200])
            if place == pool.place:
                raise WorkerLostError(f"the job's store does not answer any more: {error}")

    def _interrupt(self) -> None:
        super()._interrupt()
        self.waiters.look()

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
        if isinstance(self._liveness, Mesh):
            met = self.meet("close", act=lambda _: self.members) or ()
            self._closed = True  # all have: whoever still regroups need not
            self._interrupt()
            self.control.wake_all()
            self._liveness.close(met)
        elif self._liveness is not None:
            self.barrier("close", len(self.members))
            self._liveness.close()
        super().close()
        self.clients.give_back()

    def fail(self, error: BaseException) -> None:
        if self._closed:
            return
        if self._failure is None and self._liveness is not None:
            self._gives_up = True
            self._liveness.report(error, is_of_script(error))
            self._liveness.wait_for_verdict()
        if self._liveness is not None:
            self._liveness.stop()
        super().fail(error)

    def failed(self, error: BaseException) -> None:
        """An activity or the watch has seen a failure: name it to all, and break every wait."""
        if self._liveness is not None and not isinstance(error, WorkerLostError):
            self._gives_up = True
            self._liveness.report(error)
        super().failed(error)
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
