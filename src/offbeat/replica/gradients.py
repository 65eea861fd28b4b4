"""A worker's gradients on their way from `.grad` onto the pile, times samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.errors import GradientError
from offbeat.rounds import Layout, Pile


class Gradients:
    """What the backward passes have left in `.grad`, and of how many samples it is the mean."""

    def __init__(self, layout: Layout, alone: bool) -> None:
        self._layout = layout
        self._parameters = layout.parameters
        self._alone = alone
        self.weighs = True
        """Whether gradients are weighed by their samples."""
        self.brings = True
        """Whether the micro-batch at hand has gradients."""
        self.puts = False
        """Whether a pile may share memory with them, as long as both are the same."""
        self.declared_samples = 0.0

    @property
    def samples(self) -> float:
        """The weight of the micro-batch at hand: what the user declared, or 1; 0 without any."""
        return (self.declared_samples or 1.0) if self.brings else 0.0

    @property
    def any(self) -> bool:
        """Whether any parameter has one."""
        for parameter in self._parameters:  # noqa: SIM110 - any() is slower, and the first one has
            if parameter.grad is not None:
                return True
        return False

    def clear(self) -> None:
        """Have none."""
        for parameter in self._parameters:
            parameter.grad = None

    def gather(self, pile: Pile, numbers: Sequence[int], look: bool, gives: bool = False) -> None:
        """Add those of these parameters, all of one or more buckets, to a pile.

        Times samples: the pile is a sum. Without `look`, whoever takes the pile sees whether its
        numbers are finite. With `gives`, what need not be copied to an empty pile goes there for
        good, and `.grad` is None.
        """
        if not pile.micro_batches and self._alone and self.weighs and self.samples:
            pile.unit = self.samples
        weight = self.samples / pile.unit if self.weighs else 1.0
        into, grads, without = [], [], []
        for number in numbers:
            grad = self._parameters[number].grad
            if grad is None:
                without.append(number)
                continue
            self._check_dense(number, grad)
            pile.used[number] = True
            if grad.numel():
                into.append(number)
                grads.append(grad)
        if not (into or without):  # parameters of no numbers, of which there is nothing to add
            return
        views = pile.flats.views
        if pile.before is not None:  # what was there stays there, to be added to again
            there = pile.before.flats.views
            for number, grad in zip(into, grads, strict=True):
                torch.add(there[number], grad, alpha=weight, out=views[number])
            for number in without:
                views[number].copy_(there[number])
        elif pile.micro_batches:
            if into:
                sums = [views[number] for number in into]
                if any(a.dtype != b.dtype for a, b in zip(sums, grads, strict=True)):
                    grads = [grad.to(a.dtype) for a, grad in zip(sums, grads, strict=True)]
                torch._foreach_add_(sums, grads, alpha=weight)
        else:
            places, copied = [], []
            for number, grad in zip(into, grads, strict=True):
                if look or not (self.puts and pile.flats.put(number, grad)):
                    places.append(views[number])
                    copied.append(grad)
                elif gives:
                    self._parameters[number].grad = None
            if copied:
                torch._foreach_copy_(places, copied)
            if without:
                torch._foreach_zero_([views[number] for number in without])
            if weight != 1.0:
                for bucket in self._layout.buckets_of(numbers):
                    pile.flats.bodies[bucket].mul_(weight)
        if look:  # now, while they are this worker's own
            pile.look_for_bad(numbers)
        else:
            pile.unseen = True

    def first_bad(self) -> int | None:
        """The first parameter whose `.grad` is NaN or infinite, if any."""
        grads = {
            number: parameter.grad
            for number, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        }
        for number, grad in grads.items():
            self._check_dense(number, grad)
        sums = [grad.sum(dtype=torch.float32) for grad in grads.values()]
        if not sums or torch.stack([each.to(sums[0].device) for each in sums]).sum().isfinite():
            return None
        return next((number for number, grad in grads.items() if not grad.isfinite().all()), None)

    def _check_dense(self, number: int, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self._layout.names[number]!r} is sparse: use sparse=False in "
                "the embedding, or leave its parameters out of the optimizer"
            )
