"""Step: the optimizer makes a step on a round's mean, with the round's learning rates.

The step is the one that the program has begun, or, for the rounds that a late worker catches up
with, one of our own. A program that does not come for its rounds, because it is away or computes
for long, must not let them pile up: then the background steps a *shadow*, a copy of the parameters
and of the optimizer's state, and the program takes that over at its next step.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.rounds import Rates, Round, shared
from offbeat.rounds.rates import NAMES

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Step:
    """The optimizer on the mean."""

    own = False
    counts = True
    spares = False
    alike = True

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        clip_norm: float | None,
        scheduled: bool,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._clip_norm = clip_norm
        self._scheduled = scheduled
        self.rates = Rates(optimizer, scheduled)
        self._shadow: Step | None = None

    def begin(self, round: Round) -> bool:
        """Have the round's mean in `.grad`, and its values in the param groups."""
        self._install(round)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self.rates.put(round.rates, round.scale)
        return True

    def _install(self, round: Round) -> None:
        """Write the mean into `.grad`; None where nobody had a gradient.

        Into the gradients that are there: they neither alias the buckets, nor cost new memory. Or,
        if nobody else needs the sum, it is divided where it lies, and `.grad` is a copy-on-write
        clone of that. As a rule it is gone when the buffer is written again; if not, torch copies.
        """
        divisor = None if round.divisor == 1.0 else round.divisor_tensor
        # To clip is to write, and so to copy.
        spare = round.spare and shared.POSSIBLE and self._clip_norm is None
        sums, grads = [], []
        for parameter, view, used in zip(
            self._parameters, round.sum.views, round.used, strict=True
        ):
            if not used:
                parameter.grad = None
                continue
            if spare and view.dtype == parameter.dtype and shared.fills_storage(view):
                parameter.grad = None
                parameter.grad = shared.shared(view if divisor is None else view.div_(divisor))
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if view.numel():
                sums.append(view)
                grads.append(parameter.grad)
        if divisor is None:  # one micro-batch alone: to copy is quicker than to divide
            torch._foreach_copy_(grads, sums)
            return
        for view, grad in zip(sums, grads, strict=True):
            torch.div(view, divisor, out=grad)

    def end(self, round: Round) -> None:
        """Have this worker's own values in the param groups again."""
        self.rates.put_back()

    def skip(self, round: Round) -> None:
        """Nothing has been done for it."""

    def fold(self, round: Round) -> None:
        """Step the shadow."""
        if round.bad is not None:
            return
        if self._shadow is None:
            optimizer = _shadow_of(self._optimizer)
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            self._shadow = Step(optimizer, parameters, self._clip_norm, self._scheduled)
        shadow = self._shadow
        pairs = zip(self._optimizer.param_groups, shadow._optimizer.param_groups, strict=True)
        for group, shadows in pairs:
            shadows.update({name: _copied(group[name]) for name in NAMES if name in group})
        shadow.begin(round)
        shadow._optimizer.step()
        shadow.end(round)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over the shadow's parameters and state."""
        shadow, self._shadow = self._shadow, None
        if shadow is None:  # what was passed by held nothing
            return
        for mine, its in zip(self._parameters, shadow._parameters, strict=True):
            mine.copy_(its)
            if its in shadow._optimizer.state:  # a checkpoint may refer to the dict that is there
                self._optimizer.state[mine].update(shadow._optimizer.state[its])
        pairs = zip(self._optimizer.param_groups, shadow._optimizer.param_groups, strict=True)
        for group, shadows in pairs:  # what an optimizer counts there itself
            group.update({k: v for k, v in shadows.items() if k not in (*NAMES, "params")})

    def agreed(self) -> Sequence[Tensor]:
        """The shadow's parameters, if there is one."""
        return self._parameters if self._shadow is None else self._shadow._parameters


class OwnStep:
    """The optimizer on the worker's own gradient, which is in `.grad` already."""

    own = True
    counts = True
    spares = False
    alike = False

    def __init__(self, parameters: Sequence[Tensor], clip_norm: float | None) -> None:
        self._parameters = parameters
        self._clip_norm = clip_norm

    def begin(self, round: Round) -> bool:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        return True

    def end(self, round: Round) -> None:
        """The step is all there is."""

    def skip(self, round: Round) -> None:
        """The gradient was not finite: no step."""

    def fold(self, round: Round) -> None:
        raise AssertionError("an own step is never in a log")

    def adopt(self) -> None:
        raise AssertionError("an own step is never in a log")

    def agreed(self) -> Sequence[Tensor]:
        raise AssertionError("an own step is nobody else's")


def _shadow_of(optimizer: Optimizer) -> Optimizer:
    """A copy with parameters and state of its own, and nobody's hooks."""
    shadow: Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # schedulers wrap that, bound to the original
    shadow.__dict__.update({name: OrderedDict() for name in _HOOKS})
    shadow.param_groups, shadow.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        copies = []
        for each in group["params"]:
            copies.append(own := nn.Parameter(each.detach().clone(), each.requires_grad))
            if each in optimizer.state:
                state = optimizer.state[each]
                shadow.state[own] = {name: _copied(value) for name, value in state.items()}
        shadow.param_groups.append(
            {**{k: _copied(v) for k, v in group.items() if k != "params"}, "params": copies}
        )
    return shadow


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
