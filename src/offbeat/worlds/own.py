"""The program's own collectives: knowing that it waits in one, and where.

While something is attached, a program may call torch.distributed itself: a barrier, the all-reduce
of a metric, a broadcast. A worker that waits there for another one cannot step meanwhile, and that
other one may be waiting for its step. So for as long as it waits, what is attached is *away*.

Every synchronous collective of torch.distributed ends in `Work.wait`, however its function was
imported. While a real world is open, that method is replaced, for the thread that opened the world:
other threads of the program do not step. Likewise `monitored_barrier` and the making of groups,
which do not go through a `Work`. What waits in C++ alone is not seen: DDP's reducer, functional
collectives, `work.get_future().wait()`.

A collective that not all ranks issue makes the others wait for ever, and nothing says so. So who
waits longer than `$OFFBEAT_STUCK_S` seconds (300) warns, and says where everybody is. Each worker
publishes where it waits, from a thread that looks only now and then: a call costs two assignments.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._C._distributed_c10d import ProcessGroup
from torch._C._distributed_c10d import Work as C10dWork
from torch.distributed import distributed_c10d

from offbeat.errors import StuckWarning
from offbeat.worlds.places import Place, place

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_LOOKS = 10  # within the limit: how finely it is told


class _Stay(NamedTuple):
    place: Place
    since: float


class OwnCollectives:
    """What one worker's program does in torch.distributed while its world is open."""

    def __init__(self, world: RealWorld) -> None:
        self._world = world
        self._limit_s = world.stuck_s
        self._program = threading.get_ident()
        self._stay: _Stay | None = None
        self._watching = False
        self._closed = threading.Event()
        _watched.append(self)
        if len(_watched) == 1:
            _replace_all()

    def close(self) -> None:
        """Let torch be as it was."""
        self._closed.set()
        if self in _watched:
            _watched.remove(self)
            if not _watched:
                _restore_all()

    @contextmanager
    def waiting(self, verb: str) -> Iterator[None]:
        """The program is in a call that may wait for others."""
        if threading.get_ident() != self._program or self._stay is not None:
            yield
            return
        here = place(sys._getframe(3), verb)
        self._stay = _Stay(here, time.monotonic())
        try:
            if not self._watching:
                self._watching = True
                self._world.spawn("own-collectives", self._watch)
            with self._world.elsewhere(str(here)):
                yield
        finally:
            self._stay = None

    # --- telling who waits where -----------------------------------------------------------

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone: others see to that
            published: _Stay | None = None
            warned: _Stay | None = None
            while not self._closed.wait(self._limit_s / _LOOKS):
                stay = self._stay
                if stay is not published:
                    where = b"" if stay is None else str(stay.place).encode()
                    self._world.clients.mine().set(f"own/{self._world.rank}", where)
                    published = stay
                if stay is None or stay is warned:
                    continue
                if time.monotonic() - stay.since >= self._limit_s:
                    warned = stay
                    _warn(self._words(stay), stay.place)

    def _words(self, stay: _Stay) -> str:
        me = self._world.rank
        others = "; ".join(self._whereabouts(rank) for rank in self._world.members if rank != me)
        return (
            f"for {time.monotonic() - stay.since:.0f} s worker {me} has waited at {stay.place}; "
            f"{others}. A collective ends when all of its ranks have called it: look for a branch "
            "that not all ranks take. To be told later, set OFFBEAT_STUCK_S (seconds)"
        )

    def _whereabouts(self, rank: int) -> str:
        client, key = self._world.clients.mine(), f"own/{rank}"
        where = bytes(client.get(key)).decode() if client.check([key]) else ""
        return f"worker {rank} waits at {where}" if where else f"worker {rank} is in no collective"


def _warn(words: str, place: Place) -> None:
    """Warn as if from where the program waits; each time, not once for a line."""
    try:
        warnings.warn_explicit(words, StuckWarning, place.file, place.line, registry={})
    except StuckWarning as error:  # warnings are errors here, and this thread is not the program's
        sys.stderr.write(f"{place.file}:{place.line}: StuckWarning: {error}\n")


# --- replacing ------------------------------------------------------------------------------

_watched: list[OwnCollectives] = []
_TARGETS: tuple[tuple[Any, str, str], ...] = (
    (C10dWork, "wait", "work.wait"),
    (ProcessGroup, "monitored_barrier", "monitored_barrier"),
    (distributed_c10d, "_new_group_with_tag", "new_group"),
)
_originals: list[tuple[Any, str, Any, Any]] = []


def _replace_all() -> None:
    for owner, name, verb in _TARGETS:
        replacement = _replacement(getattr(owner, name), verb, is_wait=owner is C10dWork)
        # As it lies there: what getattr gives of a class is no method any more.
        _originals.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)


def _restore_all() -> None:
    while _originals:
        owner, name, original, replacement = _originals.pop()
        if getattr(owner, name) is replacement:  # somebody else may have replaced it since
            setattr(owner, name, original)


def _replacement(original: Callable[..., Any], verb: str, is_wait: bool) -> Callable[..., Any]:
    def wait(*arguments: Any, **settings: Any) -> Any:
        # A receive of Gloo's is never said to be complete; then it counts as a wait, briefly.
        if not _watched or (is_wait and arguments[0].is_completed()):
            return original(*arguments, **settings)
        with _watched[-1].waiting(verb):
            return original(*arguments, **settings)

    return wait


def _forget_in_child() -> None:
    """A forked child has no part in the job."""
    _watched.clear()
    _restore_all()


os.register_at_fork(after_in_child=_forget_in_child)
