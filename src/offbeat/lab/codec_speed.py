"""How quickly a worker makes bytes of numbers, and numbers of bytes, while all others do.

A sum by a codec is a generator of works (codecs/base.py). What passes inside of it is the codec's
own; what passes in the waits between is the network's, and other workers'.
"""

from __future__ import annotations

from statistics import median

import torch

from offbeat.codecs import Int8
from offbeat.codecs.base import Sum
from offbeat.worlds import World

NUMBERS = 2**20
TURNS = 8
_WARM_UP = 2


def codec_bytes_per_s(world: World) -> float:
    """Bytes of float32 that `Int8` codes, adds up and reads in a second; every worker calls this.

    The median of several turns.
    """
    channel = world.channel("profile codec")
    coder = Int8().coder(world.size, world.rank)
    random = torch.Generator().manual_seed(world.rank)
    given = torch.randn(NUMBERS, generator=random)
    tensor, meet, taken = torch.empty_like(given), torch.zeros(1), []
    for turn in range(-_WARM_UP, TURNS):
        tensor.copy_(given)
        channel.all_reduce(meet).wait()
        own_s = sum(
            _own_s(world, each) for each in coder.sums(channel, tensor, 0, True, not_before=None)
        )
        coder.keep()
        if turn >= 0:
            taken.append(own_s)
    channel.close()
    passed_s = median(taken)
    return given.nbytes / passed_s if passed_s > 0 else float("inf")  # virtual hardware is


def _own_s(world: World, sum_: Sum) -> float:
    """Have a sum made; what has passed outside of its waits."""
    own_s = 0.0
    while True:
        began_s = world.now()
        work = next(sum_, None)
        own_s += world.now() - began_s
        if work is None:
            return own_s
        work.wait()
