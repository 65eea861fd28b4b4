"""When does a round start? When enough of the workers that count are there.

Every trigger is a set of *candidates*, drawn anew for every round from a seed that all workers
share, and a number of them that must be on time:

    solo          all are candidates, 1 must be there          the first arrival starts the round
    majority      1 is drawn, it must be there                 half have arrived in expectation
    first:k       k are drawn, 1 must be there                 (P+1)/(k+1) in expectation
    last:k        k are drawn, all must be there               k(P+1)/(k+1) in expectation
    m, fraction   all are candidates, m must be there          at least m, in every round
    all           all are candidates, all must be there        an ordinary all-reduce

`first:1` and `last:1` are majority, `first:P` is solo, `last:P` is all. Solo and majority are the
triggers of eager-SGD (Li et al., arXiv 1908.04207).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.clusters import draws

_SEED = 6545343


@dataclass(frozen=True)
class Quorum:
    """A trigger: how many candidates are drawn (None: everyone), and how many must be there."""

    drawn: int | None
    needed: int

    @classmethod
    def of(cls, quorum: str | int | float, size: int, called: str = "quorum") -> Quorum:
        """Read a user's word or number, of a setting so called, for a cluster of `size` workers."""
        if isinstance(quorum, bool) or not isinstance(quorum, str | int | float):
            raise ValueError(f"{called} {_KNOWN}, got {quorum!r}")
        if isinstance(quorum, float):
            if not 0 < quorum <= 1:
                raise ValueError(
                    f"{called}: a fraction of workers must be above 0 and at most 1, got {quorum}"
                )
            return cls(None, max(1, math.ceil(round(quorum * size, 9))))  # 0.07 * 100 is above 7
        if isinstance(quorum, int):
            return cls(None, _between(called, quorum, size))
        match quorum.split(":"):
            case ["solo"]:
                return cls(None, 1)
            case ["majority"]:
                return cls(1, 1)
            case ["all"]:
                return cls(None, size)
            case ["first", k] if k.isdecimal():
                return cls(_between("the number of candidates", int(k), size), 1)
            case ["last", k] if k.isdecimal():
                return cls(drawn := _between("the number of candidates", int(k), size), drawn)
        raise ValueError(f"{called} {_KNOWN}, got {quorum!r}")

    def for_round(self, round: int, active: tuple[int, ...]) -> tuple[frozenset[int], int]:
        """Return the candidates among the workers still active, and how many must be there."""
        if self.drawn is None:
            return frozenset(active), min(self.needed, len(active))
        drawn = min(self.drawn, len(active))
        chosen = draws.subset(drawn, len(active), draws.key(_SEED), round)
        return frozenset(active[i] for i in chosen), min(self.needed, drawn)


_KNOWN = (
    'must be "solo", "majority", "all", "first:k", "last:k", '
    "a number of workers or a fraction of them"
)


def _between(what: str, number: int, size: int) -> int:
    if not 1 <= number <= size:
        raise ValueError(f"{what} must be between 1 and the {size} workers, got {number}")
    return number
