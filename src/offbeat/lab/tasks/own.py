"""A task of the user's own, `module:function`: found, made, and tried out before the race."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Task

_PAGE = "docs/races.md#a-task-of-your-own"
_CALLED_WITH = {
    "model": (),
    "optimizer": ("model",),
    "loss": ("model", "batch"),
    "batches": ("rank", "workers", "seed"),
    "evaluate": ("model",),
    "samples": ("batch",),
}


def made(module: str, function: str) -> Task:
    """Call the user's function, without arguments; ValueError says what is wrong with its task."""
    maker, name = _found(module, function), f"{module}:{function}"
    if not _can_be_called(maker, ()):
        raise ValueError(f"{name} is called without arguments, and needs some: see {_PAGE}")
    task = maker()
    if not isinstance(task, Task):
        raise ValueError(
            f"{name} must return an offbeat.lab.tasks.Task, got {_kind(task)}: see {_PAGE}"
        )
    _check(task, name)
    return task


def try_out(task: Task, name: str) -> None:
    """Use all that a task consists of once; ValueError says what does not return what it must."""
    with torch.random.fork_rng(devices=[]):
        model = task.model()
        _must_be(name, "model()", model, nn.Module, "a torch.nn.Module")
        optimizer = task.optimizer(model)
        _must_be(name, "optimizer(model)", optimizer, Optimizer, "a torch.optim.Optimizer")
        batches = task.batches(0, 1, 0)
        asked = "batches(rank, workers, seed)"
        _must_be(name, asked, batches, Iterator, "an iterator without end")
        loss = task.loss(model, next(batches))
        _must_be(name, "loss(model, batch)", loss, Tensor, "a tensor of one number")
        if task.target is None:  # nobody will evaluate it
            return
        model.eval()
        with torch.no_grad():
            found = task.evaluate(model)
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not _is_number(found[0]) or not (found[1] is None or _is_number(found[1])):
        raise ValueError(
            f"{name}: evaluate(model) must return the loss and the accuracy, two numbers, or None "
            f"for the second, got {found!r}: see {_PAGE}"
        )


def _found(module: str, function: str) -> Callable[[], Any]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"task {module}:{function}: {error}; looked in {here} too") from error
    maker: Callable[[], Any] | None = getattr(imported, function, None)
    if not callable(maker):
        near = difflib.get_close_matches(function, dir(imported), n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the module {module!r} has no function {function!r}{hint}")
    return maker


def _check(task: Task, name: str) -> None:
    """What can be seen without using it."""
    for part, told in _CALLED_WITH.items():
        value = getattr(task, part)
        if isinstance(value, nn.Module) or not _can_be_called(value, told):
            raise ValueError(
                f"{name}: {part} must be a function that can be called as "
                f"{part}({', '.join(told)}), got {_kind(value)}: see {_PAGE}"
            )
    if not isinstance(task.target, Target | None):
        raise ValueError(
            f"{name}: target must be such as Target('loss', 0.1), or None, got {task.target!r}"
        )
    steps: Any = task.budget_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{name}: budget_steps must be a whole number from 1 on, got {steps!r}")


def _can_be_called(function: Any, told: tuple[str, ...]) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*told)
    except TypeError:
        return False
    except ValueError:  # it has no signature: let it be seen when it is called
        pass
    return True


def _must_be(name: str, what: str, value: object, kind: Any, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ValueError(f"{name}: {what} must return {words}, got {_kind(value)}: see {_PAGE}")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one of the shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
