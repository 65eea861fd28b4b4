"""Global-QSGD: codes that can be added, since all workers share one scale.

Xin, Canini, Richtárik, Horváth: "Global-QSGD: Allreduce-compatible quantization for distributed
learning with theoretical guarantees", EuroMLSys 2025.

    M = max over workers and numbers of |x|                                  # a max all-reduce
    standard     code = x s/M, rounded up or down at random, so that it is right on average
                 the sum of all workers' codes is a code, times M/s
    exponential  level 0 or 2^-e: the two next to |x|/N, at random, so that it is right on average
                 codes are added pairwise along a tree, each sum is rounded the same way, times N

s is 127/P, for codes of 8 bits: the sum of P codes has to be one.

Differs from the paper: a sum never overflows. In the authors' code P codes of at most ceil(127/P)
may add up to 128, which 8 bits read as -128: with four workers that share their largest number, in
32 rounds of 100. Here a worker adds up a slice by itself (two_shot.py), with room, and what is
beyond 127 becomes 127. So the mean of such a number is off by 0.25 %; all others are right on
average. Any number of workers, not only powers of two: the tree is no matter of messages. All zeros
stay zeros.

With a `margin` the scale is foretold: so many times the largest number of the round before. A
worker's largest number goes along with its codes, so after the all-to-all all know the same M, and
whether the scale held. If a number was beyond it, or all were far below, the codes go once more,
with M itself. So a round that it held for has a message less, and its codes need not wait for M.

Do not use when there are many workers: the standard kind has 127/P levels, so its error grows with
them. `Int8` has no such limit, sends as many bytes, and is more exact for any number.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from offbeat.clusters import draws
from offbeat.codecs.base import Codec, Coder, Sum
from offbeat.codecs.cuts import Cut
from offbeat.codecs.integers import pack, unpack
from offbeat.codecs.two_shot import Key, Sliced, peaks
from offbeat.worlds.base import Channel

Kind = Literal["standard", "exponential"]
_SEED = 230518627
_LEAST = 1e-30
_COARSE = 4
"""A foretold scale is too large if the largest number has become so many times smaller."""
_WIRE = {8: torch.int8, 16: torch.int16}


@dataclass(frozen=True)
class GlobalQSGD(Codec):
    """One scale for all workers, and rounding at random that is right on average."""

    kind: Kind = "standard"
    bits: int = 8
    """Of a code, between 2 and 16. On the wire it takes 4, 8 or 16."""
    seed: int = 0
    margin: float | None = None
    """The scale is taken to be so many times the largest number of the round before, which saves a
    round trip; the error grows with it. None: all agree on the scale in every round."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be 'standard' or 'exponential', got {self.kind!r}")
        for name, value in (("bits", self.bits), ("seed", self.seed)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if not 2 <= self.bits <= 16:
            raise ValueError(f"bits must be between 2 and 16, got {self.bits}")
        if self.kind == "exponential" and self.bits > 8:
            raise ValueError(
                f"bits must be between 2 and 8 for exponential levels, got {self.bits}: "
                "8 bits reach down to 2^-127 already"
            )
        if self.margin is not None and not (
            type(self.margin) in (int, float) and 1 <= self.margin < math.inf
        ):
            raise ValueError(f"margin must be a number of at least 1, or None, got {self.margin!r}")

    def check(self, size: int) -> None:
        most, least = 2 ** (self.bits - 1) - 1, headroom(size) + 1
        if self.kind == "exponential" and most < least:
            raise ValueError(
                f"GlobalQSGD('exponential', bits={self.bits}) has {most} levels, and {size} "
                f"workers need {least}: take more bits, or Int8(), which any number can use"
            )

    def coder(self, size: int, rank: int) -> Coder:
        kind = Standard if self.kind == "standard" else Exponential
        return kind(size, rank, self.bits, self.seed, self.margin)


def headroom(size: int) -> int:
    """By how many powers of two a sum may exceed what one worker gives: the height of a tree."""
    return (size - 1).bit_length()


class SharedScale(Sliced):
    """One worker's codes, all with the same scale; as whole numbers, in float32."""

    def __init__(
        self, size: int, rank: int, bits: int, seed: int, margin: float | None = None
    ) -> None:
        super().__init__(size, rank)
        self._margin = margin
        self.sent_again = 0
        """How often what was foretold did not hold: chunks of all rounds."""
        self._peaks: dict[Key, float] = {}  # the largest number of the latest round, of all workers
        self._wire_bits = 4 if bits <= 4 else 8 if bits <= 8 else 16
        self._most = 2 ** (bits - 1) - 1
        self._seed = seed

    def _sum(
        self,
        channel: Channel,
        tensor: Tensor,
        cut: Cut,
        place: int,
        brings: bool,
        not_before: float | None,
    ) -> Sum:
        key, numbers = (place, cut.first), cut.of(tensor)
        own = peaks(numbers).amax().view(1)
        peak = self._foretold(key, own)
        if peak is None:
            yield channel.all_reduce(peak := own.clone(), "max", not_before)
            not_before = None
        stream = draws.key(_SEED, self._seed, self.rank, self.rounds, place, cut.first)
        random = torch.Generator(tensor.device).manual_seed(stream >> 1)
        rows, received = self._room(key, cut, tensor)
        self._give(numbers, own, peak, random, rows)
        yield channel.all_to_all(rows, received, not_before)
        if self._margin is not None and (true := self._true(key, peak, received, own)) is not None:
            self.sent_again += 1
            self._give(numbers, own, peak := true, random, rows)
            yield channel.all_to_all(rows, received)
        mine = torch.empty_like(received[0])
        self._write(self.added(self._read(received, cut), random), mine.unsqueeze(0))
        yield channel.all_gather(mine, rows)
        numbers.copy_(self.numbers(self._read(rows, cut), peak))
        cut.put(numbers, tensor)

    def _give(
        self, numbers: Tensor, own: Tensor, peak: Tensor, random: torch.Generator, rows: Tensor
    ) -> None:
        """Make bytes of what this worker gives, and of its largest number, if that goes along."""
        self._write(self.codes(numbers, peak.clamp_(min=_LEAST), random), rows)
        if self._margin is not None:
            rows[:, -own.itemsize :].view(own.dtype).copy_(own)

    def _foretold(self, key: Key, like: Tensor) -> Tensor | None:
        """The scale, if the round before tells it."""
        if self._margin is None or key not in self._peaks:
            return None
        return torch.full_like(like, self._margin * self._peaks[key])

    def _true(self, key: Key, peak: Tensor, received: Tensor, like: Tensor) -> Tensor | None:
        """The scale that codes must have, if it is another one: the same for all workers."""
        assert self._margin is not None
        largest = received[:, -like.itemsize :].view(like.dtype).max().view(1)
        found, had = largest.item(), peak.item()
        if not 0.0 < found < math.inf:  # all zeros, or a round that nobody applies
            return None
        self._peaks[key] = found
        return None if found <= had <= _COARSE * self._margin * found else largest

    @abstractmethod
    def codes(self, numbers: Tensor, peak: Tensor, random: torch.Generator) -> Tensor:
        """Codes of numbers, none of which is beyond the peak."""

    @abstractmethod
    def added(self, codes: Tensor, random: torch.Generator) -> Tensor:
        """The code of the sum of all workers' codes, which lie along the first axis; it stays."""

    @abstractmethod
    def numbers(self, codes: Tensor, peak: Tensor) -> Tensor:
        """What codes stand for."""

    def row_bytes(self, cut: Cut, dtype: torch.dtype) -> int:
        return cut.slice * self._wire_bits // 8 + dtype.itemsize * (self._margin is not None)

    def _write(self, codes: Tensor, rows: Tensor) -> None:
        rows = rows[:, : codes[0].numel() * self._wire_bits // 8]
        if self._wire_bits == 4:
            pack(codes.add(8), rows)
        else:
            rows.view(_WIRE[self._wire_bits]).view(codes.shape).copy_(codes)

    def _read(self, rows: Tensor, cut: Cut) -> Tensor:
        rows = rows[:, : cut.slice * self._wire_bits // 8]
        codes = torch.empty((len(rows), cut.blocks, cut.block), device=rows.device)
        if self._wire_bits == 4:
            unpack(rows, codes)
            return codes.sub_(8)
        return codes.copy_(rows.view(_WIRE[self._wire_bits]).view(codes.shape))

    def regroup(self, size: int) -> None:
        """Forget what was foretold: who was lost, or has missed a round, knew of another one."""
        super().regroup(size)
        self._peaks.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "peaks": dict(self._peaks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._peaks = dict(state["peaks"])


class Standard(SharedScale):
    """Levels at even distances, so many for each worker that their sum is the largest code."""

    def codes(self, numbers: Tensor, peak: Tensor, random: torch.Generator) -> Tensor:
        codes = torch.mul(numbers, self._most / self.size / peak)
        draw = torch.empty_like(codes).uniform_(generator=random)
        most = -(-self._most // self.size)  # float32 may round a draw up to 1
        return codes.add_(draw).floor_().clamp_(-most, most)

    def added(self, codes: Tensor, random: torch.Generator) -> Tensor:
        return codes.sum(0, keepdim=True).clamp_(-self._most, self._most)

    def numbers(self, codes: Tensor, peak: Tensor) -> Tensor:
        return torch.mul(codes, self.size * peak / self._most)


class Exponential(SharedScale):
    """Powers of two: a code is ±e for ±2^-e of the largest sum there can be, or 0 for nothing."""

    def codes(self, numbers: Tensor, peak: Tensor, random: torch.Generator) -> Tensor:
        room = headroom(self.size) + 1
        share = torch.ldexp(numbers.abs().div_(peak), torch.tensor(-room))
        draw = torch.empty_like(share).uniform_(generator=random)
        mantissa, exponent = torch.frexp(share)
        codes = (draw >= mantissa.mul_(2).sub_(1)).to(share.dtype).sub_(exponent)
        codes.clamp_(min=room)
        least = 2.0**-self._most
        codes = torch.where(share < least, self._flushed(share / least, draw), codes)
        return codes.mul_(numbers.sign()).nan_to_num_(0.0, 0.0, 0.0)

    def _flushed(self, share: Tensor, draw: Tensor) -> Tensor:
        """The smallest level or none, at random, for a share of that level."""
        return torch.where(draw < share, float(self._most), 0.0)

    def added(self, codes: Tensor, random: torch.Generator) -> Tensor:
        while len(codes) > 1:
            pairs = len(codes) // 2 * 2
            sums = self._pairs(codes[0:pairs:2], codes[1:pairs:2], random)
            codes = torch.cat((sums, codes[pairs:]))
        return codes

    def _pairs(self, one: Tensor, other: Tensor, random: torch.Generator) -> Tensor:
        """The code of each sum of two: of the larger one, its neighbour's, or none."""
        first, second = (each.abs().masked_fill_(each == 0, math.inf) for each in (one, other))
        larger, apart = torch.minimum(first, second), (first - second).abs_()
        same = one.sign() == other.sign()
        draw = torch.empty_like(one).uniform_(generator=random)
        # equal signs: 2^-e (1 + 2^-d); unlike ones: 2^-e (1 - 2^-d)
        up = same & (draw < torch.exp2(-apart))
        down = ~same & (draw < torch.exp2(1 - apart))
        sums = larger - up.to(one.dtype) + down.to(one.dtype)
        if (beyond := (sums > self._most) & sums.isfinite()).any():
            draw = torch.empty_like(one).uniform_(generator=random)
            sums = torch.where(beyond, self._flushed(torch.tensor(0.5), draw), sums)
        nothing = larger.isinf() | (~same & (apart == 0))
        signs = torch.where(first <= second, one.sign(), other.sign())
        return sums.masked_fill_(nothing, 0.0).mul_(signs)

    def numbers(self, codes: Tensor, peak: Tensor) -> Tensor:
        shares = torch.exp2(headroom(self.size) + 1 - codes.abs()).masked_fill_(codes == 0, 0.0)
        return shares.mul_(codes.sign()).mul_(peak)
