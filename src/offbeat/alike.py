"""What must be alike on all workers, or be kept by each: names, bits, buffers, generators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from ctypes import c_ubyte
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import WorkerLostError
from offbeat.worlds import Channel, World


def alike(channel: Channel, model: nn.Module) -> bool:
    """Say whether all workers hold the same bits; every worker must call this."""
    mark = _fingerprint(model)
    marks = torch.tensor([mark, -mark])
    channel.all_reduce(marks, op="max").wait()
    return bool(marks[0] == -marks[1])  # the largest and the smallest of all


class FirstModel:
    """What all begin with: one worker's model.

    If a worker is lost while it is handed round, that is done again. If it was the one whose model
    it is, somebody who has all of it hands it round.
    """

    def __init__(self, source: int, world: World, tensors: Sequence[Tensor]) -> None:
        self._source = source
        self._world = world
        self._tensors = tensors
        self._has = world.rank == source

    def hand_round(self, channel: Channel) -> None:
        """Have it here, too; all members of a channel do."""
        there = self._source in channel.members
        broadcast(channel, self._tensors, self._source if there else self._other_source(channel))
        self._has = True

    def _other_source(self, channel: Channel) -> int:
        mine, all_of = torch.tensor([self._has]), torch.empty(len(channel.members), 1)
        channel.all_gather(mine.float(), all_of).wait()
        for rank, has in zip(channel.members, all_of.view(-1).tolist(), strict=True):
            if has:
                return rank
        raise WorkerLostError(
            f"{self._world.loss}, while all attached and before anybody else had its model: "
            "nothing was trained yet, start again",
            rank=self._source,
        )


def broadcast(channel: Channel, tensors: Sequence[Tensor], source: int | None = None) -> None:
    """Take over that worker's values, or the first one's, whatever their type."""
    source = channel.members[0] if source is None else source
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            channel.broadcast(flat, source).wait()
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of which a mean over workers means something: running statistics.

    One that holds infinities from the start is a constant, such as a mask of attention.
    """
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.dtype.itemsize > 1
        if buffer.numel() and buffer.isfinite().all()
    }


def average_buffers(channel: Channel, model: nn.Module) -> None:
    """Running statistics see only their own worker's data: take the mean over workers."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            mean = buffer.detach().contiguous().clone()
            channel.all_reduce(mean).wait()
            buffer.copy_(mean.div_(len(channel.members)))
    broadcast(channel, [buffer for buffer in model.buffers() if not buffer.is_floating_point()])


def generators() -> dict[str, Any]:
    """The states of the generators that a training script draws from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Have them as they were."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])


def named_parameters(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[Tensor]]:
    """The parameters of an optimizer, with their names in the model."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    names, parameters = [], []
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            names.append(known.get(id(parameter), f"group {i}, parameter {j}"))
            parameters.append(parameter)
    if not parameters:
        raise ValueError("the optimizer has no parameters")
    return names, parameters


def _fingerprint(model: nn.Module) -> int:
    """A number that differs, almost surely, between models that differ in any bit."""
    seen = blake2b(digest_size=7)  # it fits into an int64
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        if values.numel():
            seen.update((c_ubyte * values.nbytes).from_address(values.data_ptr()))
    return int.from_bytes(seen.digest(), "little")
