"""What a script written for torchrun finds in a simulation, where all workers share one process.

os.environ           RANK, LOCAL_RANK and the like of the worker that asks, as if all were on one
                     host: so `if LOCAL_RANK == 0` happens once
torch.distributed    a default process group once the script has made one, groups that it makes
                     later, and their collectives in virtual time (process_groups.py,
                     torch_collectives.py); the rest is refused
logging              handlers of the worker that has added them, and of no other
hydra, spawn, chdir  see one_process.py
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from offbeat.lab import one_process
from offbeat.lab.process_groups import ProcessGroups
from offbeat.lab.torch_collectives import COLLECTIVES, IN_STEPS
from offbeat.worlds.base import World
from offbeat.worlds.virtual import current_virtual_world

_NOT_SIMULATED = tuple(
    name
    for name in (
        "P2POp",
        "all_gather_coalesced",
        "all_reduce_coalesced",
        "batch_isend_irecv",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "recv_object_list",
        "send_object_list",
        "split_group",
    )
    if hasattr(dist, name)  # not every version of torch has them all
)


def make_process_group() -> None:
    """Have a default one from here on: on real processes attach() makes one, too."""
    if not dist.is_initialized():
        dist.init_process_group()


@contextmanager
def installed() -> Iterator[None]:
    """Put the stand-ins in place; outside of virtual workers everything is as ever."""
    no_member = dist.GroupMember.NON_GROUP_MEMBER
    environ, groups = os.environ, ProcessGroups(COLLECTIVES, IN_STEPS, no_member)
    saved = {name: getattr(dist, name) for name in (*groups.stand_ins, *_NOT_SIMULATED)}
    os.environ = _Environment(environ)  # type: ignore[assignment]  # noqa: B003
    handlers = _Handlers()
    logging.Logger.handlers = handlers  # type: ignore[assignment]
    for name, original in saved.items():
        stand_in = groups.stand_ins.get(name) or _refusal(name)
        setattr(dist, name, one_process.inside(stand_in, original))
    try:
        with one_process.installed():
            yield
    finally:
        for name, original in saved.items():
            setattr(dist, name, original)
        del logging.Logger.handlers
        handlers.close()
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
    """The environment, with the names that torchrun sets for each worker.

    Those a worker may set or delete as in a process of its own, as Lightning does when it ends.
    """

    def __init__(self, outside: MutableMapping[str, str]) -> None:
        self._outside = outside
        self._own: dict[int, dict[str, str | None]] = {}  # by rank; None where it was deleted

    def __getitem__(self, name: str) -> str:
        mine = self._of_this_worker()
        if (value := mine[name] if name in mine else self._outside[name]) is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        mine = self._of_this_worker()
        (mine if name in mine else self._outside)[name] = value

    def __delitem__(self, name: str) -> None:
        if name in (mine := self._of_this_worker()):
            self[name]  # raises where it was deleted before
            mine[name] = None
        else:
            del self._outside[name]

    def __iter__(self) -> Iterator[str]:
        both = {**self._outside, **self._of_this_worker()}
        return (name for name, value in both.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, str]:
        return dict(self)

    def _of_this_worker(self) -> dict[str, str | None]:
        if (world := current_virtual_world()) is None:
            return {}
        if (mine := self._own.get(world.rank)) is not None:
            return mine
        return self._own.setdefault(world.rank, self._as_torchrun(world))

    def _as_torchrun(self, world: World) -> dict[str, str | None]:
        return {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.rank),
            "LOCAL_WORLD_SIZE": str(world.size),
            "ROLE_RANK": str(world.rank),
            "ROLE_WORLD_SIZE": str(world.size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            # Hydra then raises errors instead of printing them, on whichever worker.
            "HYDRA_FULL_ERROR": self._outside.get("HYDRA_FULL_ERROR", "1"),
        }


class _Handlers:
    """`handlers` of every logger, a list for each worker: else all would log what one says."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, int], list[logging.Handler]] = {}
        self._loggers: list[logging.Logger] = []  # kept, so that no other gets their id

    def close(self) -> None:
        """Do what the end of a process does: flush and close what workers have added."""
        outside = {id(each) for logger in self._loggers for each in logger.handlers}
        for each in {id(each): each for added in self._lists.values() for each in added}.values():
            if id(each) not in outside:
                with suppress(OSError, ValueError):  # as the end of a process does
                    each.close()

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


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(
            f"torch.distributed.{name} is not simulated: there are the collectives of tensors and "
            "of objects, send and recv, and new_group"
        )

    return refuse
