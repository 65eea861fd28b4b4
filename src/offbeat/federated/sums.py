"""Sums over clients through a channel of the world: plain, or masked so that only the sum is seen.

    sums.counts(tensor)      whole numbers, exact
    sums.floats(tensor)      as doubles; masked, as fixed-point numbers

Every client asks for the same sums in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.federated.secure import Masks
from offbeat.worlds import Channel

_BITS = 32


class Sums:
    """Sums as they are: whoever listens on the network sees what each client gives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.sent_bytes = 0
        """What this client has given to sums so far."""

    def counts(self, mine: Tensor) -> Tensor:
        """Return the sum over clients of whole numbers."""
        return self._sum(mine.long())

    def floats(self, mine: Tensor) -> Tensor:
        """Return the sum over clients, in double precision."""
        return self._sum(mine.double())

    def _sum(self, mine: Tensor) -> Tensor:
        total = mine.clone(memory_format=torch.contiguous_format)
        self._channel.all_reduce(total).wait()
        self.sent_bytes += total.numel() * total.element_size()
        return total


class MaskedSums(Sums):
    """Sums of which nobody sees one client's part: see secure.py.

    Fractions have 32 bits, so that a sum is exact to 2^-33 a client, and must stay below 2^31.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        super().__init__(channel)
        self._masks, self._number = Masks(rank), 0
        mine = torch.frombuffer(bytearray(self._masks.public), dtype=torch.int64)
        keys = torch.empty(len(channel.members), len(mine), dtype=torch.int64)
        channel.all_gather(mine, keys).wait()
        publics = (each.numpy().tobytes() for each in keys)
        self._masks.meet(dict(zip(channel.members, publics, strict=True)))
        self.sent_bytes += mine.numel() * 8

    def masked(self, mine: Tensor) -> Tensor:
        """Return what this client gives to the next sum: noise, for whoever has not the keys."""
        mask = self._masks.mask(self._number, mine.numel()).view(mine.shape)
        self._number += 1
        return mine + mask

    def counts(self, mine: Tensor) -> Tensor:
        return self._sum(self.masked(mine.long()))

    def floats(self, mine: Tensor) -> Tensor:
        most = 2.0 ** (63 - _BITS) / len(self._channel.members)
        if mine.numel() and not mine.abs().max() < most:
            raise ValueError(
                f"a masked sum over {len(self._channel.members)} clients takes numbers below "
                f"{most:g}, got {float(mine.abs().max()):g}: scale the features down, or "
                "learn with secure=False"
            )
        fixed = (mine.double() * 2.0**_BITS).round().long()
        return self._sum(self.masked(fixed)).double() / 2.0**_BITS
