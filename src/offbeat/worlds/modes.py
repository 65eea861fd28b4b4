"""Torch's grad mode and autocast, which belong to a thread: put by, and put back.

The tasks of virtual time share one thread, and each has its own.
"""

from __future__ import annotations

import torch

from offbeat.errors import WorldError

grad_enabled = torch.is_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled
any_autocast = torch._C._is_any_autocast_enabled
graph_task = torch._C._current_graph_task_id

Autocast = list[tuple[str, bool, torch.dtype]]


def put_by() -> tuple[bool, Autocast]:
    """Have the defaults of grad mode and autocast; return what there was."""
    if graph_task() != -1:
        raise WorldError(
            "a verb that blocks was called inside backward(), in a gradient hook: "
            "workers of the virtual world cannot be switched there"
        )
    if torch.is_inference_mode_enabled():
        raise WorldError("a verb that blocks was called under inference_mode: use no_grad")
    grad, autocast = grad_enabled(), _autocast_state() if any_autocast() else []
    put_back(True, [(device, False, dtype) for device, _, dtype in autocast])
    return grad, autocast


def put_back(grad: bool, autocast: Autocast) -> None:
    """Have what was put by again."""
    set_grad_enabled(grad)
    for device, enabled, dtype in autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _autocast_state() -> Autocast:
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
