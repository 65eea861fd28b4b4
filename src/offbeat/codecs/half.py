"""Half precision on the wire, and sums in full: the simplest codec, half the bytes.

bfloat16 has the range of float32. float16 has not: a sum of gradients times samples soon exceeds
65,504, so every slice is scaled by a power of two, which loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Coder
from offbeat.codecs.cuts import Cut
from offbeat.codecs.two_shot import TwoShot, peaks, scaled

_KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Half(Codec):
    """16 bits a number."""

    kind: Literal["bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind must be 'bfloat16' or 'float16', got {self.kind!r}")

    def coder(self, size: int, rank: int) -> Coder:
        return Halves(size, rank, _KINDS[self.kind])


class Halves(TwoShot):
    """One worker's halves."""

    def __init__(self, size: int, rank: int, kind: torch.dtype) -> None:
        super().__init__(size, rank)
        self._kind = kind

    def row_bytes(self, cut: Cut, dtype: torch.dtype) -> int:
        return 2 * cut.slice + dtype.itemsize

    def encode(self, numbers: Tensor, rows: Tensor) -> None:
        halves, scales = self._parts(rows, numbers)
        if self._kind == torch.bfloat16:
            halves.copy_(numbers)
            return
        peak = peaks(numbers).amax(-1, keepdim=True)
        exponent = torch.frexp(peak.clamp_(min=2.0**-100)).exponent
        scales.copy_(torch.ldexp(torch.ones_like(peak), exponent - 15))
        torch.mul(numbers, (1 / scales).unsqueeze(-1), out=(moved := torch.empty_like(numbers)))
        halves.copy_(moved)

    def decode(self, rows: Tensor, numbers: Tensor) -> None:
        halves, scales = self._parts(rows, numbers)
        numbers.copy_(halves)
        if self._kind == torch.float16:
            numbers.mul_(scales.unsqueeze(-1))

    def _parts(self, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = scaled(rows, 2 * numbers[0].numel(), numbers.dtype)
        return codes.view(self._kind).view(numbers.shape), scales
