"""Reducing buckets while backward still runs.

A hook on each parameter counts; when a bucket is complete, and all before it are on their way, it
is launched: always in the same order, so that all workers issue the same collectives.

The user may change gradients between backward and step: clip them, unscale them, run backward
again. To notice, `.grad` is left as a copy-on-write clone of what the bucket took along: it costs
nothing until somebody writes to it, by whatever way (version counters miss `.grad.data` and
GradScaler). All workers learn of a change in the round's header, the buckets go again with what
the gradients hold then, and from the next round on nothing is launched before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from offbeat.replica import Replica

_is_unwritten: Callable[[Tensor], bool] | None = getattr(torch._C, "_is_cow_tensor", None)

# A backward pass takes about twice as long as the forward pass before it.
_FORWARD_SHARE = 1 / 3


class Overlap:
    """Launches a replica's buckets from the hooks of its backward pass."""

    def __init__(self, replica: Replica) -> None:
        self.reduces_next: Callable[[], bool] = lambda: False
        """Whether the backward pass at hand completes this worker's part of the round."""
        self._replica = replica
        self._layout = replica.layout
        # A single bucket is complete when backward is: nothing to gain.
        several = len(self._layout.buckets) > 1
        self.on = several and hasattr(torch, "_lazy_clone") and _is_unwritten is not None
        self._ready = [0] * len(self._layout.buckets)
        self._taken: dict[int, Tensor] = {}
        self._taken_samples = 0.0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(replica.parameters)
            if self.on and parameter.requires_grad
        ]

    @property
    def launched(self) -> bool:
        """Whether any bucket of this round is on its way."""
        return bool(self._taken)

    def not_launched(self) -> list[int]:
        return [number for number in range(len(self._layout.slots)) if number not in self._taken]

    def changed(self) -> bool:
        """Say whether a gradient differs from what its bucket took along."""
        parameters = self._replica.parameters
        return self.launched and (
            self._replica.pile.micro_batches == 0  # backward without a step, then leaving
            or self._replica.samples != self._taken_samples
            or any(
                parameters[number].grad is not grad or not cast(Any, _is_unwritten)(grad)
                for number, grad in self._taken.items()
            )
        )

    def refill(self) -> None:
        """Write this worker's part into the buckets again, as its gradients are now.

        Only a round of one micro-batch is launched early, so its gradients are all still there.
        """
        self.on = False
        replica = self._replica
        micro_batches, replica.pile.micro_batches = replica.pile.micro_batches, 0
        replica.pile.bad_parameter = None
        replica.gather(range(len(replica.parameters)), nothing=micro_batches == 0)
        replica.pile.micro_batches = micro_batches

    def finished(self) -> None:
        self._taken.clear()

    def reset(self) -> None:
        self._ready = [0] * len(self._ready)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        bucket = self._layout.slots[number].bucket
        size = len(self._layout.buckets[bucket].parameters)

        def ready(_: Tensor) -> None:
            if self.on and self.reduces_next():
                self._ready[bucket] += 1
                if self._ready[bucket] == size:
                    self._launch()

        return ready

    def _launch(self) -> None:
        """Launch the buckets that are complete, as far as they follow those launched before."""
        replica, buckets = self._replica, self._layout.buckets
        compute_s = replica.compute_s()
        self._taken_samples = replica.samples
        while (number := replica.full.launched) < len(buckets):
            parameters = buckets[number].parameters
            if self._ready[number] < len(parameters):
                return
            if any(replica.parameters[taken].grad is None for taken in parameters):
                return  # counted in an earlier backward, which no step has followed
            replica.gather(parameters)
            for taken in parameters:
                grad = cast(Tensor, replica.parameters[taken].grad)
                self._taken[taken] = replica.parameters[taken].grad = torch._lazy_clone(grad)
            share = _FORWARD_SHARE + (1 - _FORWARD_SHARE) * len(self._taken) / len(
                replica.parameters
            )
            moment = replica.compute_began + share * compute_s if compute_s else None
            replica.full.launch(replica.pile.flats, moment)
