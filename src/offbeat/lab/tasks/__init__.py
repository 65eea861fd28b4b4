"""What a race trains: one small file per task, or a function of yours that returns a Task."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from offbeat.lab.tasks import (
    cifar10,
    digits,
    fashion,
    hyperplane,
    logistic,
    noisy,
    quadratic,
    text,
    timing,
)
from offbeat.lab.tasks.base import Batch, Task

__all__ = ["TASKS", "Batch", "Task", "find"]

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


def find(name: str) -> Task:
    """Make a task by its name, or by `module:function`; some names take more after a colon."""
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
    return _users_own(head, rest)


def _users_own(module: str, function: str) -> Task:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"task {module}:{function}: {error}; looked in {here} too") from error
    maker = getattr(imported, function, None)
    if not callable(maker):
        near = difflib.get_close_matches(function, dir(imported), n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the module {module!r} has no function {function!r}{hint}")
    task = maker()
    if not isinstance(task, Task):
        raise ValueError(
            f"{module}:{function} returned {type(task).__name__}, not an offbeat.lab.tasks.Task"
        )
    return task
