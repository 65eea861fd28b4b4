"""What a worker that joins gets from another one: all that makes it a replica like the others.

Model, buffers, the optimizer's state and param groups, the scheduler, what the algorithm remembers,
the round; as one row of bytes, so that it is one copy for who gives it and one message. Not the
gradients that the giver has piled up: those are its own.

Random numbers come from a seed that is drawn from the giver's state and the joiner's rank. With the
giver's state itself, the joiner would draw the giver's batches, and make its masks, once more.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from copy import deepcopy
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.apply import Applier
from offbeat.replica import Replica

_ALIGNED = 64


class Parts(NamedTuple):
    """What an attachment consists of."""

    model: nn.Module
    optimizer: Optimizer
    replica: Replica
    applier: Applier


def refused(algorithm: object, codec: object, open_here: int) -> str:
    """Why nobody can join what is attached; nothing if one can."""
    if codec is not None:
        return "with a codec"
    if not getattr(algorithm, "joins", False):
        return f"by {type(algorithm).__name__}"
    return "where several are attached at a time" if open_here else ""


def version() -> dict[str, str]:
    """What else must be the same on a worker that joins."""
    mine = str(getattr(sys.modules["offbeat"], "__version__", ""))  # which is above this file
    return {"the version of offbeat": mine, "the version of torch": str(torch.__version__)}


def given(parts: Parts, compared: int, joiner: int) -> Tensor:
    """Copy what a worker that joins in the place of this rank needs; between two steps."""
    _, optimizer, replica, applier = parts
    return pack(
        {
            "values": list(_values(parts)),
            "states": [dict(optimizer.state.get(each, {})) for each in replica.parameters],
            "groups": [
                {name: value for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ],
            "round": replica.round,
            "memory": replica.memory,
            "applied": applier.state_dict(),
            "compared": compared,
            "seed": _seed(joiner),
        }
    )


def take(parts: Parts, gift: Tensor) -> int:
    """Become what was given; returns how often all have compared their replicas."""
    _, optimizer, replica, applier = parts
    state = unpack(gift)
    with torch.no_grad():
        for mine, its in zip(_values(parts), state["values"], strict=True):
            mine.copy_(its)
        for parameter, its in zip(replica.parameters, state["states"], strict=True):
            if its:
                optimizer.state[parameter] = {
                    name: value.to(parameter.device) if name in _on_device(its) else value
                    for name, value in its.items()
                }
            else:
                optimizer.state.pop(parameter, None)
        for group, its in zip(optimizer.param_groups, state["groups"], strict=True):
            for name, value in its.items():
                if isinstance(old := group.get(name), Tensor):  # others may hold it
                    old.copy_(value)
                else:
                    group[name] = value
    replica.round, replica.memory = state["round"], deepcopy(state["memory"])
    applier.load_state_dict(state["applied"])
    torch.manual_seed(state["seed"])
    random.seed(state["seed"])
    return int(state["compared"])


def _on_device(state: dict[str, Any]) -> set[str]:
    """Of one parameter's state, what lives where the parameter does: not a count of steps."""
    return {name for name, it in state.items() if isinstance(it, Tensor) and name != "step"}


def _values(parts: Parts) -> list[Tensor]:
    model, _, replica, _ = parts
    every = [*model.parameters(), *replica.parameters, *model.buffers()]
    return list({id(each): each for each in every}.values())


def _seed(joiner: int) -> int:
    """Different for every joiner, and from what the giver will draw itself."""
    drawn = blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7)
    drawn.update(str(joiner).encode())
    return int.from_bytes(drawn.digest(), "little")


# --- bytes ----------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and remembers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, it: object) -> int | None:
        if not isinstance(it, Tensor):
            return None
        self.tensors.append(it.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def pack(state: Any) -> Tensor:
    """Everything in one row of bytes: a plan, then the tensors' own."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(state)
    kinds = [(each.dtype, tuple(each.shape)) for each in pickler.tensors]
    plan = pickle.dumps((file.getvalue(), kinds))
    places, end = [], _up(8 + len(plan))
    for each in pickler.tensors:
        places.append(end)
        end = _up(end + each.nbytes)
    row = torch.empty(end, dtype=torch.uint8)
    start = torch.tensor([len(plan)]).view(torch.uint8)
    row[:8], row[8 : 8 + len(plan)] = start, torch.frombuffer(bytearray(plan), dtype=torch.uint8)
    for place, each in zip(places, pickler.tensors, strict=True):
        if each.numel():
            room = row[place : place + each.nbytes].view(each.dtype)
            room.view(each.shape).copy_(each)
    return row


def unpack(row: Tensor) -> Any:
    """What `pack` has packed; its tensors lie in the row."""
    size = int(row[:8].view(torch.int64))
    skeleton, kinds = pickle.loads(row[8 : 8 + size].numpy().tobytes())
    tensors, place = [], _up(8 + size)
    for dtype, shape in kinds:
        numel = 1
        for length in shape:
            numel *= length
        end = place + numel * dtype.itemsize
        tensors.append(row[place:end].view(dtype).view(shape).clone())
        place = _up(end)
    return _Unpickler(io.BytesIO(skeleton), tensors).load()


def _up(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED
