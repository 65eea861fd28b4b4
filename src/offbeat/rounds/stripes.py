"""A large state in stripes: several workers that hold the same bytes give a part of them each.

Who joins needs all that the others have made. Where all of them have the same, to the bit, after
the same round, each of several copies a stripe of it: the row of these tensors' bytes, one after
the other, is cut into as many pieces as there are givers. So in a lockstep, where all wait for the
slowest, each waits for a part of the copy only; and the stripes come over several links.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.rounds.packed import ALIGNED, aligned

STRIPED_BYTES = 2**24
"""From parameters of so many bytes on, several give the state. One worker copies less than that in
some 4 ms, and to connect several takes them longer."""
MOST_GIVERS = 8
"""How many do so at most: each needs a connection, and an eighth of a copy is short enough."""


class Gift(NamedTuple):
    """What a joiner needs of a worker."""

    state: Any
    """All of it: tensors in anything that can be pickled."""
    common: list[Tensor]
    """Which of these are the same on all workers after the same round, to the bit."""


def chosen(here: Sequence[int]) -> tuple[int, ...]:
    """Who of these give a stripe: far from each other, since neighbours share a host."""
    count = min(len(here), MOST_GIVERS)
    return tuple(here[number * len(here) // count] for number in range(count))


def size_of(tensors: Sequence[Tensor]) -> int:
    """The length of the row of their bytes."""
    return sum(aligned(each.nbytes) for each in tensors)


def ends_of(size: int, number: int, count: int) -> tuple[int, int]:
    """Where one of several stripes of such a row begins and ends."""
    length = aligned(-(-size // count)) if size else ALIGNED
    return min(number * length, size), min((number + 1) * length, size)


def copy_stripe(tensors: Sequence[Tensor], begin: int, end: int, into: Tensor) -> None:
    """Copy a stripe of the row, from whatever devices the tensors are on."""
    place = 0
    for each in tensors:
        first, last = max(begin - place, 0), min(end - place, each.nbytes)
        if first < last:
            piece = each.detach().reshape(-1).view(torch.uint8)[first:last]
            into[place + first - begin : place + last - begin].copy_(piece)
        place += aligned(each.nbytes)
