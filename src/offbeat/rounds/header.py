"""What travels beside the data of a round, to everybody: a few numbers of every worker.

Each worker fills its own slots and leaves the others' zero, so the sum over workers is a gathering,
and all hold the same bits of it. What is wanted of all together has one slot, not one a worker.
Reading the header of many workers takes time: those who share a process read the same bits once.

    by rank        samples, presence, age, staleness, bad parameter, notes of the algorithm;
                   its mark, where losses are survived
    of all         micro-batches, weight, staleness times samples, changed, made, ends,
                   learning rates
    by parameter   how many workers have a gradient for it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from offbeat.rounds import rates as learning_rates
from offbeat.rounds.layout import Kind
from offbeat.rounds.rates import in_parts

HERE, AWAY, PAUSED, LEFT, GONE = range(5)  # a worker's presence; who is gone was lost
_BY_RANK = 7
_OF_ALL = 8


@dataclass(slots=True)
class Share:
    """What one worker says of its part in a round. float32 holds each number, or nearly."""

    round: int = 0
    """The round's number, which all know."""
    samples: float = 0.0
    presence: int = HERE
    age: int = 0
    """How many rounds the gradient that it computes now does not know of."""
    stale: int = 0
    """The oldest gradient's staleness + 1; 0 without any."""
    bad: int = 0
    """The parameter whose gradient is not finite, + 1; 0 if all are."""
    notes: tuple[float, ...] = ()
    micro_batches: int = 0
    weight: float = 0.0
    """What its sum counts in the mean; samples, if it is a sum of gradients."""
    stale_samples: float = 0.0
    """The sum of samples times staleness."""
    changed: bool = False
    """A gradient was changed after its bucket had been launched; the buckets must go again."""
    made: int = 0
    """Steps that it has made since it said so last; those whose gradients were dropped, too."""
    ends: bool = False
    """It asks that all end their loops with this round."""
    rates: tuple[float, ...] = ()
    used: Sequence[bool] = ()
    mark: tuple[int, int] = (0, 0)
    """Which of its data it has given, this part included: its turn, and batches of that."""


@dataclass(frozen=True, eq=False)
class Shares:
    """All workers' shares of a round, as it has gathered them; columns are by rank."""

    samples: tuple[float, ...]
    presence: tuple[float, ...]
    age: tuple[float, ...]
    stale: int
    bad: tuple[int, int] | None
    """The first worker and its parameter whose gradient is NaN or infinite."""
    notes: tuple[tuple[float, ...], ...]
    micro_batches: int
    weight: float
    stale_samples: float
    changed: bool
    made: int
    ends: bool
    rates: tuple[float, ...]
    """What the round is applied with: see rates.py."""
    used: tuple[bool, ...]
    marks: tuple[tuple[float, ...], ...] = ()
    """By rank, where losses are survived; (0, 0) of who has given nothing of its data now."""

    @cached_property
    def total_samples(self) -> float:
        """Of all workers."""
        return sum(self.samples)

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Who is."""
        return self._ranks(HERE)

    @cached_property
    def away(self) -> tuple[int, ...]:
        """Who is."""
        return self._ranks(AWAY)

    @cached_property
    def paused(self) -> tuple[int, ...]:
        """Who has."""
        return self._ranks(PAUSED)

    @cached_property
    def members(self) -> int:
        """How many workers had not been lost."""
        return len(self.presence) - self.presence.count(GONE)

    @property
    def all_left(self) -> bool:
        """Whether this round is the last."""
        return not (self.here or self.away or self.paused)

    @cached_property
    def left(self) -> frozenset[int]:
        """Who has."""
        return frozenset(self._ranks(LEFT))

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Who takes part in the next round.

        Those who have paused, if nobody else is here, will all be back before it.
        """
        return tuple(sorted(self.here + self.away)) or self.paused

    def due(self, limit: int | None) -> frozenset[int]:
        """Whose gradient would be staler than that, if it missed the next round."""
        if limit is None:
            return frozenset()
        computing = self.here if self.here or self.away else self.paused
        return frozenset(rank for rank in computing if self.age[rank] >= limit)

    def _ranks(self, presence: int) -> tuple[int, ...]:
        return tuple(rank for rank, each in enumerate(self.presence) if each == presence)


class Header:
    """The plan of a header: which number lies where."""

    def __init__(
        self, size: int, parameters: int, notes: int = 0, rates: int = 0, marks: bool = False
    ) -> None:
        self._size = size
        self._notes = notes
        self._marks = _BY_RANK + notes
        self._each = self._marks + 2 * marks
        self._by_rank = self._each * size
        self._rates = self._by_rank + _OF_ALL
        self._used = self._rates + learning_rates.room(rates)
        self._no_rates = (0.0,) * learning_rates.room(rates)
        self.room = self._used + parameters

    def written(self, rank: int, share: Share) -> dict[int, Sequence[float]]:
        """One worker's header: runs of numbers, by their place; the rest is zeros."""
        rates = learning_rates.written(share.rates, share.samples)
        mark = {rank * self._each + self._marks: share.mark} if self._each > self._marks else {}
        return mark | {
            rank * self._each: (
                *in_parts(share.samples),
                share.presence,
                share.age,
                share.stale,
                share.bad,
                *share.notes[: self._notes],
            ),
            self._by_rank: (
                share.micro_batches,
                *in_parts(share.weight),
                share.stale_samples,
                share.changed,
                share.made,
                share.ends,
                *(rates or self._no_rates),
                *share.used,
            ),
        }

    def gone(self, members: tuple[int, ...]) -> dict[int, Sequence[float]]:
        """What one of the members says of those who were lost."""
        lost = (rank for rank in range(self._size) if rank not in members)
        return {rank * self._each + 3: (GONE,) for rank in lost}

    def read(self, numbers: Sequence[float]) -> Shares:
        """What the sum of all workers' headers says."""
        size = self._size
        columns = [list(numbers[first : self._by_rank : self._each]) for first in range(self._each)]
        samples = tuple(map(sum, zip(*columns[:3], strict=True)))
        micro_batches, *weight, stale_samples, changed, made, ends = numbers[
            self._by_rank : self._rates
        ]
        contributors = sum(map(bool, samples))
        bad = ((rank, int(slot) - 1) for rank, slot in enumerate(columns[6]) if slot)
        return Shares(
            samples=samples,
            presence=tuple(columns[3]),
            age=tuple(columns[4]),
            stale=int(max(columns[5])),
            bad=next(bad, None),
            notes=_rows(columns[_BY_RANK : self._marks], size),
            micro_batches=int(micro_batches),
            weight=sum(weight),
            stale_samples=stale_samples,
            changed=changed > 0,
            made=int(made),
            ends=ends > 0,
            rates=learning_rates.read(
                numbers[self._rates : self._used], contributors, sum(samples)
            ),
            used=tuple(count > 0 for count in numbers[self._used :]),
            marks=_rows(columns[self._marks :], size),
        )


def _rows(columns: Sequence[Sequence[float]], size: int) -> tuple[tuple[float, ...], ...]:
    return tuple(zip(*columns, strict=True)) if columns else ((),) * size


@lru_cache(maxsize=8)
def read(header: Header, sums: bytes, kind: Kind) -> Shares:
    """What the sum of all workers' headers says, as it lies in memory."""
    return header.read(memoryview(sums).cast(kind).tolist())
