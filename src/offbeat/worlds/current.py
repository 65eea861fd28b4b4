"""Which world is this? Virtual inside `offbeat.run`, real under torchrun, otherwise alone.

One process has one real world (or one alone), shared by all that is attached at a time: it opens
with the first attachment and closes with the last.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch.distributed as dist

from offbeat import launched
from offbeat.clusters import Cluster
from offbeat.errors import ExpelledError
from offbeat.records import RecordsFile, worker_file
from offbeat.worlds.alone import AloneWorld
from offbeat.worlds.base import World
from offbeat.worlds.real import RealWorld, under_torchrun
from offbeat.worlds.virtual import current_virtual_world

logger = logging.getLogger("offbeat")
_process_world: World | None = None
_users = 0


class _Recorded(NamedTuple):
    """The file that this process writes records into, and when its first world began."""

    path: Path
    file: RecordsFile
    began: float


_recorded: _Recorded | None = None


def rank() -> int:
    """Return this worker's rank: 0 where it is alone. Opens nothing."""
    if (world := current_virtual_world()) is not None:
        return world.rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if under_torchrun() else 0


def world_size() -> int:
    """Return the number of workers: 1 where this one is alone. Opens nothing."""
    if (world := current_virtual_world()) is not None:
        return world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun() else 1


def has_process_group() -> bool:
    """Say whether torch's own collectives, and what is built on them, can be used here."""
    return current_virtual_world() is None and dist.is_available() and dist.is_initialized()


def present_world() -> World | None:
    """Return the world that this code runs in, if one is open. Opens nothing."""
    virtual = current_virtual_world()
    return _process_world if virtual is None else virtual


def enter_world(
    pace: Cluster | str | None = None,
    seed: int | None = None,
    survivors: int | None = None,
    freeze: float | Literal["auto"] | None = None,
) -> World:
    """Return the world that this code runs in, opening it if need be; `leave_world` in return.

    `pace` is the cluster to replay on real processes, $OFFBEAT_PACE if None; `seed` that of its
    noise, $OFFBEAT_SEED if None. What happens is recorded in the folder $OFFBEAT_RECORDS, if set.
    With `survivors`, at least so many go on when a worker is lost; with `freeze`, also when one is
    silent for so long.
    """
    global _process_world, _users
    if (virtual := current_virtual_world()) is not None:
        if survivors is not None:
            virtual.survive(survivors)
            virtual.expect_answers(freeze)
        return virtual
    if _process_world is None:
        pace = os.environ.get("OFFBEAT_PACE") or None if pace is None else pace
        cluster = Cluster.load(pace) if isinstance(pace, str) else pace
        seed = int(os.environ.get("OFFBEAT_SEED", "0")) if seed is None else seed
        several = (dist.is_available() and dist.is_initialized()) or under_torchrun()
        if several:
            _process_world = RealWorld(cluster, seed, survivors=survivors, freeze=freeze)
        else:
            _process_world = AloneWorld(cluster, seed)
        if folder := os.environ.get("OFFBEAT_RECORDS"):
            _process_world.records = _records_file(folder, _process_world)
    _users += 1
    return _process_world


def enter_again(world: World) -> World:
    """Return the world in which this worker joins those who have expelled it; the old one ends."""
    global _process_world
    again = world.again()
    again.records = world.records
    if world is _process_world:
        _process_world = again
    return again


def come_back(error: ExpelledError) -> None:
    """Have what is attached in the present world join the others again; raise if nothing can."""
    world = present_world()
    for thing in [] if world is None else list(world.open):
        if hasattr(thing, "rejoin"):
            return thing.rejoin(error)  # type: ignore[no-any-return]
    raise error


def _records_file(folder: str, world: World) -> RecordsFile:
    """The file of this worker in this folder; a later world of this process writes on in it.

    Also where it has another rank by then: the file of that rank is another process's.
    """
    global _recorded
    path = worker_file(folder, world.rank, launched.attempt()).absolute()
    began = time.monotonic() - world.now()
    if _recorded is not None and _recorded.path.parent == path.parent:
        _recorded.file.go_on(began - _recorded.began)
        return _recorded.file
    if _recorded is not None:
        _recorded.file.close()
    _recorded = _Recorded(path, RecordsFile(path), began)
    return _recorded.file


def leave_world(world: World, error: BaseException | None = None) -> None:
    """Close the process's world with its last user, or at once if the user has failed.

    Whoever ends at once takes the others down with it, by `WorkerLostError`. With an error that
    all of them raise, everyone leaves in an orderly way instead, and raises that.
    """
    global _process_world, _users
    if getattr(error, "everywhere", False):
        error = None
    if world is not _process_world:
        if error is not None:
            world.fail(error)
        return
    _users -= 1
    if error is not None:
        _process_world, _users = None, 0
        world.fail(error)
    elif _users == 0:
        _process_world = None
        try:
            world.close()
        except BaseException as failure:
            world.fail(failure)
            if not isinstance(failure, ExpelledError):  # else all is done, and the others have left
                raise


def _forget_in_child() -> None:
    """A forked child has no part in the job: the world is its parent's to close."""
    global _process_world, _users
    _process_world, _users = None, 0


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _close_at_exit() -> None:
    """A script that ends without leaving its block has left it now; one that failed has failed."""
    if _process_world is not None:
        failure = getattr(sys, "last_value", None)
        if failure is None and _process_world.open and _process_world.size > 1:
            logger.warning(
                "worker %d ends without dp.close(), or leaving `with offbeat.attach(...)`: it does "
                "so now, with all others. What the script has evaluated or saved before lacks "
                "their last rounds",
                _process_world.rank,
            )
        for thing in list(_process_world.open):
            if failure is None:
                thing.close()
            else:
                thing.abandon(failure)
    if _recorded is not None:
        _recorded.file.close()
