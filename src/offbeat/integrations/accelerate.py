"""prepare(): a loop of Accelerate's over an algorithm of offbeat, instead of over DDP.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = accelerator.prepare(loader)                    # as ever; or deal the data
    model, optimizer, dp = prepare(accelerator, model, optimizer, offbeat.EagerSGD())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    dp.close()

Mixed precision, devices and accumulation are Accelerate's, the mean over workers is offbeat's.
Clip by `prepare(..., clip_norm=1.0)`: `accelerator.clip_grad_norm_` would clip this worker's own
gradient. Hand a scheduler over by `scheduler=`: one that `accelerator.prepare` has wrapped makes as
many steps as there are workers, for every step of one of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.accelerate needs Accelerate: pip install 'offbeat[accelerate]'"
    ) from error

from offbeat.algorithm import Algorithm
from offbeat.attach import Attachment, attach
from offbeat.integrations.common import check_holds, check_version, plain

check_version("accelerate", [(Accelerator, "prepare_model"), (Accelerator, "prepare_optimizer")])

_ALONE = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
_LAUNCHED = {
    "ACCELERATE_USE_FSDP": ("--use_fsdp", "fsdp_plugin"),
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", "deepspeed_plugin"),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", "megatron_lm_plugin"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", "parallelism_config"),
}


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    algorithm: Algorithm | None = None,
    **settings: Any,
) -> tuple[nn.Module, Any, Attachment]:
    """Prepare model and optimizer as Accelerate does, without DDP, and attach them.

    `settings` are those of `offbeat.attach`. Close what comes third at the end: `dp.close()`.
    """
    check(accelerator)
    if getattr(accelerator, "ddp_handler", None) is not None:
        raise ValueError(
            "this Accelerator has DistributedDataParallelKwargs, and DDP is not used beneath "
            "offbeat: leave out that kwargs handler"
        )
    if (scheduler := settings.get("scheduler")) is not None:
        settings["scheduler"] = getattr(scheduler, "scheduler", scheduler)
    inner = plain(optimizer)
    model = without_ddp(accelerator, model)
    check_holds(model, inner)
    prepared = accelerator.prepare_optimizer(optimizer)
    dp = attach(model, inner, algorithm, **settings)
    accumulate_by(model, dp)
    return model, prepared, dp


def check(accelerator: Any) -> None:
    """Raise ValueError where Accelerate itself would reduce, shard or hand out batches."""
    for flag, plugin in (both for name, both in _LAUNCHED.items() if _is_set(name)):
        raise ValueError(
            f"accelerate launch has {flag}, or Accelerator a {plugin}, and offbeat averages whole "
            "models: leave it out, or run `accelerate config` anew without it"
        )
    if (kind := accelerator.distributed_type.name) not in _ALONE:
        raise ValueError(
            f"this Accelerator shards or reduces by {kind}, and offbeat averages whole models: "
            "leave out that plugin"
        )
    if getattr(accelerator, "dispatch_batches", False):
        raise ValueError(
            "dispatch_batches has worker 0 hand out every batch, and all wait for it: leave it "
            "out, and deal the data by offbeat.Deal or offbeat.DealShards"
        )


def without_ddp(accelerator: Any, model: nn.Module) -> nn.Module:
    """Place a model and set its precision, and have `accelerator.prepare` leave it as it is."""
    if getattr(model, "_is_accelerate_prepared", False):
        return model
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    prepared._is_accelerate_prepared = True  # type: ignore[assignment]
    return prepared


def accumulate_by(model: nn.Module, dp: Attachment) -> None:
    """Have `accelerator.no_sync(model)` and `accumulate(model)` be `dp.no_sync()`.

    They call what a model has by that name, as a DDP wrapper does.
    """
    object.__setattr__(model, "no_sync", _NoSync(dp))


class _NoSync:
    """`dp.no_sync` as an attribute of a model; a copy of the model has nothing of it."""

    def __init__(self, dp: Attachment) -> None:
        self._dp = dp

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._dp.closed else self._dp.no_sync()

    def __deepcopy__(self, memory: dict[int, Any]) -> Any:
        return nullcontext

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return nullcontext


def _is_set(name: str) -> bool:
    environment: Mapping[str, str] = os.environ
    return environment.get(name, "false").lower() in ("1", "true")
