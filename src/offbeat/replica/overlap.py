"""Reducing buckets while backward still runs.

A hook on each parameter counts; when a bucket is complete, and all before it are on their way, it
is launched: always in the same order, so that all workers issue the same collectives. The last
bucket waits for the step, which has the header ready.

The user may change gradients between backward and step: clip them, unscale them, run backward
again. To notice, `.grad` is left as a copy-on-write clone of what the bucket took along: it costs
nothing until somebody writes to it, by whatever way (version counters miss `.grad.data` and
GradScaler). All workers learn of a change in the round's header, the buckets go again with what
the gradients hold then, and from the next round on nothing is launched before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from offbeat.rounds import Pile, shared

if TYPE_CHECKING:
    from offbeat.replica.opening import Opening

# A backward pass takes about twice as long as the forward pass before it.
_FORWARD_SHARE = 1 / 3


class Overlap:
    """Launches a replica's buckets from the hooks of its backward pass."""

    def __init__(self, replica: Opening) -> None:
        self.reduces_next: Callable[[], bool] = lambda: False
        """Whether the backward pass at hand completes this worker's part of the round."""
        self._replica = replica
        self._layout = replica.layout
        # A single bucket is complete when backward is: nothing to gain.
        several = len(self._layout.buckets) > 1
        self.on = several and shared.POSSIBLE
        self._ready = [0] * len(self._layout.buckets)
        self._taken: dict[int, Tensor] = {}
        self._taken_samples = 0.0
        self._stepped = False  # the micro-batch at hand is on the pile
        self._from_gradients = False  # the pile can be filled anew from `.grad`
        self._copies: list[Tensor] = []
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

    def counted(self) -> None:
        """The micro-batch at hand is on the pile."""
        self._stepped = True

    def keep(self, pile: Pile, here: bool) -> bool:
        """Make sure that the pile can be filled anew; say whether its buckets have changed.

        Somebody else's may have. What is in `.grad`, or was there before the launch, need not be
        copied; what is only in the pile must.
        """
        self._from_gradients = here and self._stepped and (self.launched or pile.micro_batches == 1)
        self._copies = []
        if not self.on or self._from_gradients or self.launched:
            return self._changed()
        if pile.micro_batches:
            self._copies = [body.clone() for body in pile.flats.bodies]
        return False

    def _changed(self) -> bool:
        """Say whether a gradient differs from what its bucket took along."""
        parameters = self._replica.parameters
        return self.launched and (
            not self._from_gradients  # backward without a step, then leaving, or being away
            or self._replica.samples != self._taken_samples
            or any(
                parameters[number].grad is not grad or not shared.is_unwritten(grad)
                for number, grad in self._taken.items()
            )
        )

    def restore(self, pile: Pile) -> None:
        """Write this worker's part into the buckets again, as its gradients are now."""
        self.on = False
        if self._from_gradients:
            micro_batches, pile.micro_batches = pile.micro_batches, 0
            pile.bad_parameter = None
            self._replica.gradients.gather(pile, range(len(self._layout.slots)), look=True)
            pile.micro_batches = micro_batches
        elif self._copies:
            for body, copy in zip(pile.flats.bodies, self._copies, strict=True):
                body.copy_(copy)
        elif pile.before is not None:
            torch._foreach_copy_(pile.flats.views, pile.before.flats.views)
            pile.used, pile.bad_parameter = list(pile.before.used), None
            pile.look_for_bad()
        else:
            pile.blank = False
            pile.zero()
            pile.used, pile.bad_parameter = [False] * len(pile.used), None

    def finished(self) -> None:
        """The round is over: nothing of it is needed any more."""
        self._taken.clear()
        self._copies = []
        self._stepped = self._from_gradients = False

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
        while (number := replica.engine.launched) < len(buckets) - 1:
            parameters = buckets[number].parameters
            if self._ready[number] < len(parameters) or not replica.engine.may_launch:
                return
            if any(replica.parameters[taken].grad is None for taken in parameters):
                return  # counted in an earlier backward, which no step has followed
            pile = replica.engine.apart() if not self._taken else replica.engine.piles.growing
            self._taken_samples = replica.samples
            replica.gradients.gather(pile, parameters, look=True)
            for taken in parameters:
                grad = cast(Tensor, replica.parameters[taken].grad)
                self._taken[taken] = replica.parameters[taken].grad = shared.shared(grad)
            share = _FORWARD_SHARE + (1 - _FORWARD_SHARE) * len(self._taken) / len(
                replica.parameters
            )
            replica.engine.launch(replica.compute_began + share * compute_s if compute_s else None)
