"""One worker's replica: its gradients on their way from backward() into a round.

This is what an algorithm sees of a worker. `accumulate` takes the micro-batch that was just
computed; `all_reduce` makes a round of what has been accumulated. Between the two lies `pending`:
sums of gradient times samples that no round has taken yet.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.collectives import Contribution, FullAllReduce, Layout, Record
from offbeat.errors import GradientError
from offbeat.overlap import Overlap
from offbeat.worlds import World


@dataclass
class Pending:
    """What has been accumulated and not yet given to a round."""

    samples: float = 0.0
    micro_batches: int = 0
    unit: float = 1.0
    """The samples that count as weight 1. A worker alone takes its first micro-batch's, so that
    weighing and dividing change no bit of a lone gradient."""
    bad_parameter: int | None = None
    """The first one whose gradient was NaN or infinite in an earlier micro-batch."""


class Replica:
    """A worker's gradients, as an algorithm sees them."""

    def __init__(
        self,
        world: World,
        name: str,
        optimizer: Optimizer,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        bucket_bytes: int,
    ) -> None:
        self.world = world
        self.round = 0
        self.step = 0
        self.pending = Pending()
        self.memory: dict[str, Any] = {}
        """What the algorithm remembers between steps; goes into checkpoints."""
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.flats = (layout := Layout(names, parameters, bucket_bytes)).empty()
        self.layout = layout
        self.full = FullAllReduce(world, name, layout)
        self.overlap = Overlap(self)
        self.compute_began = world.now()
        self._optimizer = optimizer
        self._declared_samples = 0.0
        self._charged_samples = 0.0
        self._used = [False] * len(parameters)

    # --- what an algorithm calls -----------------------------------------------------------

    @property
    def samples(self) -> float:
        """The weight of the micro-batch at hand: what the user declared, or 1."""
        return self._declared_samples or 1.0

    def accumulate(self) -> None:
        """Take the gradients of the micro-batch that was just computed."""
        if not self.overlap.launched:
            self.gather(range(len(self.parameters)))
            if self.pending.micro_batches or not self.overlap.reduces_next():
                # These gradients will be gone when the round finds that it is not finite.
                self.pending.bad_parameter = self._bad_parameter()
        self.pending.samples += self.samples
        self.pending.micro_batches += 1

    def all_reduce(self, leaving: bool = False) -> Record | None:
        """Make a round of what all workers have pending; None if all of them are leaving."""
        if self.overlap.launched:
            self.gather(self.overlap.not_launched())
        elif not self.pending.micro_batches:
            self.gather(range(len(self.parameters)), nothing=True)
        mine = Contribution(
            samples=self.pending.samples,
            used=self._used,
            learning_rates=self._learning_rates(),
            changed=self.overlap.changed(),
            leaving=leaving,
        )
        record = self.full.finish(self.round, self.flats, mine, self.overlap.refill)
        self.overlap.finished()
        if record is None:
            return None
        self._used = [False] * len(self._used)
        self.round += 1
        return record

    # --- what attach calls -----------------------------------------------------------------

    def declare_samples(self, samples: float) -> None:
        if all(parameter.grad is None for parameter in self.parameters):
            # Nothing to add to: what was declared went with gradients that no step has taken.
            self._declared_samples = self._charged_samples = 0.0
        self._declared_samples += samples

    def computed(self) -> float:
        """Let the modelled device's time for the micro-batch pass; return the seconds it took."""
        self.world.sleep_until(self.compute_began + self.compute_s())
        self.step += 1
        self._charged_samples = self._declared_samples
        now = self.world.now()
        took_s, self.compute_began = now - self.compute_began, now
        return took_s

    def stepped(self) -> None:
        """The step is over: what follows is the next micro-batch."""
        self._declared_samples = self._charged_samples = 0.0
        self.overlap.reset()
        self.compute_began = self.world.now()

    def install(self, record: Record) -> bool:
        """Write a record's mean into `.grad`, None where nobody had one; say whether it is finite.

        Into the gradients that are there: they neither alias the buckets, nor cost new memory.
        """
        if not all(_is_finite(tensor) for tensor in record.sum.tensors):
            return False
        divisor = record.samples / self.pending.unit
        for parameter, view, used in zip(
            self.parameters, record.sum.views, record.used, strict=True
        ):
            if not used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            torch.div(view, divisor, out=parameter.grad)
        return True

    def blame(self) -> tuple[int | None, str]:
        """Find, with everybody, the rank and parameter that made a round not finite."""
        bad = self.pending.bad_parameter
        named = self.full.name_the_first(self._bad_parameter() if bad is None else bad)
        return (None, "") if named is None else (named[0], self.names[named[1]])

    def applied(self) -> None:
        """The round that this worker's pending gradients went into is done with."""
        self.pending = Pending()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # --- gradients into buckets ------------------------------------------------------------

    def gather(self, numbers: Sequence[int], nothing: bool = False) -> None:
        """Add `.grad` of these parameters, times samples, to what is pending."""
        if not self.pending.micro_batches and self.world.size == 1:
            self.pending.unit = self.samples
        weight = self.samples / self.pending.unit
        into, grads, without = [], [], []
        for number in numbers:
            view, parameter = self.flats.views[number], self.parameters[number]
            grad = None if nothing else parameter.grad
            if grad is None:
                without.append(view)
                continue
            if grad.layout != torch.strided:
                raise GradientError(
                    f"the gradient of {self.names[number]!r} is sparse: use sparse=False in the "
                    "embedding, or leave its parameters out of the optimizer"
                )
            self._used[number] = True
            into.append(view)
            grads.append(grad)
        if self.pending.micro_batches:
            if into:
                wide = [grad.to(view.dtype) for grad, view in zip(grads, into, strict=True)]
                torch._foreach_add_(into, wide, alpha=weight)
            return
        if into:
            torch._foreach_copy_(into, grads)
            if weight != 1.0:
                torch._foreach_mul_(into, weight)
        if without:
            torch._foreach_zero_(without)

    def compute_s(self) -> float:
        """Seconds that the modelled device needs for the micro-batch at hand."""
        samples = self._declared_samples - self._charged_samples
        return self.world.compute_s(self.step, samples or 1.0, self.compute_began)

    def _bad_parameter(self) -> int | None:
        return next(
            (
                number
                for number, parameter in enumerate(self.parameters)
                if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
            ),
            self.pending.bad_parameter,
        )

    def _learning_rates(self) -> float:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        return float(zlib.crc32(pack(f"{len(rates)}d", *rates)))


def _is_finite(tensor: Tensor) -> bool:
    """One pass for a finite tensor; a finite one whose sum overflows takes two."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
