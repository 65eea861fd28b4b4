"""What travels to whom: one worker's pile, from it to all the others.

Without a header: what the others must know of it stands in its entry (entries.py), which they have
heard before. So a gradient that does not count need not travel.
"""

from __future__ import annotations

import torch

from offbeat.rounds.header import Header
from offbeat.rounds.layout import Layout
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, World


class FromOneToAll:
    """Broadcasts of one layout's buckets."""

    repeats = False

    def __init__(self, world: World, channel: Channel, layout: Layout, header: Header) -> None:
        self._channel = channel
        for bucket in layout.buckets:  # make the groups now, not with the first gradient
            channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()

    def exchange(self, pile: Pile, source: int) -> None:
        """Fill the pile with that worker's, which brings its own."""
        pile.blank = False
        works = [self._channel.broadcast(body, source) for body in pile.flats.bodies]
        for work in works:
            work.wait()
