"""Buckets whose directions are summed, and whose lengths apart: Decoupled DiLoCo's RDA.

Of every parameter, with the workers' moves v and weights w:

    what travels    sum w v/|v|, and one number: sum w |v|
    what comes out  sum w |v|, in the direction of sum w v/|v|

over the sum of all weights, by which whoever reads a sum divides it. So the result is as long as
the moves are on average, also where they cancel out. If their directions do so to the bit, nothing
moves. What is no parameter, a running statistic say, is summed as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from offbeat.rounds.exchange import Launches
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, Work, World


class Directions(Launches):
    """The buckets of the next round that are under way, as directions."""

    def __init__(
        self, world: World, channel: Channel, copies: Callable[[], Pile] | None = None
    ) -> None:
        super().__init__(channel, copies)
        self._lengths: Tensor | None = None  # by parameter: this worker's, times its weight

    @torch.no_grad()
    def _begin(self, pile: Pile, tensor: Tensor, not_before: float | None) -> Work:
        number, order = len(self), pile.order
        if self._lengths is None:
            count, first = len(pile.layout.slots), pile.layout.buckets[0]
            self._lengths = torch.zeros(count, dtype=first.dtype, device=first.device)
        if number < len(order) and pile.micro_batches:
            weight = pile.batch_per_step
            for each in _moved(pile, order[number]):
                move = self._views(pile)[each]
                length = float(torch.linalg.vector_norm(move))
                self._lengths[each] = length
                if length:
                    move.mul_(weight / length)  # it was written times its weight
        return super()._begin(pile, tensor, not_before)

    @torch.no_grad()
    def end(self, pile: Pile) -> None:
        """Have the sum's directions, each as long as all moves were, in the pile."""
        self._launch_rest(pile)
        lengths = cast(Tensor, self._lengths)
        self._lengths = None
        self._channel.all_reduce(lengths).wait()  # first: if it fails, the pile is as it was
        super().end(pile)
        for bucket in pile.order:
            for each in _moved(pile, bucket):
                directions = pile.flats.views[each]
                length = float(torch.linalg.vector_norm(directions))
                if length:
                    directions.mul_(float(lengths[each]) / length)

    def _views(self, pile: Pile) -> list[Tensor]:
        """Of what travels."""
        return (pile if self._copy is None else self._copy).flats.views


def _moved(pile: Pile, bucket: int) -> list[int]:
    """The parameters in a bucket."""
    parameters = pile.layout.parameters
    numbers = pile.layout.buckets[bucket].parameters
    return [number for number in numbers if isinstance(parameters[number], nn.Parameter)]
