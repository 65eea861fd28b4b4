"""What a race trains: one small file per task, or a function of yours that returns a Task."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from offbeat.lab.goals import Target
from offbeat.lab.tasks import (
    cifar10,
    digits,
    fashion,
    hyperplane,
    logistic,
    noisy,
    own,
    quadratic,
    text,
    timing,
)
from offbeat.lab.tasks.base import Batch, Task

__all__ = ["TASKS", "Batch", "Target", "Task", "find"]

TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits.task,
    "noisy": noisy.task,
    "quadratic": quadratic.task,
    "logistic": logistic.task,
    "hyperplane": hyperplane.task,
    "text": text.task,
    "text-adamw": text.adamw,
    "fashion": fashion.task,
    "fashion-skewed": fashion.skewed,
    "cifar10": cifar10.task,
    "timing": timing.task,
}

_WITH_MORE = ("cifar10", "fashion", "fashion-skewed", "quadratic")
"""Tasks after whose name a folder may follow, or how much noise."""


def find(name: str, *, tries: bool = False) -> Task:
    """Make a task by its name, or by `module:function`; some names take more after a colon.

    `tries` says to try out one that is the user's own.
    """
    head, colon, rest = name.partition(":")
    if head in _WITH_MORE:
        return TASKS[head](rest)
    if name in TASKS:
        return TASKS[name]()
    if not colon:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no task is called {name!r}{hint}\nThere are {', '.join(TASKS)}, "
            "and your own as module:function"
        )
    task = own.made(head, rest)
    if tries:
        own.try_out(task, name)
    return task
