"""Two shots: every worker adds up one slice, in full, and tells the others the sum.

    worker 0   bytes of its slices ──┐ all-to-all    adds up slice 0 ──┐ all-gather    reads all
    worker 1   bytes of its slices ──┤               adds up slice 1 ──┤               reads all
    worker 2   bytes of its slices ──┘               adds up slice 2 ──┘               reads all

So a number is made into a code twice, however many workers there are, and a sum never has to fit
into a code on its way. Every worker reads the same bytes, those of its own slice too: all have the
same bits.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from offbeat.codecs.base import Coder, Sum
from offbeat.codecs.cuts import Cut, cuts
from offbeat.worlds.base import Channel

Key = tuple[int, int]  # a tensor's place, and where in it a chunk begins


class Sliced(Coder):
    """A coder whose sums are made by the slice."""

    block = 256
    """Numbers that share a scale."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self._rooms: dict[Key, tuple[Tensor, Tensor]] = {}  # bytes to send, and received

    def sums(
        self, channel: Channel, tensor: Tensor, place: int, brings: bool, not_before: float | None
    ) -> list[Sum]:
        return [
            self._sum(channel, tensor, cut, place, brings, not_before)
            for cut in cuts(tensor.numel(), self.size, self.block)
        ]

    @abstractmethod
    def _sum(
        self,
        channel: Channel,
        tensor: Tensor,
        cut: Cut,
        place: int,
        brings: bool,
        not_before: float | None,
    ) -> Sum:
        """Sum one chunk of a tensor."""

    @abstractmethod
    def row_bytes(self, cut: Cut, dtype: torch.dtype) -> int:
        """How long a slice is on the wire; a multiple of `dtype.itemsize`."""

    def _room(self, key: Key, cut: Cut, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Where the bytes of a chunk are; the same in every round."""
        room = self._rooms.get(key)
        if room is None:
            shape = (cut.slices, self.row_bytes(cut, tensor.dtype))
            empty = [torch.empty(shape, dtype=torch.uint8, device=tensor.device) for _ in range(2)]
            room = self._rooms[key] = empty[0], empty[1]
        return room

    def regroup(self, size: int) -> None:
        super().regroup(size)
        self._rooms.clear()


class TwoShot(Sliced):
    """Numbers to bytes and back, once on the way to a slice's sum and once on the way from it."""

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
        rows, received = self._room(key, cut, tensor)
        self._give(numbers, rows, key, brings)
        yield channel.all_to_all(rows, received, not_before)
        mine = torch.empty_like(received[0])
        self._add_up(received, mine, cut, tensor.dtype, key)
        yield channel.all_gather(mine, rows)
        self.decode(rows, numbers)
        cut.put(numbers, tensor)

    @abstractmethod
    def encode(self, numbers: Tensor, rows: Tensor) -> None:
        """Make rows of bytes of slices of blocks."""

    @abstractmethod
    def decode(self, rows: Tensor, numbers: Tensor) -> None:
        """Make slices of blocks of rows of bytes."""

    def _give(self, numbers: Tensor, rows: Tensor, key: Key, brings: bool) -> None:
        """Make bytes of what this worker gives."""
        self.encode(numbers, rows)

    def _add_up(
        self, received: Tensor, mine: Tensor, cut: Cut, dtype: torch.dtype, key: Key
    ) -> None:
        """Make bytes of the sum of everybody's row."""
        self.encode(self._summed(received, cut, dtype), mine.unsqueeze(0))

    def _summed(self, received: Tensor, cut: Cut, dtype: torch.dtype) -> Tensor:
        """Add up everybody's numbers, by rank."""
        shape = (1, cut.blocks, cut.block)
        total = torch.empty(shape, dtype=dtype, device=received.device)
        more = torch.empty_like(total)
        for rank, row in enumerate(received):
            self.decode(row.unsqueeze(0), more if rank else total)
            if rank:
                total.add_(more)
        return total


def scaled(rows: Tensor, codes_bytes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A row's codes, and the scales behind them."""
    return rows[:, :codes_bytes], rows[:, codes_bytes:].view(dtype)


def peaks(numbers: Tensor) -> Tensor:
    """The largest absolute number of each block: two passes, each quicker than one over both."""
    return torch.maximum(numbers.amax(-1), numbers.amin(-1).neg_())
