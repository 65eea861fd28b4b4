"""What a collective returns: never a bare tensor, always a record of what is in it."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.collectives.layout import Flats


@dataclass(frozen=True)
class Record:
    """One round: a sum over workers, and who and what is in it."""

    round: int
    sum: Flats
    """The sum of gradient times samples, in buffers that belong to the reader until it asks for
    the next round."""
    samples: float
    """The divisor that makes the sum a mean."""
    ranks: tuple[int, ...]
    """The workers that contributed."""
    used: tuple[bool, ...]
    """By parameter: whether anybody had a gradient for it."""
    waited_s: float
    """Seconds that this worker has waited for the round."""
    staleness_rounds: int = 0
    """Rounds that were applied between a gradient's parameters and its use; the oldest one's."""
