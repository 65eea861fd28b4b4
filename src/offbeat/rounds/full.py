"""The full all-reduce: everyone's gradients of this round, summed, with what belongs to them.

A round is the buckets, in order, then one small *header*, which says what could only be known at
the end: how many samples each worker brings, which parameters have a gradient anywhere, whether a
worker is leaving, and whether a bucket that was launched during backward has been changed since.

    worker 0    backward ──b0────b1──┐ step: b2, header, wait ─┐ update
    worker 1    backward ────b0────b1┐ step: b2, header, wait ─┐ update
    worker 2    out of data: zeros,  b0, b1, b2, header ───────┐ update

Leaving is part of every round: a worker that has left its loop goes on to serve rounds with zeros
until a header says that all are leaving and nobody brings anything. That last round is not applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offbeat.rounds.agreement import different_rates
from offbeat.rounds.layout import Flats, Numbers
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Round, first_bad
from offbeat.worlds.base import Work, World


@dataclass(frozen=True)
class Contribution:
    """What one worker says of its part in a round, beyond what its pile says."""

    learning_rates: float
    """A fingerprint: replicas that step differently must not be averaged silently."""
    changed: bool
    """A gradient was changed after its bucket had been launched; the buckets must go again."""
    leaving: bool


class FullAllReduce:
    """The synchronous collective over one layout."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.channel = world.channel(name)
        self._works: list[Work] = []
        self._header: Numbers | None = None  # made in the first round

    @property
    def launched(self) -> int:
        """How many of this round's buckets are under way."""
        return len(self._works)

    def launch(self, flats: Flats, not_before: float | None = None) -> None:
        """Send the next bucket on its way."""
        tensor = flats.tensors[len(self._works)]
        self._works.append(self.channel.all_reduce(tensor, not_before=not_before))

    def finish(
        self, round: int, pile: Pile, mine: Contribution, refill: Callable[[], None]
    ) -> Round | None:
        """Launch what is left and wait for all; None if everybody is leaving.

        `refill` writes this worker's part into the pile again, if a worker has changed its own.
        """
        world, size = self._world, self._world.size
        began = world.now()
        numbers = self._reduced(pile, mine)
        if numbers[-1]:
            refill()
            numbers = self._reduced(pile, mine)
        samples, rates, bad = (numbers[slot * size :][:size] for slot in range(3))
        if (disagreement := different_rates(round, rates)) is not None:
            raise disagreement
        if numbers[-2] == size and not any(samples):
            return None
        return Round(
            round=round,
            sum=pile.flats,
            samples_by_rank=tuple(samples),
            divisor=sum(samples) / pile.unit,
            used=tuple(count > 0 for count in numbers[3 * size : -2]),
            waited_s=world.now() - began,
            began_s=began,
            ended_s=world.now(),
            bad=first_bad(bad),
        )

    def _reduced(self, pile: Pile, mine: Contribution) -> list[float]:
        """Reduce the buckets that are left and the header; return what the header says."""
        written = self._written(pile, mine)
        if self._header is None:
            self._header = Numbers(torch.zeros(len(written), dtype=torch.float64))
        self._header.write(written)
        while len(self._works) < len(pile.flats.tensors):
            self.launch(pile.flats)
        self.channel.all_reduce(self._header.tensor).wait()
        for work in self._works:
            work.wait()
        self._works.clear()
        return self._header.read()

    def _written(self, pile: Pile, mine: Contribution) -> list[float]:
        """By rank: samples | learning rates | bad + 1; used by parameter | leaving | changed."""
        by_rank = [0.0] * (3 * self._world.size)
        mine_by_rank = pile.samples, mine.learning_rates, pile.bad_slot
        by_rank[self._world.rank :: self._world.size] = mine_by_rank
        return [*by_rank, *pile.used, mine.leaving, mine.changed]
