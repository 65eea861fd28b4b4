"""How a flat tensor is cut: into chunks, each into one slice for every worker, each into blocks.

    a tensor   ├──────── chunk ────────┼──────── chunk ────────┼── the rest ──┤
    a chunk    ├ slice 0 ┼ slice 1 ┼ slice 2 ┼ slice 3 ┤         as many slices as workers
    a slice    ├ block ┼ block ┼ block ┤                         all of one length

A chunk is on the wire while the next one is made into bytes. A worker adds up the slice with its
number. A block has a scale of its own. Only the last chunk is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

CHUNK = 2**21
"""Numbers in a chunk, or a few less."""
ALIGNED = 16
"""Blocks have multiples of so many numbers: two of 4 bits make a byte, 8 bytes a float64."""


@dataclass(frozen=True)
class Cut:
    """One chunk: where it lies in its tensor, and how it is cut."""

    first: int
    last: int
    slices: int
    blocks: int
    """Of each slice."""
    block: int
    """Numbers in each."""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.slices, self.blocks, self.block

    @property
    def slice(self) -> int:
        """Numbers in one."""
        return self.blocks * self.block

    @property
    def is_full(self) -> bool:
        """Whether nothing is to be filled up."""
        return self.last - self.first == self.slices * self.slice

    def of(self, tensor: Tensor) -> Tensor:
        """The chunk in its slices and blocks: a view of the tensor, or a filled-up copy."""
        part = tensor[self.first : self.last]
        if self.is_full:
            return part.view(self.shape)
        filled = torch.zeros(self.slices * self.slice, dtype=tensor.dtype, device=tensor.device)
        filled[: self.last - self.first] = part
        return filled.view(self.shape)

    def put(self, chunk: Tensor, tensor: Tensor) -> None:
        """Have the chunk in the tensor, if it is not there already."""
        if not self.is_full:
            tensor[self.first : self.last] = chunk.view(-1)[: self.last - self.first]


@lru_cache(maxsize=1024)
def cuts(numel: int, slices: int, block: int, chunk: int = CHUNK) -> tuple[Cut, ...]:
    """Cut a tensor of so many numbers.

    >>> [(cut.first, cut.last, cut.shape) for cut in cuts(300, 4, 16, chunk=200)]
    [(0, 192, (4, 3, 16)), (192, 300, (4, 2, 16))]
    >>> [cut.shape for cut in cuts(10, 4, 256)]
    [(4, 1, 16)]
    """
    found, first = [], 0
    blocks = max(1, chunk // (slices * block))
    while numel - first >= (full := slices * blocks * block):
        found.append(Cut(first, first + full, slices, blocks, block))
        first += full
    if rest := numel - first:
        of_each = -(-rest // slices)
        blocks = -(-of_each // block)
        block = -(-of_each // blocks // ALIGNED) * ALIGNED  # even ones, none of zeros only
        found.append(Cut(first, numel, slices, blocks, block))
    return tuple(found)
