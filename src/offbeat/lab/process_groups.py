"""Process groups of `torch.distributed` in a simulation: who is in them, and when a call blocks.

The collectives themselves are in torch_collectives.py. Each one starts something on the group's
channel and says what to do at its end; here it is waited for, at once or, with `async_op`, when the
script calls `wait()`. Blocking is being elsewhere: what is attached does not wait for this worker
meanwhile. Polling takes no virtual time, so `is_completed()` of a work waits for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.worlds import ending
from offbeat.worlds.base import Channel, Work
from offbeat.worlds.places import place
from offbeat.worlds.virtual import VirtualWorld, current_virtual_world


class Group:
    """One worker's handle of a process group."""

    def __init__(self, world: VirtualWorld, channel: Channel) -> None:
        self.world = world
        self.channel = channel
        self.ranks = channel.members
        self.at = self.ranks.index(world.rank)

    def rank(self) -> int:
        """This worker's rank among the group's members."""
        return self.at

    def size(self) -> int:
        """How many members the group has."""
        return len(self.ranks)

    def rank_of(self, everywhere: int | None, here: int | None) -> int:
        """Return a member's rank in the world, from that or from its rank in the group."""
        rank = self.ranks[here] if here is not None else everywhere or 0
        if rank not in self.ranks:
            raise ValueError(f"worker {rank} is not in the group of workers {list(self.ranks)}")
        return rank

    def others(self, tensors: Sequence[Tensor] | None) -> dict[int, Tensor]:
        """The tensors of the other members, by rank in the world, as an exchange wants them."""
        if tensors is None or len(tensors) != len(self.ranks):
            given = "no list" if tensors is None else f"{len(tensors)} tensors"
            raise ValueError(f"{given} for a group of {len(self.ranks)} workers: give one for each")
        pairs = zip(self.ranks, tensors, strict=True)
        return {rank: tensor.detach() for rank, tensor in pairs if rank != self.world.rank}


@dataclass
class Started:
    """A collective under way."""

    work: Work
    then: Callable[[], object] | None = None
    """What to do at its end."""
    value: object = None
    """What the blocking call returns."""


class Pending:
    """What an `async_op` returns: it blocks in `wait`, not before."""

    def __init__(self, world: VirtualWorld, where: str, started: Started) -> None:
        self._world = world
        self._where = where
        self._started: Started | None = started

    def wait(self, timeout: Any = None) -> bool:
        """Block until the tensors hold the result."""
        if (started := self._started) is not None:
            with self._world.elsewhere(self._where):
                started.work.wait()
            self._started = None
            if started.then is not None:
                with torch.no_grad():
                    started.then()
        return True

    def is_completed(self) -> bool:
        """Wait, then say yes: no time passes between two questions."""
        return self.wait()


class ProcessGroups:
    """The process groups of all workers; `stand_ins` are torch's functions by name.

    `collectives` start something on a group; those of `in_steps` wait on their own. `no_member`
    is torch's handle of a group for those who are not in it.
    """

    def __init__(
        self,
        collectives: dict[str, Callable[..., Started]],
        in_steps: dict[str, Callable[..., Any]],
        no_member: Any,
    ) -> None:
        self._no_member = no_member
        self._default: dict[int, Group] = {}  # by rank, of those who have initialised it
        self._made: dict[int, int] = {}  # how many others each worker has heard of
        names = [name for name in vars(type(self)) if not name.startswith("_")]
        self.stand_ins: dict[str, Callable[..., Any]] = {
            **{name: getattr(self, name) for name in names},
            **{name: self._of_torch(name, start) for name, start in collectives.items()},
            **{name: self._of_torch(name, each, True) for name, each in in_steps.items()},
        }

    def init_process_group(self, *_: object, **__: object) -> None:
        world = _world()
        if world.rank in self._default:
            raise ValueError(
                "init_process_group() was called before: the default process group can be "
                "initialized once, until destroy_process_group()"
            )
        self._default[world.rank] = Group(world, world.channel("torch.distributed"))

    def destroy_process_group(self, group: Any = None) -> None:
        world = _world()
        if group is None or group is self._default.get(world.rank):
            if world.open and ending.failure() is None:
                ending.refuse(world)
            group = self._default.pop(world.rank, None)
        if isinstance(group, Group):
            group.channel.close()

    def is_initialized(self) -> bool:
        return _world().rank in self._default

    def new_group(self, ranks: Sequence[int] | None = None, *_: object, **__: object) -> Any:
        world = self._group().world
        number = self._made[world.rank] = self._made.get(world.rank, 0) + 1
        members = world.members if ranks is None else tuple(sorted(ranks))
        if world.rank not in members:
            return self._no_member
        return Group(world, world.channel(f"torch.distributed/{number}", members))

    def get_rank(self, group: Any = None) -> int:
        return -1 if self._is_outside(group) else self._group(group).rank()

    def get_world_size(self, group: Any = None) -> int:
        return -1 if self._is_outside(group) else self._group(group).size()

    def get_backend(self, group: Any = None) -> str:
        return "gloo"

    def get_process_group_ranks(self, group: Any = None) -> list[int]:
        return list(self._group(group).ranks)

    def get_group_rank(self, group: Any, global_rank: int) -> int:
        return self._group(group).ranks.index(global_rank)

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        return self._group(group).ranks[group_rank]

    def _group(self, group: Any = None) -> Group:
        rank = _world().rank
        if rank not in self._default:
            raise ValueError(
                "the default process group has not been initialized: call init_process_group(), "
                "or ask offbeat.rank() and offbeat.world_size()"
            )
        return group if isinstance(group, Group) else self._default[rank]

    def _is_outside(self, group: Any) -> bool:
        return group is not None and not isinstance(group, Group) and group == self._no_member

    def _of_torch(
        self, name: str, function: Callable[..., Any], in_steps: bool = False
    ) -> Callable[..., Any]:
        """Give a collective its group's handle, and wait for what it starts, now or later."""
        signature, always_async = inspect.signature(function), name in ("isend", "irecv")

        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"torch.distributed.{name}: {error}") from None
            given = bound.arguments.get("group")
            if self._is_outside(given):
                return None
            group = bound.arguments["group"] = self._group(given)
            if in_steps:
                with group.world.elsewhere(_where(name)):
                    return function(*bound.args, **bound.kwargs)
            started: Started = function(*bound.args, **bound.kwargs)
            pending = Pending(group.world, _where(name), started)
            if always_async or bound.arguments.get("async_op"):
                return pending
            pending.wait()
            return started.value

        return called


def _world() -> VirtualWorld:
    world = current_virtual_world()
    assert world is not None, "stand-ins are called inside virtual workers only"
    return world


def _where(name: str) -> str:
    """Say where the script has called this: train.py:42 (all_reduce)."""
    return f"{place(sys._getframe(1), name).short} ({name})"
