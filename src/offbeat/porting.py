"""Porting help: lines of a DDP script that go on working, and no longer mean what they did.

    clip_grad_norm_         clips this worker's own gradient; with DDP, the mean
    a rate set by hand      from a count of one's own steps; with DDP all make equally many
    scheduler.step()        after every step of one's own: likewise
    Adam                    has a momentum beneath that of a method which has one

Each is said once, by worker 0, as a `PortingWarning` that names the program's line and what to
write instead. Once in a process, or in a virtual run. Nobody is told what does not concern it: one
worker alone, a method that clips or steps as DDP does, a scheduler that goes by epochs.

Clipping is noticed however its function was imported, by what torch's functions look up themselves
in their module: that is replaced while something is attached whose gradients it would be about. In
a torch that has no such thing, nothing is noticed.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from threading import Lock
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.errors import PortingWarning
from offbeat.replica import Replica
from offbeat.worlds.places import is_ours, place
from offbeat.worlds.virtual import current_virtual_world

_LOOKED_UP = "_group_tensors_by_device_and_dtype"
_CLIPS = ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grad_value_")
_SILENCE = (
    "If it is meant so: warnings.filterwarnings('ignore', category=offbeat.errors.PortingWarning)"
)


class Porting:
    """What one attachment's program might have overlooked."""

    def __init__(self, optimizer: Optimizer, replica: Replica, scheduled: bool) -> None:
        self.parameters = replica.parameters
        self._optimizer = optimizer
        run = current_virtual_world()
        self._said = _said.setdefault(_process if run is None else run, set())
        self._moves = replica.shift is not None
        self._rates: list[float] | None = None
        self._groups: object = None
        self._changes = 0  # steps in a row before which a scheduler has set another rate
        told = replica.world.rank == 0 and replica.world.size > 1
        self._sees_rates = told and not scheduled
        self._even, self._world = replica.engine.even, replica.world
        # Where workers make steps of their own, they clip their own gradients: rightly.
        if told and not self._moves and "clipping" not in self._said:
            _watch(self)
        if told and getattr(replica.shift, "momentum", False) and _has_betas(optimizer):
            self._say("momentum", self._words_on_momentum(), sys._getframe(1))

    def close(self) -> None:
        """Look no longer."""
        _unwatch(self)

    # --- learning rates --------------------------------------------------------------------

    def counts_together(self) -> None:
        """The program has asked how far all workers are: what it sets now may come from that."""
        self._rates = None

    def before_step(self) -> None:
        """Notice a learning rate that is not what the last step has left."""
        left, self._rates = self._rates, None
        if left is None or self._groups is not self._optimizer.param_groups:
            return
        if _rates(self._optimizer) == left:
            self._changes = 0
        elif _has_scheduler(self._optimizer):
            self._changes += 1
            if self._changes == 2:  # by step, not by epoch
                self._sees_rates = False
                self._say("scheduler", self._words_on_schedulers(), sys._getframe(1))
        elif not self._even:
            self._sees_rates = False
            self._say("rates", self._words_on_rates(), sys._getframe(1))

    def after_step(self) -> None:
        """Remember what there is now."""
        if self._sees_rates and (self._world.deals or not self._even):  # else all step alike
            self._groups = self._optimizer.param_groups  # another list, once a state was loaded
            self._rates = _rates(self._optimizer)

    def _words_on_rates(self) -> str:
        use = "each steps with its own" if self._moves else "a round is applied with their mean"
        return (
            "the learning rate was set by hand before this step. With this method workers make "
            "different numbers of steps: a rate that follows a count of one's own steps differs "
            f"between them, and {use}. Set it from dp.ticks, which counts as many rounds as "
            "synchronous workers would have made by now, or hand a scheduler to "
            f"offbeat.attach(..., scheduler=scheduler). {_SILENCE}"
        )

    def _words_on_schedulers(self) -> str:
        why = "Where data are dealt, as by offbeat.Deal," if self._even else "With this method"
        return (
            f"a scheduler is stepped after every step. {why} workers make different "
            "numbers of steps, so it runs ahead on a fast one, past its end if need be. Remove "
            "scheduler.step(), and write offbeat.attach(..., scheduler=scheduler): then it ends "
            f"where it does with DistributedDataParallel. {_SILENCE}"
        )

    def _words_on_momentum(self) -> str:
        name = type(self._optimizer).__name__
        return (
            f"{name} has a momentum, betas[0], beneath the method's own, which learns worse than "
            "either alone. Give it betas=(0.0, ...), or take DPSGD or DmSGD, which leave the "
            f"momentum to the optimizer. {_SILENCE}"
        )

    # --- clipping --------------------------------------------------------------------------

    def clipped(self, frame: FrameType) -> None:
        """The program has clipped gradients that are attached."""
        by_value = frame.f_code.co_name == "clip_grad_value_"
        most = "1.0" if by_value else f"{frame.f_locals.get('max_norm', 1.0)}"
        but = ", which clips its norm; it cannot be clipped by value" if by_value else ""
        words = (
            "this clips the worker's own gradient. With DistributedDataParallel the same line "
            "clips the mean over all workers: for that, remove it, and write "
            f"offbeat.attach(..., clip_norm={most}){but}. {_SILENCE}"
        )
        self._say("clipping", words, frame)

    def _say(self, what: str, words: str, frame: FrameType) -> None:
        if what not in self._said:
            self._said.add(what)
            where = place(frame, what)
            warnings.warn_explicit(words, PortingWarning, where.file, where.line, registry={})


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def _has_betas(optimizer: Optimizer) -> bool:
    return any(float(group.get("betas", (0.0,))[0]) > 0 for group in optimizer.param_groups)


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Whether one of torch's schedulers is there for it.

    Most leave a mark on the optimizer; `ReduceLROnPlateau` must be looked for.
    """
    return hasattr(optimizer.step, "_wrapped_by_lr_sched") or any(
        getattr(each, "optimizer", None) is optimizer
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler)
    )


# --- noticing that somebody clips -----------------------------------------------------------


class _Process:
    """What stands for this process where a virtual run stands for itself."""


_process = _Process()
_said: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
_lock = Lock()
_watched: list[Porting] = []
_original: Any = getattr(clip_grad, _LOOKED_UP, None)


def _watch(porting: Porting) -> None:
    with _lock:
        _watched.append(porting)
        if _original is not None:
            setattr(clip_grad, _LOOKED_UP, _looked_up)


def _unwatch(porting: Porting) -> None:
    with _lock:
        if porting in _watched:
            _watched.remove(porting)
        # Somebody else may have replaced it since.
        if not _watched and getattr(clip_grad, _LOOKED_UP, None) is _looked_up:
            setattr(clip_grad, _LOOKED_UP, _original)


def _looked_up(tensors: Any, *arguments: Any, **settings: Any) -> Any:
    """What torch's own function does; but see first who has called, and whose gradients it has."""
    if _watched and not torch.compiler.is_compiling():
        _look(sys._getframe(1), tensors[0])
    return _original(tensors, *arguments, **settings)


def _look(frame: FrameType, gradients: list[Tensor]) -> None:
    if frame.f_code.co_name not in _CLIPS or is_ours(frame):
        return
    clipped = {id(gradient) for gradient in gradients}
    for porting in list(_watched):
        if any(id(parameter.grad) in clipped for parameter in porting.parameters):
            _unwatch(porting)
            porting.clipped(frame)


def _forget_in_child() -> None:
    """A forked child has no part in the job."""
    _watched.clear()


os.register_at_fork(after_in_child=_forget_in_child)
