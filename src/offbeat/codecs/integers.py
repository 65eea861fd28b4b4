"""Whole numbers with a scale for every block: 8 bits, or 4 with error feedback.

    scale = largest absolute number of the block / 127        code = round(number / scale)

by two shots (two_shot.py). To the nearest, so a code is off by half a scale at most; and it is that
twice, for any number of workers. With error feedback (Seide et al., Interspeech 2014) a worker adds
to what it gives what rounding has left out of the round before; so does who adds up a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Coder, Sum
from offbeat.codecs.cuts import ALIGNED, Cut
from offbeat.codecs.two_shot import Key, TwoShot, peaks, scaled
from offbeat.worlds.base import Channel

_LEAST = 1e-30
"""A block whose numbers are all smaller is one of zeros."""


@dataclass(frozen=True)
class Int8(Codec):
    """8 bits a number, and a scale for every block: a quarter of the bytes."""

    block: int = 256
    """Numbers that share a scale; fewer where a tensor has fewer."""

    def __post_init__(self) -> None:
        check_block(self.block)

    def coder(self, size: int, rank: int) -> Coder:
        return Integers(size, rank, 8, self.block, False)


@dataclass(frozen=True)
class Int4(Codec):
    """4 bits a number, and a scale for every block: an eighth of the bytes, and a little more."""

    block: int = 128
    error_feedback: bool = True
    """Whether what rounding has left out goes into the next round; it takes as much memory as the
    model."""

    def __post_init__(self) -> None:
        check_block(self.block)
        if not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback must be True or False, got {self.error_feedback!r}")

    @property
    def feeds_back(self) -> bool:  # type: ignore[override]
        return self.error_feedback

    def coder(self, size: int, rank: int) -> Coder:
        return Integers(size, rank, 4, self.block, self.error_feedback)


def check_block(block: object) -> None:
    """Raise ValueError unless blocks of so many numbers can be packed."""
    if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block % ALIGNED:
        raise ValueError(f"block must be a multiple of {ALIGNED} above 0, got {block!r}")


class Integers(TwoShot):
    """One worker's codes of 4 or 8 bits."""

    def __init__(self, size: int, rank: int, bits: int, block: int, feeds_back: bool) -> None:
        super().__init__(size, rank)
        self.block = block
        self._bits = bits
        self._most = 2 ** (bits - 1) - 1
        self._feeds_back = feeds_back
        self._left_out: dict[int, Tensor] = {}  # by place: what this worker's rounding has
        self._owned: dict[Key, Tensor] = {}  # of its slices' sums
        self._leaves_out: dict[Key, Tensor] = {}  # the same of a round that may be made again
        self._will_own: dict[Key, Tensor] = {}

    def row_bytes(self, cut: Cut, dtype: torch.dtype) -> int:
        return cut.slice * self._bits // 8 + cut.blocks * dtype.itemsize

    def encode(self, numbers: Tensor, rows: Tensor) -> None:
        codes, scales = self._parts(rows, numbers)
        peak = peaks(numbers).clamp_(min=_LEAST)
        torch.div(peak, self._most, out=scales)
        rounded = numbers * (self._most / peak).unsqueeze(-1)
        rounded.round_()
        if self._bits == 4:
            pack(rounded.add_(8), codes)
        else:
            codes.view(torch.int8).view(numbers.shape).copy_(rounded)

    def decode(self, rows: Tensor, numbers: Tensor) -> None:
        codes, scales = self._parts(rows, numbers)
        if self._bits == 4:
            unpack(codes, numbers)
            numbers.sub_(8)
        else:
            numbers.copy_(codes.view(torch.int8).view(numbers.shape))
        numbers.mul_(scales.unsqueeze(-1))

    def _parts(self, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        slice_ = numbers.shape[1] * numbers.shape[2]
        return scaled(rows, slice_ * self._bits // 8, numbers.dtype)

    # --- error feedback ------------------------------------------------------------------------

    def _give(self, numbers: Tensor, rows: Tensor, key: Key, brings: bool) -> None:
        """A worker that brings nothing gives nothing: nobody may apply such a round."""
        if not (self._feeds_back and brings):
            super()._give(numbers, rows, key, brings)
            return
        place, first = key
        before = self._left_out[place][first : first + numbers.numel()]
        numbers.view(-1)[: len(before)].add_(before)
        self.encode(numbers, rows)
        self._leaves_out[key] = self._rest(numbers, rows)

    def _add_up(
        self, received: Tensor, mine: Tensor, cut: Cut, dtype: torch.dtype, key: Key
    ) -> None:
        if not self._feeds_back:
            super()._add_up(received, mine, cut, dtype, key)
            return
        total, rows = self._summed(received, cut, dtype), mine.unsqueeze(0)
        before = self._owned.get(key)
        brings = bool(total.any())  # else nobody may apply it
        if before is not None and brings:
            total.add_(before)
        self.encode(total, rows)
        if brings:
            self._will_own[key] = self._rest(total, rows)

    def _rest(self, numbers: Tensor, rows: Tensor) -> Tensor:
        """What the codes leave out; nothing of a block that is not finite."""
        rest = torch.empty_like(numbers)
        self.decode(rows, rest)
        torch.sub(numbers, rest, out=rest)
        _, scales = self._parts(rows, numbers)
        if not scales.isfinite().all():
            rest.masked_fill_(~scales.isfinite().unsqueeze(-1), 0.0)
        return rest

    def sums(
        self, channel: Channel, tensor: Tensor, place: int, brings: bool, not_before: float | None
    ) -> list[Sum]:
        if self._feeds_back and place not in self._left_out:
            self._left_out[place] = torch.zeros_like(tensor)
        return super().sums(channel, tensor, place, brings, not_before)

    def keep(self) -> None:
        super().keep()
        for (place, first), rest in self._leaves_out.items():
            into = self._left_out[place][first : first + rest.numel()]
            into.copy_(rest.view(-1)[: len(into)])
        self._owned.update(self._will_own)
        self._leaves_out.clear()
        self._will_own.clear()

    def regroup(self, size: int) -> None:
        """What this worker has left out stays its own; the slices are others now."""
        super().regroup(size)
        for each in (self._owned, self._leaves_out, self._will_own):
            each.clear()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "left_out": {place: each.clone() for place, each in self._left_out.items()},
            "owned": {key: each.clone() for key, each in self._owned.items()},
            "size": self.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._left_out = {place: each.clone() for place, each in state.get("left_out", {}).items()}
        owned = state.get("owned", {}) if state["size"] == self.size else {}  # else other slices
        self._owned = {key: each.clone() for key, each in owned.items()}


def pack(codes: Tensor, into: Tensor) -> None:
    """Two codes of 0 to 15 a byte, those of the first half of a block beneath the second's."""
    half = codes.shape[-1] // 2
    both = codes[..., :half].add(codes[..., half:], alpha=16)
    into.view(both.shape).copy_(both)


def unpack(packed: Tensor, into: Tensor) -> None:
    """The codes of `pack`."""
    half = into.shape[-1] // 2
    packed = packed.view(*into.shape[:-1], half)
    into[..., :half].copy_(packed & 15)
    into[..., half:].copy_(packed >> 4)
