"""Whether what a user hands to attach() can be attached; if not, what to do instead."""

from __future__ import annotations

import gc
import inspect
import math

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.algorithm import Algorithm
from offbeat.worlds import has_process_group

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")


def check_arguments(
    model: object,
    optimizer: object,
    algorithm: object,
    scheduler: object,
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
    if isinstance(scheduler, ReduceLROnPlateau) or (
        scheduler is not None and not isinstance(scheduler, LRScheduler)
    ):
        raise TypeError(
            f"scheduler must be an LRScheduler whose step() needs no metric, "
            f"got {type(scheduler).__name__}"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError("scheduler belongs to another optimizer than the one to attach")
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm must be a number above 0, got {clip_norm}")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f'nonfinite must be "raise" or "skip", got {nonfinite!r}')
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")


def _check_not_wrapped(model: nn.Module) -> None:
    """Two that reduce the same gradients would do so twice, without a word."""
    # Without a process group there is no such wrapper, and nothing to search all of memory for.
    owners = _owners(model) if has_process_group() else []
    if any(isinstance(owner, DistributedDataParallel) for owner in owners):
        raise TypeError(
            "model is the inner module of a DistributedDataParallel wrapper, which goes on "
            "reducing its gradients: do not wrap it, and make the optimizer of plain parameters"
        )
    for name, module in model.named_modules():
        found = {kind.__name__ for kind in type(module).__mro__} & set(_WRAPPERS)
        if found:
            wrapper, where = found.pop(), f"its part {name!r}" if name else "model"
            raise TypeError(
                f"{where} is wrapped in {wrapper}, which reduces gradients itself: "
                "do not wrap it, and make the optimizer of plain parameters"
            )


def _owners(model: nn.Module) -> list[object]:
    """Modules that hold this one: in the table of submodules that each has."""
    tables = [each for each in gc.get_referrers(model) if isinstance(each, dict)]
    attributes = [each for table in tables for each in gc.get_referrers(table)]
    holders = [
        each for table in attributes if isinstance(table, dict) for each in gc.get_referrers(table)
    ]
    return [each for each in (*attributes, *holders) if isinstance(each, nn.Module)]
