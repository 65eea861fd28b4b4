"""What a worker that joins gets from another one: all that makes it a replica like the others.

Model, buffers, the optimizer's state and param groups, the scheduler, what the algorithm remembers,
the round; as rows of bytes, so that it is one copy for who gives it and one message. Not the
gradients that the giver has piled up: those are its own.

What is everybody's, to the bit, several workers may give in stripes: parameters and what the
optimizer knows of them, where rounds carry gradients; the base and the outer momentum, where they
carry moves. Running statistics are each worker's own, and so is all that is small.

Random numbers come from a seed that is drawn from the giver's state and the joiner's rank. With the
giver's state itself, the joiner would draw the giver's batches, and make its masks, once more.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.apply import Applier
from offbeat.replica import Replica
from offbeat.rounds.packed import unpack
from offbeat.rounds.stripes import STRIPED_BYTES, Gift, size_of


class Parts(NamedTuple):
    """What an attachment consists of."""

    model: nn.Module
    optimizer: Optimizer
    replica: Replica
    applier: Applier


Comparing = Literal["", "at once", "paused", "agreed"]
"""As they are; at the same round; at the same round, what all agree on. Not at all, if empty."""


class SoFar(NamedTuple):
    """What all have done together so far, each in its program."""

    comparisons: int = 0
    comparing: Comparing = ""
    """How they compare in the next one, if they wait for each other in it."""
    alike: bool = True
    """What the latest has found."""
    checkpoints: int = 0


def refused(algorithm: object, replica: Replica) -> str:
    """Why nobody can join what is attached; nothing if one can."""
    return "" if replica.can_be_joined else f"by {type(algorithm).__name__}"


def version() -> dict[str, str]:
    """What else must be the same on a worker that joins."""
    mine = str(getattr(sys.modules["offbeat"], "__version__", ""))  # which is above this file
    return {"the version of offbeat": mine, "the version of torch": str(torch.__version__)}


def given(parts: Parts, so_far: SoFar, joiner: int) -> Gift:
    """What a worker that joins in the place of this rank needs; between two steps."""
    _, optimizer, replica, applier = parts
    shift = None if replica.shift is None else replica.shift.for_joiner()
    states = [dict(optimizer.state.get(each, {})) for each in replica.parameters]
    state = {
        "values": _values(parts),
        "shift": shift,
        "states": states,
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        "round": replica.round,
        "memory": replica.memory,
        "applied": applier.state_dict(),
        "so_far": tuple(so_far),
        "ends": applier.asked_to_end,
        "seed": _seed(joiner),
    }
    return Gift(state, _common(parts, shift, states))


def striped(parts: Parts) -> Callable[[], int] | None:
    """How many bytes several workers give in stripes, if they do; the same answer on all.

    They come to the same round at the same moment in a lockstep. By the parameters alone: the
    optimizer may not have made its state yet, or have on some workers.
    """
    replica = parts.replica
    common = replica.shift is None or replica.shift.common
    large = sum(each.nbytes for each in replica.tensors) >= STRIPED_BYTES
    if not (replica.engine.lockstep and common and large):
        return None

    def size() -> int:
        states = [dict(parts.optimizer.state.get(each, {})) for each in replica.parameters]
        shift = None if replica.shift is None else replica.shift.for_joiner()
        return size_of(_common(parts, shift, states))

    return size


def take(parts: Parts, gift: tuple[Tensor, Tensor]) -> SoFar:
    """Become what was given; what all have done together so far."""
    _, optimizer, replica, applier = parts
    state = unpack(*gift)
    with torch.no_grad():
        for mine, its in zip(_values(parts), state["values"], strict=True):
            mine.copy_(its)
        for parameter, its in zip(replica.parameters, state["states"], strict=True):
            _take_state(optimizer, parameter, its)
        for group, its in zip(optimizer.param_groups, state["groups"], strict=True):
            for name, value in its.items():
                if isinstance(old := group.get(name), Tensor):  # others may hold it
                    old.copy_(value)
                else:
                    group[name] = value
        if replica.shift is not None:
            replica.shift.join(state["shift"])
    replica.round, replica.memory = state["round"], deepcopy(state["memory"])
    applier.load_state_dict(state["applied"])
    applier.schedule.begin_own_steps()
    applier.asked_to_end |= state["ends"]
    torch.manual_seed(state["seed"])
    random.seed(state["seed"])
    return SoFar(*state["so_far"])


def _take_state(optimizer: Optimizer, parameter: Tensor, its: dict[str, Any]) -> None:
    """Have the optimizer remember the same of a parameter, in the tensors that are there."""
    mine = optimizer.state.pop(parameter, {})
    for name, value in its.items():
        old = mine.get(name)
        if isinstance(value, Tensor) and isinstance(old, Tensor) and old.shape == value.shape:
            its[name] = old.copy_(value)  # rounds may average it
        elif isinstance(value, Tensor):  # not a view of all that was given
            device = parameter.device if name in _on_device(its) else value.device
            its[name] = value.to(device, copy=True)
    if its:
        optimizer.state[parameter] = its


def _on_device(state: dict[str, Any]) -> set[str]:
    """Of one parameter's state, what lives where the parameter does: not a count of steps."""
    return {name for name, it in state.items() if isinstance(it, Tensor) and name != "step"}


def _values(parts: Parts) -> list[Tensor]:
    """All but what rounds move where workers have models of their own: see merges/shift.py."""
    model, _, replica, _ = parts
    every = [*model.parameters(), *replica.parameters, *model.buffers()]
    moved = {id(each) for each in replica.tensors if replica.shift is not None}
    return list({id(each): each for each in every if id(each) not in moved}.values())


def _common(
    parts: Parts, shift: dict[str, Any] | None, states: list[dict[str, Any]]
) -> list[Tensor]:
    """What is the same on all workers after the same round."""
    model, _, replica, _ = parts
    if shift is None:
        known = [each for its in states for each in its.values() if isinstance(each, Tensor)]
        every: list[Tensor] = [*model.parameters(), *replica.parameters, *known]
    elif replica.shift is not None and replica.shift.common:
        every = [each for tensors in shift.values() for each in tensors]
    else:
        every = []
    return list({id(each): each for each in every}.values())


def _seed(joiner: int) -> int:
    """Different for every joiner, and from what the giver will draw itself."""
    drawn = blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7)
    drawn.update(str(joiner).encode())
    return int.from_bytes(drawn.digest(), "little")
