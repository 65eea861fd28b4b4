"""Anything, with the tensors in it, as one row of bytes: one copy for who gives it, one message.

The tensors' own bytes are not pickled, but copied once, from whatever device they are on. Some may
be left out of the row: their bytes come apart from it, from several workers (stripes.py).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64
"""Where a tensor may begin in a row of bytes."""
Kind = tuple[torch.dtype, tuple[int, ...]]


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and remembers them; those that come apart have negative numbers."""

    def __init__(self, file: io.BytesIO, apart: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._apart = {id(each): number - len(apart) for number, each in enumerate(apart)}

    def persistent_id(self, it: object) -> int | None:
        if not isinstance(it, Tensor):
            return None
        if id(it) in self._apart:
            return self._apart[id(it)]
        self.tensors.append(it.detach())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def pack(state: Any, apart: Sequence[Tensor] = ()) -> Tensor:
    """Everything in one row of bytes: a plan, then the tensors' own; but for those apart."""
    file = io.BytesIO()
    pickler = _Pickler(file, apart)
    pickler.dump(state)
    plan = pickle.dumps((file.getvalue(), _kinds(pickler.tensors), _kinds(apart)))
    places, end = [], aligned(8 + len(plan))
    for each in pickler.tensors:
        places.append(end)
        end = aligned(end + each.nbytes)
    row = torch.empty(end, dtype=torch.uint8)
    start = torch.tensor([len(plan)]).view(torch.uint8)
    row[:8], row[8 : 8 + len(plan)] = start, torch.frombuffer(bytearray(plan), dtype=torch.uint8)
    for place, each in zip(places, pickler.tensors, strict=True):
        if each.numel():
            room = row[place : place + each.nbytes].view(each.dtype)
            room.view(each.shape).copy_(each)
    return row


def unpack(row: Tensor, apart: Tensor | None = None) -> Any:
    """What `pack` has packed; tensors whose bytes came apart lie there, and are to be copied."""
    size = int(row[:8].view(torch.int64))
    skeleton, kinds, others = pickle.loads(row[8 : 8 + size].numpy().tobytes())
    tensors = [each.clone() for each in _laid_out(row, kinds, aligned(8 + size))]
    if apart is not None:
        tensors += _laid_out(apart, others, 0)
    return _Unpickler(io.BytesIO(skeleton), tensors).load()


def _kinds(tensors: Sequence[Tensor]) -> list[Kind]:
    return [(each.dtype, tuple(each.shape)) for each in tensors]


def _laid_out(row: Tensor, kinds: list[Kind], place: int) -> list[Tensor]:
    """Tensors whose bytes lie in a row, from some place on."""
    tensors = []
    for dtype, shape in kinds:
        end = place + math.prod(shape) * dtype.itemsize
        tensors.append(row[place:end].view(dtype).view(shape))
        place = aligned(end)
    return tensors


def aligned(place: int) -> int:
    """The next place where a tensor may begin."""
    return -(-place // ALIGNED) * ALIGNED
