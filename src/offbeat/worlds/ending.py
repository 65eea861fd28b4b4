"""destroy_process_group() while something is attached: refused, before anything is destroyed.

The others' rounds need this worker until it has closed. Without its process group a worker would
fail somewhere later, or not at all, by the method and by chance.

Scripts import the function by its name, long before they attach. So it is not replaced: while a
real world is open, the code inside it is.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from types import FunctionType
from typing import Any

from torch.distributed import distributed_c10d

from offbeat.errors import StillAttachedError
from offbeat.worlds.base import World
from offbeat.worlds.places import place

_lock = threading.Lock()
_open: list[World] = []
_function: Any = inspect.unwrap(distributed_c10d.destroy_process_group)
# Not of a torch whose function we do not know: there the world's next verb says what is wrong.
_known = isinstance(_function, FunctionType) and not _function.__closure__
_original: Any = (
    FunctionType(_function.__code__, _function.__globals__, "", _function.__defaults__)
    if _known
    else _function
)


def refuse(world: World) -> None:
    """Raise what a program hears that ends its process group too early."""
    where = place(sys._getframe(1), "").short
    raise StillAttachedError(
        f"{where}: destroy_process_group() while worker {world.rank} is still attached: call "
        "dp.close() first, or leave the `with offbeat.attach(...)` block first; until then the "
        "others need this worker"
    )


def failure() -> BaseException | None:
    """The error that the program is about to end with: it ends its process group on the way."""
    error = sys.exc_info()[1]
    leaves = isinstance(error, SystemExit) and not error.code
    return None if leaves else error


def guard(world: World) -> None:
    """Refuse to end the default process group from now on, until `release`."""
    with _lock:
        _open.append(world)
        if len(_open) == 1:
            _exchange_code()


def release(world: World) -> None:
    """Let torch be as it was."""
    with _lock:
        if world in _open:
            _open.remove(world)
            if not _open:
                _restore_code()


def destroy(group: Any = None) -> None:
    """What torch's function does meanwhile."""
    if group is None or group == distributed_c10d.GroupMember.WORLD:
        for world in list(_open):
            if (error := failure()) is None:
                refuse(world)
            else:
                for thing in list(world.open):
                    thing.abandon(error)
    _original(group)


def _stand_in(group: Any = None) -> None:
    # Only its code is used, with torch's globals.
    from offbeat.worlds import ending

    ending.destroy(group)


def _exchange_code() -> None:
    if _known:
        _function.__code__ = _stand_in.__code__


def _restore_code() -> None:
    if _known:
        _function.__code__ = _original.__code__


def _forget_in_child() -> None:
    """A forked child has no part in the job."""
    _open.clear()
    _restore_code()


os.register_at_fork(after_in_child=_forget_in_child)
