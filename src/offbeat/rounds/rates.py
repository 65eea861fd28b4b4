"""The learning rate belongs to the round: what param groups hold, agreed by those who contribute.

Workers take different numbers of steps, and people step their schedulers in the loop. So every
contribution carries what its worker's param groups hold, and a round is applied with one value on
all replicas:

    all contributors hold the same value    that value, to the bit
    they differ                             the mean over the round's samples

Both must come out of a *sum* over workers, which is what travels. A value goes along twice: its 64
bits in pieces whose sums are exact, which gives it back if all are the same; and times samples.
Whatever comes out, it is a function of sums that all workers hold, so replicas stay identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import pack, unpack
from typing import Any

import torch
from torch.optim import Optimizer

# What schedulers and people change. Other entries of param groups may be the optimizer's own count.
NAMES = ("lr", "momentum", "betas", "weight_decay", "alpha", "dampening", "eps")
_SCHEDULED = ("lr", "momentum", "betas")
_PIECE = 12  # bits: sums of 4,096 workers' pieces are exact in float32
_PIECES = range(0, 64, _PIECE)
_SLOTS = len(_PIECES) + 3
_TINY = 1e-37  # what float32 cannot tell from 0


class Rates:
    """The numbers in an optimizer's param groups that a round is applied with."""

    def __init__(self, optimizer: Optimizer, scheduled: bool) -> None:
        self._optimizer = optimizer  # not its groups: a checkpoint that is loaded replaces them
        self._places: list[tuple[int, str, int | None]] = []
        for number, group in enumerate(optimizer.param_groups):
            for name in NAMES:
                if scheduled and name in _SCHEDULED:
                    continue  # offbeat steps that scheduler by rounds: all hold the same
                value = group.get(name)
                if isinstance(value, tuple | list):
                    self._places += [(number, name, index) for index in range(len(value))]
                elif _is_number(value):
                    self._places.append((number, name, None))
        self._kept: list[float] | None = None
        self._scaled: list[tuple[dict[str, Any], Any]] = []  # groups, and their own learning rate

    def __len__(self) -> int:
        return len(self._places)

    def values(self) -> list[float]:
        """What the param groups hold now."""
        groups = self._optimizer.param_groups
        return [
            float(groups[number][name] if index is None else groups[number][name][index])
            for number, name, index in self._places
        ]

    def put(self, agreed: Sequence[float], scale: float = 1.0) -> None:
        """Have a round's values in the param groups, learning rates scaled, until `put_back`."""
        mine = self.values()
        if list(agreed) != mine:
            self._kept = mine
            self._write(agreed)
        if scale != 1.0:
            self._scale(scale)

    def _scale(self, scale: float) -> None:
        """All groups' learning rates: a scheduler's, too, which are in no round."""
        for group in self._optimizer.param_groups:
            own = group["lr"]
            self._scaled.append((group, own.clone() if isinstance(own, torch.Tensor) else own))
            _set_lr(group, own * scale)

    def put_back(self) -> None:
        """Have this worker's own values again."""
        while self._scaled:
            _set_lr(*self._scaled.pop())
        if self._kept is not None:
            self._write(self._kept)
            self._kept = None

    @torch.no_grad()
    def _write(self, values: Iterable[float]) -> None:
        groups = self._optimizer.param_groups
        for (number, name, index), value in zip(self._places, values, strict=True):
            group = groups[number]
            old = group[name] if index is None else group[name][index]
            if isinstance(old, torch.Tensor):  # in place: others may hold it, or a graph
                old.fill_(value)
            elif index is None:
                group[name] = _like(old, value)
            else:
                several = list(group[name])
                several[index] = _like(old, value)
                group[name] = type(group[name])(several)


@torch.no_grad()
def _set_lr(group: dict[str, Any], value: Any) -> None:
    if isinstance(old := group["lr"], torch.Tensor):  # in place: others may hold it
        old.copy_(value)
    else:
        group["lr"] = value


def room(values: int) -> int:
    """How many numbers of a header so many values take."""
    return values * _SLOTS


@lru_cache(maxsize=64)
def written(values: tuple[float, ...], samples: float) -> tuple[float, ...]:
    """One contributor's numbers; none, which are zeros, if it brings no samples."""
    if not samples:
        return ()
    numbers: list[float] = []
    for value in values:
        (bits,) = unpack("<Q", pack("<d", value))
        numbers += [float(bits >> low & (1 << _PIECE) - 1) for low in _PIECES]
        numbers += in_parts(value * samples)
    return tuple(numbers)


def read(numbers: Sequence[float], contributors: int, samples: float) -> tuple[float, ...]:
    """What the sum of all contributors' numbers says.

    >>> two = [sum(pair) for pair in zip(written((0.1,), 3.0), written((0.1,), 5.0))]
    >>> read(two, contributors=2, samples=8.0)
    (0.1,)
    >>> two = [sum(pair) for pair in zip(written((0.1,), 3.0), written((0.3,), 1.0))]
    >>> round(read(two, contributors=2, samples=4.0)[0], 12)
    0.15
    """
    if not contributors or not samples:
        return ()
    values = []
    for first in range(0, len(numbers), _SLOTS):
        pieces = numbers[first : first + len(_PIECES)]
        mean = sum(numbers[first + len(_PIECES) : first + _SLOTS]) / samples
        bits = 0
        for low, piece in zip(_PIECES, pieces, strict=True):
            bits |= int(piece) // contributors << low
        (value,) = unpack("<d", pack("<Q", bits & 2**64 - 1))
        whole = all(piece % contributors == 0 for piece in pieces)
        # The pieces of different values may add up to multiples, too, but to nothing near the mean,
        # or to one that is as good. The mean itself is that of float32 sums over many workers.
        same = whole and abs(value - mean) <= 1e-3 * abs(mean) + _TINY
        values.append(value if same else mean)
    return tuple(values)


@lru_cache(maxsize=64)
def in_parts(number: float) -> tuple[float, float, float]:
    """Split a number into three that float32 holds, and whose sum is exactly it, or nearly."""
    high = _float32(number)
    middle = _float32(number - high)
    return high, middle, _float32(number - high - middle)


def _float32(number: float) -> float:
    rounded: float = unpack("f", pack("f", number))[0]
    return rounded


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _like(old: Any, value: float) -> Any:
    """The value in the kind of number that was there."""
    return type(old)(value) if not isinstance(old, int) or value == int(value) else value
