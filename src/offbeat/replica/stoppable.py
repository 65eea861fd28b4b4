"""Leaving a gradient in the middle: hooks of the model that look whether its worker is to stop.

Between two modules of the forward pass, and after every parameter of the backward pass. Where a
single kernel takes long, it is run to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offbeat.replica.replica import Replica


class _Stopped(Exception):  # noqa: N818 - no error
    """What is computed here would come too late."""


class Stoppable:
    """One attachment's model, which can be left in the middle."""

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        self._model = model
        self._replica = replica
        self._within = False
        self._hooks: list[Any] = []

    @contextmanager
    def block(self) -> Iterator[None]:
        """Leave this block where it is, if its gradient would come too late."""
        if not self._hooks:
            self._register()
        self._within = True
        try:
            yield
        except _Stopped:
            self._replica.stopped = True
            first = self._replica.parameters[0]
            if not self._replica.gradients.any:  # a step must find one, and so does a GradScaler
                first.grad = torch.zeros_like(first)
        finally:
            self._within = False

    def _register(self) -> None:
        for module in self._model.modules():
            if next(module.children(), None) is None:
                self._hooks.append(module.register_forward_pre_hook(self._look))
        for parameter in self._replica.parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._look)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def _look(self, *_: Any) -> None:
        replica = self._replica
        if self._within and replica.engine.stops(replica.compute_began):
            raise _Stopped

    def remove(self) -> None:
        """Have no hooks any more."""
        while self._hooks:
            self._hooks.pop().remove()
