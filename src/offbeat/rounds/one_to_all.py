"""What travels to whom: one worker's pile, from it to all the others.

Without a header: what the others must know of it stands in its entry (entries.py), which they have
heard before. So a gradient that does not count need not travel.

Who sends may be through long before who receives. Where a loss is survived, a small all-reduce goes
along, so that nobody is through with a gradient before all have the one before it: then one is all
that anybody can have missed.
"""

from __future__ import annotations

import torch

from offbeat.rounds.header import Header
from offbeat.rounds.layout import Layout
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, World


class FromOneToAll:
    """Broadcasts of one layout's buckets."""

    repeats = True
    launches = None  # it is known before what becomes of a gradient: all of it goes, or nothing

    def __init__(self, world: World, channel: Channel, layout: Layout, header: Header) -> None:
        self._channel = channel
        self._meets = torch.zeros(1) if world.survives else None
        for bucket in layout.buckets:  # make the groups now, not with the first gradient
            channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()

    def exchange(self, pile: Pile, source: int) -> None:
        """Fill the pile with that worker's, which brings its own."""
        pile.blank = False
        if len(self._channel.members) == 1:
            return
        works = [self._channel.broadcast(body, source) for body in pile.flats.bodies]
        if self._meets is not None:
            works.append(self._channel.all_reduce(self._meets))
        for work in works:
            work.wait()
