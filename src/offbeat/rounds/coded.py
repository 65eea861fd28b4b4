"""Buckets that travel as bytes of a codec; the header beside them, as it is.

The sums of all buckets go stage by stage (codecs/base.py):

    launched                 b0: to bytes, all-to-all    b1: to bytes, all-to-all    header
    when all are launched    b0: add up, all-gather      b1: add up, all-gather
                             b0: read                    b1: read

So every worker begins all collectives in one order, whenever it launches which bucket.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from offbeat.codecs.base import Coder, Sum
from offbeat.rounds.exchange import Launches
from offbeat.rounds.pile import Pile
from offbeat.worlds.base import Channel, Work, World


class CodedLaunches(Launches):
    """The buckets of the next round that are under way, as bytes."""

    def __init__(
        self, coder: Coder, world: World, channel: Channel, copies: Callable[[], Pile] | None
    ) -> None:
        super().__init__(channel, copies)
        coder.regroup(len(channel.members))
        self._world = world
        self._coder = coder
        self._sums: list[_Summed] = []
        self._bytes = 0  # of numbers that the codec has to read and to write
        self._launch_s = 0.0  # what launching has taken, of which backward knows nothing

    def launch(self, pile: Pile, not_before: float | None = None) -> None:
        began_s = self._world.now()
        super().launch(pile, not_before)
        self._launch_s += self._world.now() - began_s

    def _begin(self, pile: Pile, tensor: Tensor, not_before: float | None) -> Work:
        if self._coder.free or self._coder.size == 1:
            return super()._begin(pile, tensor, not_before)
        number, order = len(self), pile.order
        header: Work = _NOTHING
        flats = pile.flats if self._copy is None else self._copy.flats
        if number < len(order):
            body = flats.bodies[order[number]]
            brings = bool(pile.micro_batches) or pile.written
            sums = self._coder.sums(self._channel, body, order[number], brings, not_before)
            self._sums += [_Summed(each) for each in sums]
            self._bytes += body.nbytes
        if number == len(pile.tensors) - 1:
            numel = pile.layout.buckets[-1].numel
            header = self._channel.all_reduce(flats.tensors[-1][numel:])
        return header

    def end(self, pile: Pile) -> None:
        began_s = self._world.now() - self._launch_s
        self._launch_rest(pile)
        sums, self._sums = self._sums, []
        if (codec_s := self._world.codec_s(self._bytes)) > 0:
            self._world.sleep_until(self._world.now() + codec_s)
        self._bytes, self._launch_s = 0, 0.0
        while sums:
            sums = [each for each in sums if each.goes_on()]
        super().end(pile)
        self._coder.ended(self._channel, self._world.now() - began_s)

    def missed(self) -> None:
        self._coder.keep()


class _Summed:
    """A sum, and the work of it that is under way."""

    def __init__(self, sum_: Sum) -> None:
        self._sum = sum_
        self._work = next(sum_)

    def goes_on(self) -> bool:
        """Wait for the stage that is under way, and begin the next; say whether there is one."""
        self._work.wait()
        following = next(self._sum, None)
        if following is not None:
            self._work = following
        return following is not None


class _Nothing:
    def wait(self) -> None:
        """There is nothing to wait for."""


_NOTHING = _Nothing()
