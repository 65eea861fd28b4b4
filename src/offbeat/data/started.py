"""Which DataLoader has started a process, and how far its loop is.

A DataLoader tells its data set nothing: its processes iterate over copies, ahead of the loop. But
they are started in the middle of making the loader's iterator, which is then found on the stack;
and that iterator counts the tasks (batches) that it has handed to the loop, by a name that is not
public. When a loop is left, its iterator goes: what it had counted is noted in that moment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet, finalize, ref

from torch.utils.data import IterableDataset, dataloader


class Started:
    """The iterator of a DataLoader that has started processes."""

    def __init__(self, iterator: object) -> None:
        self._iterator = ref(iterator)
        self._last: dict[str, Any] | None = None
        finalize(iterator, self._note, vars(iterator)).atexit = False

    def _note(self, facts: dict[str, Any]) -> None:
        """The iterator goes."""
        self._last = {"tasks": facts.get("_rcvd_idx"), "pids": _pids(facts)}
        self._last["in_order"] = facts.get("_in_order", True)

    def _facts(self) -> dict[str, Any]:
        if (iterator := self._iterator()) is not None:
            self._note(vars(iterator))
        assert self._last is not None
        return self._last

    def is_of(self, iterator: object) -> bool:
        """Whether this is that iterator."""
        return self._iterator() is iterator

    def has(self, pid: int) -> bool:
        """Whether it has started this process."""
        return pid in self._facts()["pids"]

    @property
    def alive(self) -> bool:
        """Whether it may still be asked for batches."""
        return self._iterator() is not None

    def tasks(self) -> int:
        """How many tasks it has handed to the loop: the first ones."""
        facts = self._facts()
        if not facts["in_order"]:
            raise RuntimeError(
                "a DataLoader with in_order=False does not say which batches the loop has seen: "
                "leave that out to save the position of shards"
            )
        if facts["tasks"] is None:
            raise RuntimeError(
                "this DataLoader does not say how far its loop is: save between epochs, or use "
                "torch's own DataLoader"
            )
        return int(facts["tasks"])


def _pids(facts: dict[str, Any]) -> set[int]:
    return {each.pid for each in facts.get("_workers", ())}


def starting() -> object | None:
    """The iterator of a DataLoader that starts a process just now, in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            caller = frame.f_locals.get("self")
            if isinstance(caller, dataloader._BaseDataLoaderIter):
                return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def task_here() -> Callable[[], int | None]:
    """In a DataLoader's process: what tells the number of the task that it is at."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back  # type: ignore[assignment]
    return lambda: None if frame is None else frame.f_locals.get("idx")


# --- processes that are forked: nothing is pickled, so nobody is asked ------------------------

_to_tell: WeakSet[Any] = WeakSet()


def tell_of_forks(data_set: object) -> None:
    """Have its `forks(iterator)` called whenever a DataLoader forks that may read from it."""
    _to_tell.add(data_set)


def _before_fork() -> None:
    if not _to_tell or (iterator := starting()) is None:
        return
    known, dataset = list(_to_tell), getattr(iterator, "_dataset", None)
    if not (told := [each for each in known if each is dataset]):
        told = known if isinstance(dataset, IterableDataset) else []  # it may read from these
    for each in cast(list[Any], told):
        each.forks(iterator)


os.register_at_fork(before=_before_fork)
