"""What an exchange gives back: a round. Never a bare tensor, always what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from torch import Tensor

from offbeat.rounds.layout import Flats


class Merge(Protocol):
    """What a worker does with a round: see merges/."""

    own: bool
    """Whether this is the worker's own step, on its own gradient: no other knows of it."""
    counts: bool
    """Whether the samples in the round become applied samples by it."""

    def begin(self, round: Round) -> bool:
        """Put the round in place; say whether the optimizer has a step to make now."""

    def end(self, round: Round) -> None:
        """That step has been made."""

    def skip(self, round: Round) -> None:
        """The round holds something that is not finite, and is left out on every worker."""

    def fold(self, round: Round) -> None:
        """Apply the round to something other than the parameters: see log.py."""

    def adopt(self) -> None:
        """Have what was folded in the parameters."""


@dataclass(frozen=True)
class Round:
    """One round: a sum over workers, and who and what is in it."""

    round: int
    sum: Flats
    """The sum of gradient times samples, in buffers that are lent to the reader until it asks for
    the next round."""
    samples_by_rank: tuple[float, ...]
    divisor: float
    """What makes the sum a mean."""
    used: tuple[bool, ...]
    """By parameter: whether anybody had a gradient for it."""
    rates: tuple[float, ...] = ()
    """What the optimizer's param groups hold while it is applied: see rates.py."""
    waited_s: float = 0.0
    """Seconds that this worker has waited for the round."""
    staleness_rounds: int = 0
    """Rounds that were applied between a gradient's parameters and its use; the oldest one's."""
    mean_staleness_rounds: float = 0.0
    """The same, of all gradients, weighed by their samples."""
    micro_batches: int = 0
    """How many are in it."""
    notes_by_rank: tuple[tuple[float, ...], ...] = ()
    """What the algorithm has had every worker tell the others."""
    here: int = 0
    """How many workers go on: they have not left their loop."""
    began_s: float = 0.0
    """When this worker's part went into the exchange."""
    ended_s: float = 0.0
    bad: tuple[int, int] | None = None
    """The first worker and its parameter whose gradient was found to be NaN or infinite."""

    schedule_steps: int = 1
    """How often to step the scheduler after it."""

    merge: Merge | None = None
    """What a worker does with it."""

    def taken(self, merge: Merge | None, waited_s: float = 0.0) -> Round:
        """The same, by a worker that has waited so long, without the cost of `replace`."""
        taken = object.__new__(Round)
        taken.__dict__.update(self.__dict__, merge=merge, waited_s=waited_s)
        return taken

    def mean(self) -> list[Tensor]:
        """The sum over its divisor: new tensors, in the shapes that were contributed."""
        return [view / self.divisor for view in self.sum.views]

    @cached_property
    def samples(self) -> float:
        """How many samples are in it."""
        return sum(self.samples_by_rank)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The workers that contributed."""
        return _ranks(self.samples_by_rank)


@lru_cache(maxsize=8)
def _ranks(samples_by_rank: tuple[float, ...]) -> tuple[int, ...]:
    """One tuple for all the workers of a virtual run."""
    return tuple(rank for rank, samples in enumerate(samples_by_rank) if samples)
