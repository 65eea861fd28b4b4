"""Whether what a user hands to attach() can be attached; if not, what to do instead."""

from __future__ import annotations

import gc
import inspect
import logging
import math
import os
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.algorithm import Algorithm, check_choice, is_number
from offbeat.schedule import KINDS
from offbeat.worlds.current import has_process_group, rank

logger = logging.getLogger("offbeat")

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def check_arguments(
    model: object,
    optimizer: object,
    algorithm: object,
    scheduler: object,
    schedule_by: str,
    clip_norm: float | None,
    nonfinite: str,
    bucket_bytes: int,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_not_wrapped(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__}.step() needs a closure, which it calls several times: "
            "that cannot be averaged over workers; use a first-order optimizer such as SGD or AdamW"
        )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be an offbeat algorithm such as offbeat.SyncSGD(), got {algorithm!r}"
        )
    algorithm.check_optimizer(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) or (
        scheduler is not None and not isinstance(scheduler, LRScheduler)
    ):
        raise TypeError(
            f"scheduler must be an LRScheduler whose step() needs no metric, "
            f"got {type(scheduler).__name__}"
        )
    if scheduler is not None and optimizer not in _held(scheduler.optimizer):
        raise ValueError("scheduler belongs to another optimizer than the one to attach")
    check_choice("schedule_by", schedule_by, KINDS)
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm must be a number above 0, got {clip_norm}")
    check_choice("nonfinite", nonfinite, ("raise", "skip"))
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")


def _held(optimizer: object) -> list[object]:
    """An optimizer, and the one in it, if it is a framework's wrapper."""
    return [optimizer, getattr(optimizer, "optimizer", None)]


def _check_not_wrapped(model: nn.Module) -> None:
    """Two that reduce the same gradients would do so twice, without a word."""
    for name, module in model.named_modules():
        found = {each.__name__ for each in type(module).__mro__} & set(_WRAPPERS)
        if found:
            kind, where = found.pop(), f"its part {name!r}" if name else "model"
            raise TypeError(
                f"{where} is wrapped in {kind}, which reduces gradients itself: "
                "do not wrap it, and make the optimizer of plain parameters"
            )
    mine = {id(parameter) for parameter in model.parameters()}
    for wrapper in _reducers():
        if any(id(parameter) in mine for parameter in wrapper.module.parameters()):
            raise TypeError(
                "model is inside a DistributedDataParallel wrapper, which goes on reducing its "
                "gradients: do not wrap it, and make the optimizer of plain parameters"
            )


def wraps_anything() -> bool:
    """Say whether a DistributedDataParallel wrapper lives in this process."""
    return any(True for _ in _reducers())


def _reducers() -> Iterator[DistributedDataParallel]:
    """All wrappers that live in this process, whoever holds them.

    Neither a module nor its parameters know of the wrapper around them. But an object refers to its
    class, so the garbage collector finds all wrappers in one pass over what it tracks: some 20 ms,
    in a process with little but torch. Where there is no process group, there are no wrappers.
    """
    if has_process_group():
        kinds = [DistributedDataParallel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        for each in gc.get_referrers(*kinds):
            if issubclass(type(each), DistributedDataParallel):
                yield each


def survives(asked: bool | None, min_workers: int, freeze_s: object, algorithm: Algorithm) -> bool:
    """Whether to go on when a worker is lost: as asked for, or as $OFFBEAT_SURVIVE says.

    That is said for a whole job. A method that cannot do it does without, and says so.
    """
    if isinstance(min_workers, bool) or not isinstance(min_workers, int) or min_workers < 1:
        raise ValueError(f"min_workers must be a number of workers above 0, got {min_workers!r}")
    if freeze_s not in (None, "auto") and not (is_number(freeze_s) and freeze_s > 0):
        raise ValueError(
            f'freeze_s must be a number of seconds above 0, "auto" or None, got {freeze_s!r}'
        )
    if freeze_s not in (None, "auto") and asked is False:
        raise ValueError("freeze_s needs survive=True: nobody goes on without a frozen worker")
    if asked is not None:
        return bool(asked)
    text = os.environ.get("OFFBEAT_SURVIVE", "") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"OFFBEAT_SURVIVE must be 0 or 1, got {text!r}")
    if text == "1" and not algorithm.survives:
        if rank() == 0:
            logger.warning(
                "OFFBEAT_SURVIVE=1, but %s cannot go on when a worker is lost: a loss ends the run",
                type(algorithm).__name__,
            )
        return False
    return text == "1"
