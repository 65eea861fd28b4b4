"""When a round of a partial all-reduce starts, and what a round shows of the workers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

# The fields of the counter of arrivals: candidates on time, candidates that left, due workers.
ON_TIME, LEFT, DUE = 1, 1 << 20, 1 << 40


@dataclass(frozen=True)
class Rules:
    """When a round starts, and what it takes; the same on every worker."""

    quorum: str | int | float
    max_staleness_rounds: int | None = None
    divisor: Literal["samples", "workers"] = "samples"
    full_every: int | None = None
    """Every so many rounds, one of everybody."""
    hold: bool = False
    """Take a worker's pile only between two of its micro-batches."""
    overdue_s: float | None = None
    """A worker that has not given anything for so long is counted as there, and holds no more."""
    least_samples: float = 0.0
    """A round does not start with fewer, as long as everybody is here, and somebody can add."""
    most_samples: float = inf
    """With so many a round starts, whoever is there."""
    alarms: bool = False
    """Whether the program will call `arrive_at`."""

    def __post_init__(self) -> None:
        if self.max_staleness_rounds is not None and self.max_staleness_rounds < 0:
            raise ValueError(
                f"max_staleness_rounds must be 0 or more, or None, got {self.max_staleness_rounds}"
            )
        if self.full_every is not None and self.full_every < 1:
            raise ValueError(f"full_every must be at least 1, or None, got {self.full_every}")

    @property
    def bounded(self) -> bool:
        """Whether the samples of all workers must be counted before a round."""
        return self.least_samples > 0 or self.most_samples < inf

    @property
    def messenger(self) -> bool:
        """Whether the program leaves talking to others to a second activity."""
        return self.hold or self.alarms or self.bounded or self.overdue_s is not None


@dataclass(frozen=True)
class Start:
    """What must be there for a round to start; the same on every worker."""

    round: int
    candidates: frozenset[int]
    needed: int
    due: frozenset[int]
    least_samples: float

    def met(self, arrived: int) -> bool:
        on_time, left, due = arrived % LEFT, arrived % DUE // LEFT, arrived // DUE
        return due == len(self.due) and (
            on_time >= self.needed or on_time + left == len(self.candidates)
        )


@dataclass(frozen=True)
class Measured:
    """What a round has shown of the workers and their gradients; the same on every worker."""

    round: int
    seconds: tuple[float, ...]
    """By rank: how long its latest gradient took, 0 if it has not said so yet."""
    samples: tuple[float, ...]
    """Of those that contributed."""
    squares: tuple[float, ...]
    """Of those that contributed: the squared norm of what each brought."""
    mean_square: float
    """The squared norm of their mean."""
