"""When does a round start? What must be there, and what counts as being there; all of it pure.

Each worker adds its arrival to one counter of the control plane, which has a field for each kind:

    ON_TIME   a candidate whose gradient is there
    ABSENT    a candidate that will not come: it is away, or it has left
    WANTED    somebody needs the round, though it is no candidate on time
    DUE       a worker whose gradient would become too stale, and has been given

A round starts when enough candidates are on time; or when no further one will come, and somebody
needs the round. Nobody needs it while all are away: then rounds rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

_FIELD = 1 << 15  # room for so many workers
ON_TIME, ABSENT, WANTED, DUE = 1, _FIELD, _FIELD**2, _FIELD**3


@dataclass(frozen=True)
class Rules:
    """When a round starts, and what it takes; the same on every worker."""

    quorum: str | int | float
    lockstep: bool = False
    """Everybody comes to every round, so nobody needs to tell the others: see bells.py."""
    uneven: bool = False
    """In lockstep: workers come to a round after different numbers of steps."""
    max_staleness_rounds: int | None = None
    lateness: Literal["version", "step"] = "version"
    """A gradient is late if a round has started since its parameters; or if the round of the
    worker's own step number has."""
    divisor: Literal["samples", "workers", "moves"] = "samples"
    at_boundary: bool = False
    """Take a worker's pile only between two of its micro-batches."""
    at_arrival: bool = False
    """A worker sets its pile aside when it arrives, for the next round that starts, and goes on.
    Who has not arrived gives nothing: its pile stays, and it counts in the divisor all the same."""
    fragments: int = 1
    """At arrival: how many rounds it takes to carry the whole of a layout; see fragments.py."""
    grace_s: float = 0.0
    """How long a round waits for more workers once its quorum is there."""
    overdue_s: float | None = None
    """A worker that has not given anything for so long is counted as there, and is not waited
    for."""
    least_samples: float = 0.0
    """A round does not start with fewer, as long as everybody is here, and somebody can add."""
    most_samples: float = inf
    """With so many a round starts, whoever is there."""
    period: int | None = None
    """Every so many rounds, one has another quorum."""
    period_quorum: str | int | float = "all"

    def __post_init__(self) -> None:
        if self.max_staleness_rounds is not None and self.max_staleness_rounds < 0:
            raise ValueError(
                f"max_staleness_rounds must be 0 or more, or None, got {self.max_staleness_rounds}"
            )
        if self.lockstep and self.quorum != "all":
            raise ValueError(f"in lockstep the quorum is all, got {self.quorum!r}")
        if not 0 <= self.grace_s < inf:
            raise ValueError(f"grace_s must be 0 or more seconds, got {self.grace_s}")

    def periodic(self, number: int) -> bool:
        """Whether the round of this number is one of those that have another quorum."""
        return self.period is not None and (number + 1) % self.period == 0

    @cached_property
    def even(self) -> bool:
        """Whether workers come to a round after as many steps: a lockstep that is not uneven."""
        return self.lockstep and not self.uneven

    @cached_property
    def keeps(self) -> bool:
        """Whether a checkpoint leaves piles where they are: it must not cut one short."""
        return self.even or self.at_arrival

    @cached_property
    def bounded(self) -> bool:
        """Whether the samples of all workers must be counted before a round."""
        return self.least_samples > 0 or self.most_samples < inf

    @cached_property
    def by_messenger(self) -> bool:
        """Whether the program leaves telling the others to the messenger, and never waits."""
        late = self.overdue_s is not None or self.grace_s > 0
        return self.at_boundary or self.at_arrival or self.bounded or late

    @cached_property
    def hints(self) -> bool:
        """Whether the last one to come is told that it is."""
        return self.at_boundary and not self.bounded


@dataclass(frozen=True)
class Start:
    """What must be there for one round to start; the same on every worker."""

    round: int
    candidates: frozenset[int]
    needed: int
    due: frozenset[int]
    least_samples: float

    def met(self, arrived: int) -> bool:
        """Say whether the round starts with such a counter."""
        on_time, absent = arrived % ABSENT, arrived % WANTED // ABSENT
        wanted, due = arrived % DUE // WANTED, arrived // DUE
        return due == len(self.due) and (
            on_time >= self.needed
            or (on_time + absent == len(self.candidates) and on_time + wanted > 0)
        )

    def complete(self, arrived: int) -> bool:
        """Say whether no further candidate will come: a grace is of no more use."""
        return arrived % ABSENT + arrived % WANTED // ABSENT == len(self.candidates)

    def one_missing(self, arrived: int) -> bool:
        """Say whether one more on time will do, whoever is away: it may come back."""
        present = arrived - arrived % WANTED + arrived % ABSENT
        return self.met(present + ON_TIME)

    @cached_property
    def by_one_alone(self) -> bool:
        """Whether any candidate's arrival starts the round: nothing needs to be counted."""
        return self.needed == 1 and not self.due and not self.least_samples


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
    exchange_s: float = 0.0
    """How long the exchange took, on the worker that needed the least."""
