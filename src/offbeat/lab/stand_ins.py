"""What a script written for torchrun finds in a simulation, where all workers share one process.

os.environ           RANK and WORLD_SIZE of the worker that asks; LOCAL_RANK 0: each worker
                     stands for a machine of its own
torch.distributed    a default process group once the script has made one: its rank and size,
                     all_reduce, broadcast and barrier, in virtual time; the rest is refused
logging              handlers of the worker that has added them, and of no other
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.worlds.base import Channel, Op, Work
from offbeat.worlds.virtual import VirtualWorld, current_virtual_world

_NOT_SIMULATED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


@contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins in place; outside of virtual workers everything is as ever."""
    environ, group = os.environ, _ProcessGroup()
    saved = {name: getattr(dist, name) for name in (*group.stand_ins, *_NOT_SIMULATED)}
    os.environ = _Environment(environ)  # type: ignore[assignment]  # noqa: B003
    logging.Logger.handlers = _Handlers()  # type: ignore[assignment]
    for name, original in saved.items():
        stand_in = group.stand_ins.get(name) or _refusal(name)
        setattr(dist, name, _inside(stand_in, original))
    try:
        yield
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)
        del logging.Logger.handlers
        os.environ = environ  # noqa: B003


@contextmanager
def process_group_kept() -> Iterator[None]:
    """Let a script end its process group, but only when this block ends: others still need it."""
    destroy, wanted = dist.destroy_process_group, []

    def later(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            wanted.append(True)
        else:
            destroy(group)

    dist.destroy_process_group = later
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
        if wanted and dist.is_initialized():
            destroy()


class _Environment(MutableMapping[str, str]):
    """The environment, with the four names that torchrun sets for each worker."""

    def __init__(self, outside: MutableMapping[str, str]) -> None:
        self._outside = outside

    def __getitem__(self, name: str) -> str:
        mine = self._of_this_worker()
        return mine[name] if name in mine else self._outside[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._outside[name] = value

    def __delitem__(self, name: str) -> None:
        del self._outside[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._outside, **self._of_this_worker()})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, str]:
        return dict(self)

    def _of_this_worker(self) -> dict[str, str]:
        if (world := current_virtual_world()) is None:
            return {}
        return {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }


class _Handlers:
    """`handlers` of every logger, a list for each worker: else all would log what one says."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, int], list[logging.Handler]] = {}
        self._loggers: list[logging.Logger] = []  # kept, so that no other gets their id

    def __get__(self, logger: logging.Logger | None, owner: type) -> Any:
        if logger is None:
            return self
        outside = logger.__dict__.setdefault("handlers", [])
        if (world := current_virtual_world()) is None:
            return outside
        key = (id(logger), world.rank)
        if key not in self._lists:
            self._lists[key] = list(outside)
            self._loggers.append(logger)
        return self._lists[key]

    def __set__(self, logger: logging.Logger, handlers: list[logging.Handler]) -> None:
        if (world := current_virtual_world()) is None or "handlers" not in logger.__dict__:
            logger.__dict__["handlers"] = handlers
        else:
            self._lists[id(logger), world.rank] = handlers
            self._loggers.append(logger)


class _ProcessGroup:
    """The default process group of every worker, over the verbs of the virtual world."""

    def __init__(self) -> None:
        self._made: dict[int, Channel] = {}  # by rank, of those who have initialised it
        self.stand_ins: dict[str, Callable[..., Any]] = {
            "init_process_group": self._init,
            "destroy_process_group": lambda *_: self._made.pop(_world().rank, None),
            "is_initialized": lambda: _world().rank in self._made,
            "get_rank": lambda *_: self._checked().rank,
            "get_world_size": lambda *_: self._checked().size,
            "get_backend": lambda *_: "gloo",
            "barrier": lambda *_, **__: self._all_reduce(torch.zeros(1)),
            "all_reduce": self._all_reduce,
            "broadcast": self._broadcast,
        }

    def _init(self, *_: object, **__: object) -> None:
        world = _world()
        self._made[world.rank] = world.channel("torch.distributed")

    def _checked(self) -> VirtualWorld:
        world = _world()
        if world.rank not in self._made:
            raise ValueError(
                "the default process group has not been initialized: call init_process_group(), "
                "or ask offbeat.rank() and offbeat.world_size()"
            )
        return world

    def _all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        world, ops = self._checked(), {"SUM": "sum", "AVG": "sum", "MAX": "max", "MIN": "min"}
        name = str(getattr(op, "name", op)).rpartition(".")[2]
        if name not in ops:
            raise NotImplementedError(f"all_reduce by {name} is not simulated, only {list(ops)}")
        kind: Op = ops[name]  # type: ignore[assignment]
        work = self._made[world.rank].all_reduce(tensor, kind)
        work.wait()
        if name == "AVG":
            tensor.div_(world.size)
        return work if async_op else None

    def _broadcast(
        self, tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False
    ) -> Work | None:
        work = self._made[self._checked().rank].broadcast(tensor, src)
        work.wait()
        return work if async_op else None


def _world() -> VirtualWorld:
    world = current_virtual_world()
    assert world is not None, "stand-ins are called inside virtual workers only"
    return world


def _inside(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, **kwargs: Any) -> Any:
        chosen = original if current_virtual_world() is None else stand_in
        return chosen(*args, **kwargs)

    return either


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(
            f"torch.distributed.{name} is not simulated: there are all_reduce, broadcast and "
            "barrier of the default group"
        )

    return refuse
