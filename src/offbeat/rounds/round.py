"""What an exchange gives back: a round. Never a bare tensor, always what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.rounds.layout import Flats


class Merge(Protocol):
    """What a worker does with a round: see merges/."""

    own: bool
    """Whether this is the worker's own step, on its own gradient: no other knows of it."""
    counts: bool
    """Whether the samples in the round become applied samples by it."""
    spares: bool
    """Whether a round that is skipped costs nobody anything but the worker that is at fault."""
    alike: bool
    """Whether all workers have the same of it, so that what one raises for it, all do."""

    def begin(self, round: Round) -> bool:
        """Put the round in place; say whether the optimizer has a step to make now."""

    def end(self, round: Round) -> None:
        """That step has been made."""

    def skip(self, round: Round) -> None:
        """The round holds something that is not finite, and is left out on every worker."""

    def fold(self, round: Round) -> None:
        """Apply the round, or skip it, without touching the parameters: see log.py."""

    def adopt(self) -> None:
        """Have what was folded in the parameters."""

    def agreed(self) -> Sequence[Tensor]:
        """What all workers agree on, what was folded included; by parameter."""


@dataclass(frozen=True)
class Round:
    """One round: a sum over workers, and who and what is in it."""

    round: int
    sum: Flats
    """The sum of gradient times samples, in buffers that are lent to the reader until it asks for
    the next round; or until it is applied, if it is `spare`."""
    samples_by_rank: tuple[float, ...]
    divisor: float
    """What makes the sum a mean."""
    used: tuple[bool, ...]
    """By parameter: whether anybody had a gradient for it."""
    rates: tuple[float, ...] = ()
    """What the optimizer's param groups hold while it is applied: see rates.py."""
    scale: float = 1.0
    """Of their learning rates."""
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

    made: int = 0
    """Steps that its workers have made for it; those whose gradients were dropped, too."""
    mine: int = 0
    """Of them, this worker's."""
    after: int = 0
    """Steps that this worker had made, in all rounds and since, when it gave its part."""
    ends: bool = False
    """Somebody has asked that all end their loops with this round."""

    group: tuple[int, ...] = ()
    """The workers whose sum it is on this worker, if not that of all."""
    buckets: tuple[int, ...] | None = None
    """Which buckets of the sum it carries: see fragments.py; None: all."""

    spare: bool = False
    """Whether nobody but its merge needs the sum, which may then be overwritten."""

    merge: Merge | None = None
    """What a worker does with it."""

    samples: float = field(init=False)
    """How many samples are in it."""
    ranks: tuple[int, ...] = field(init=False)
    """The workers that contributed."""

    def __post_init__(self) -> None:
        by_rank = self.samples_by_rank
        object.__setattr__(self, "samples", sum(by_rank))
        ranks = tuple(rank for rank, samples in enumerate(by_rank) if samples)
        object.__setattr__(self, "ranks", ranks)

    def but(self, **facts: Any) -> Round:
        """The same but for these facts, without the cost of `replace`."""
        other = object.__new__(Round)
        other.__dict__.update(self.__dict__, **facts)
        return other

    @property
    def divisor_tensor(self) -> Tensor:
        """The divisor as torch divides by it quickest; made once for a process."""
        return _as_tensor(self.divisor)

    def mean(self) -> list[Tensor]:
        """The sum over its divisor: new tensors, in the shapes that were contributed."""
        return [view / self.divisor for view in self.sum.views]


@lru_cache(maxsize=8)
def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)
