"""Gradients that were added up: their sum, and what is to be said of those that are new in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.rounds.entries import Entry
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile, Piles
from offbeat.rounds.round import Round


class Sum:
    """A sum of gradients times samples; or of means, each of one worker's gradients."""

    def __init__(self, size: int) -> None:
        self.pile: Pile | None = None
        self._size = size
        self._begin()

    def _begin(self) -> None:
        """What follows is of gradients that no round has held yet."""
        self._samples = [0.0] * self._size
        self._micro_batches = 0
        self._versions: list[int] = []  # the oldest in each gradient
        self._known = 0.0  # of all samples, their versions
        self._rates: list[tuple[tuple[float, ...], float]] = []

    def add(self, entry: Entry, pile: Pile, piles: Piles) -> None:
        """Put in a gradient, or by how much it has changed its worker's mean."""
        if self.pile is None:
            self.pile = pile
            pile.used = [True] * len(pile.used)
            for number in entry.unused:
                pile.used[number] = False
        else:
            alpha = pile.unit / self.pile.unit  # alone, each pile has a unit of its own
            for body, more in zip(self.pile.flats.bodies, pile.flats.bodies, strict=True):
                body.add_(more, alpha=alpha)
            unused = set(entry.unused)
            self.pile.used = [used or n not in unused for n, used in enumerate(self.pile.used)]
            piles.give_back(pile)
        self._samples[entry.worker] += entry.samples
        self._micro_batches += entry.micro_batches
        self._versions.append(entry.version)
        self._known += entry.known
        self._rates.append((entry.rates, entry.samples))

    def samples_of(self, rank: int) -> float:
        """What is of a worker, and in no round yet."""
        return self._samples[rank]

    @property
    def is_new(self) -> bool:
        """Whether anything is in it that no round has held."""
        return bool(self._versions)

    def told(self, number: int, version: int, divisor: float, scale: float) -> Round:
        """What a round says of what is new in the sum; it makes an update to that version."""
        assert self.pile is not None, "a judge updates with what was added up"
        told = Round(
            round=number,
            sum=self.pile.flats,
            samples_by_rank=tuple(self._samples),
            divisor=divisor / self.pile.unit,
            used=tuple(self.pile.used),
            rates=agreed(self._rates),
            scale=scale,
            staleness_rounds=version - 1 - min(self._versions),
            mean_staleness_rounds=version - 1 - self._known / sum(self._samples),
            micro_batches=self._micro_batches,
        )
        self._begin()
        return told

    def copied(self, piles: Piles) -> Pile:
        """The sum as it is now, for a round; it goes on growing."""
        assert self.pile is not None
        copy = piles.nothing()
        copy.blank, copy.used, copy.unit = False, list(self.pile.used), self.pile.unit
        for body, mine in zip(copy.flats.bodies, self.pile.flats.bodies, strict=True):
            body.copy_(mine)
        return copy

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        pile = self.pile
        return {
            "samples": list(self._samples),
            "micro_batches": self._micro_batches,
            "versions": list(self._versions),
            "known": self._known,
            "rates": list(self._rates),
            "used": None if pile is None else list(pile.used),
            "unit": None if pile is None else pile.unit,
            "bodies": [] if pile is None else [body.clone() for body in pile.flats.bodies],
        }

    def load_state_dict(self, state: dict[str, Any], piles: Piles) -> None:
        """Become what was saved."""
        self._samples, self._micro_batches = list(state["samples"]), state["micro_batches"]
        self._versions, self._known = list(state["versions"]), state["known"]
        self._rates = list(state["rates"])
        self.pile = None
        if state["bodies"]:
            self.pile = piles.nothing()
            self.pile.blank = False
            self.pile.used, self.pile.unit = list(state["used"]), state["unit"]
            for body, saved in zip(self.pile.flats.bodies, state["bodies"], strict=True):
                body.copy_(saved)


class Mean:
    """The mean of one worker's own gradients that are in a sum."""

    def __init__(self, layout: Layout) -> None:
        self._flats = Flats(layout)
        self._samples = 0.0

    def clear(self) -> None:
        """Begin anew."""
        self._samples = 0.0

    def add(self, pile: Pile) -> None:
        """Make of a gradient times samples the difference that it makes to the mean."""
        share = pile.samples / pile.unit
        before, self._samples = self._samples, self._samples + pile.samples
        for mean, body in zip(self._flats.bodies, pile.flats.bodies, strict=True):
            if before:
                body.sub_(mean, alpha=share).mul_(pile.samples / (share * self._samples))
                mean.add_(body)
            else:
                mean.copy_(body if share == 1.0 else body.div_(share))
        pile.unit = 1.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        bodies = [body.clone() for body in self._flats.bodies] if self._samples else []
        return {"samples": self._samples, "bodies": bodies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self._samples = state["samples"]
        for body, saved in zip(self._flats.bodies, state["bodies"], strict=False):
            body.copy_(saved)


def agreed(rates: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """What all hold, to the bit; or the mean, weighed by their samples.

    >>> agreed([((0.25, 0.9), 3.0), ((0.75, 0.9), 1.0)])
    (0.375, 0.9)
    """
    total = sum(samples for _, samples in rates)
    weights = [samples / total for _, samples in rates]
    columns = zip(*(values for values, _ in rates), strict=True)
    return tuple(
        each[0] if len(set(each)) == 1 else sum(v * w for v, w in zip(each, weights, strict=True))
        for each in columns
    )
