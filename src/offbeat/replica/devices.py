"""Accelerators, where a call returns before its work is done. No other file knows of that.

`backward()` only queues kernels. A worker that arrived then, or read its clock, would say that it
has computed what it has only asked for: quorums, thresholds and shares would go by the time that
queueing takes. So the program waits here first, once a micro-batch. It cannot be left to the
background: DropCompute and LB-BSP decide by that very time whether there is another micro-batch.
And a round that is given the pile, on a stream of its own, must find it written.

On the CPU there is nothing to wait for. On an accelerator this has never been run.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Devices:
    """Those that hold a model's parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        found = {parameter.device for parameter in parameters}
        self._accelerators = [device for device in found if device.type != "cpu"]

    def finish(self) -> None:
        """Wait until what this program has queued is done."""
        for device in self._accelerators:
            kind = getattr(torch, device.type)
            if hasattr(kind, "current_stream"):
                kind.current_stream(device).synchronize()
            else:
                kind.synchronize()
