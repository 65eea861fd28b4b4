"""What a collective returns: never a bare tensor, always a record of what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from offbeat.rounds.layout import Flats


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
    waited_s: float = 0.0
    """Seconds that this worker has waited for the round."""
    staleness_rounds: int = 0
    """Rounds that were applied between a gradient's parameters and its use; the oldest one's."""
    mean_staleness_rounds: float = 0.0
    """The same, of all gradients, weighed by their samples."""
    micro_batches: int = 0
    """How many are in it, of those who brought samples."""
    seconds_by_rank: tuple[float, ...] = ()
    """What each worker's latest micro-batches took, each; where somebody measures that."""
    began_s: float = 0.0
    """When this worker's part went into the all-reduce."""
    ended_s: float = 0.0
    bad: tuple[int, int] | None = None
    """The first worker and its parameter whose gradient was found to be NaN or infinite."""

    samples_passed_over: float = 0.0
    """This worker's in rounds that others have applied and this one has passed over, drifting."""

    # What an algorithm may change before it has the round applied:
    rate: float = 1.0
    """A factor of the learning rates, for this round."""
    schedule_steps: int = 1
    """How often to step the scheduler after it."""
    ends_round: bool = True
    """False for a worker's own steps between two rounds."""
    own: bool = False
    """A worker's own step: no other knows of it."""
    moved: bool = False
    """The sum is of moves, not of gradients, and has been applied: see ahead.py."""

    def taken(self, waited_s: float) -> Round:
        """The same, by a worker that has waited so long, without the cost of `replace`."""
        record = object.__new__(Round)
        record.__dict__.update(self.__dict__, waited_s=waited_s)
        return record

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
        return tuple(rank for rank, samples in enumerate(self.samples_by_rank) if samples)


def first_bad(slots: Sequence[float]) -> tuple[int, int] | None:
    """Read the header's slots, parameter + 1 by rank, into the first rank and its parameter."""
    return next(((rank, int(slot) - 1) for rank, slot in enumerate(slots) if slot), None)
