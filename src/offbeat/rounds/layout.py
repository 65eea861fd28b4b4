"""Where each parameter's gradient lies in a few flat tensors, which is what collectives move.

Buckets are filled in the reverse order of the parameters, about the order in which a backward pass
finishes them, and hold one kind of device and number each. Half-precision gradients are summed in
float32: a sum over workers of gradients times samples does not fit into 8 bits of mantissa. A large
parameter has a bucket of its own: then numbers need not be copied to get there (shared.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_char
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from offbeat.errors import GradientError
from offbeat.rounds.shared import POSSIBLE, fills_storage, shared

Kind = Literal["f", "d"]  # of numbers in memory: float32 or float64

BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # a small one first, so that the network starts early
LARGE_BYTES = 4 * 2**20  # a parameter that fills a bucket: one message more is nothing beside it


@dataclass(frozen=True)
class Slot:
    """One parameter's place."""

    bucket: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """As in the parameter, which optimizers are fastest with; even if that changes its own."""


@dataclass(frozen=True)
class Bucket:
    """One flat tensor: which parameters it holds, and how much."""

    device: torch.device
    dtype: torch.dtype
    numel: int
    parameters: tuple[int, ...]


class Layout:
    """The plan: parameter number -> place in a bucket."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.bucket_bytes = bucket_bytes
        slots: dict[int, Slot] = {}
        self.buckets: list[Bucket] = []
        open_: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}

        def close(kind: tuple[torch.device, torch.dtype]) -> None:
            numbers, numel = open_.pop(kind)
            offset = 0
            for number in numbers:
                parameter = self.parameters[number]
                shape, strides = tuple(parameter.shape), _dense_strides(parameter)
                slots[number] = Slot(len(self.buckets), offset, shape, strides)
                offset += parameter.numel()
            self.buckets.append(Bucket(*kind, numel, tuple(numbers)))

        for number in reversed(range(len(self.parameters))):
            parameter = self.parameters[number]
            kind = (parameter.device, _sum_dtype(self.names[number], parameter.dtype))
            numbers, numel = open_.get(kind, ([], 0))
            if parameter.numel() * kind[1].itemsize >= LARGE_BYTES:
                open_[kind] = [number], parameter.numel()
                close(kind)
                if numbers:
                    open_[kind] = numbers, numel
                continue
            open_[kind] = ([*numbers, number], numel + parameter.numel())
            limit = bucket_bytes if self.buckets else min(FIRST_BUCKET_BYTES, bucket_bytes)
            if open_[kind][1] * kind[1].itemsize >= limit:
                close(kind)
        for kind in list(open_):
            close(kind)
        self.slots = tuple(slots[number] for number in range(len(self.parameters)))

    def buckets_of(self, numbers: Iterable[int]) -> set[int]:
        """Which buckets hold these parameters."""
        return {self.slots[number].bucket for number in numbers}


class Numbers:
    """A few numbers in a flat tensor, on their way to all workers or back.

    They are read and written as memory, which is quick. A call of torch also gives up the
    interpreter, and where the program computes in pure Python, getting it back takes a switch
    interval.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._here = tensor.cpu()  # the same, if it is on the CPU
        self.kind: Kind = "d" if tensor.dtype == torch.float64 else "f"
        memory = (c_char * tensor.nbytes).from_address(self._here.data_ptr())
        self._bytes = memoryview(memory).cast("B")
        self._numbers = self._bytes.cast(self.kind)

    def write(self, runs: Mapping[int, Sequence[float]]) -> None:
        """Put in these runs of numbers, by their place, and zeros elsewhere."""
        self._bytes[:] = _zeros(len(self._bytes))
        for first, numbers in runs.items():
            self._numbers[first : first + len(numbers)] = array(self.kind, numbers)
        if self._here is not self._tensor:
            self._tensor.copy_(self._here)

    def read(self) -> bytes:
        """Return what is there; `memoryview(...).cast(kind)` makes numbers of it."""
        if self._here is not self._tensor:
            self._here.copy_(self._tensor)
        return self._bytes.tobytes()


@lru_cache(maxsize=8)
def _zeros(count: int) -> bytes:
    return bytes(count)


class Flats:
    """A gradient-sized buffer in the shape of a layout: flat tensors, and views by parameter.

    The last tensor may have a margin, for numbers that travel with the gradients; `bodies` are the
    tensors without it. There is no memory behind it before somebody asks for one of them.
    """

    def __init__(self, layout: Layout, margin: int = 0) -> None:
        self._layout = layout
        self._extra = margin

    @cached_property
    def tensors(self) -> list[Tensor]:
        buckets = self._layout.buckets
        extras = [0] * (len(buckets) - 1) + [self._extra]
        return [
            torch.zeros(bucket.numel + extra, dtype=bucket.dtype, device=bucket.device)
            for bucket, extra in zip(buckets, extras, strict=True)
        ]

    def touch(self) -> None:
        """Write to all of its memory, which is new: the first to do so waits for the system."""
        for tensor in self.tensors:
            tensor.zero_()

    @cached_property
    def bodies(self) -> list[Tensor]:
        pairs = zip(self.tensors, self._layout.buckets, strict=True)
        return [tensor[: bucket.numel] for tensor, bucket in pairs]

    @cached_property
    def views(self) -> list[Tensor]:
        return [
            self.tensors[slot.bucket].as_strided(slot.shape, slot.strides, slot.offset)
            for slot in self._layout.slots
        ]

    def put(self, number: int, values: Tensor) -> bool:
        """Have a parameter's values here without copying them; False if it does not lie alone."""
        slot = self._layout.slots[number]
        before = self.tensors[slot.bucket]
        numel = values.numel()
        if not (
            POSSIBLE
            and before.numel() == numel == self._layout.buckets[slot.bucket].numel
            and (values.dtype, values.device) == (before.dtype, before.device)
            and (values.shape, values.stride()) == (slot.shape, slot.strides)
            and fills_storage(values)
        ):
            return False
        flat = shared(values.detach()).as_strided((numel,), (1,))
        self.tensors[slot.bucket] = self.bodies[slot.bucket] = flat
        self.views[number] = flat.as_strided(slot.shape, slot.strides)
        return True

    @cached_property
    def margin(self) -> Numbers:
        return Numbers(self.tensors[-1][self._layout.buckets[-1].numel :])


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own, if it has an order of its own and no gaps."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if (dense := formats.get(parameter.dim())) and parameter.is_contiguous(memory_format=dense):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _sum_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise GradientError(
            f"parameter {name!r} is of {dtype}: only float16, bfloat16, float32 and float64 "
            "gradients are reduced; leave it out of the optimizer, or make it a buffer"
        )
    return torch.float64 if dtype == torch.float64 else torch.float32
