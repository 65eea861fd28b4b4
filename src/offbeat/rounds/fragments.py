"""Fragments: runs of a layout's buckets, of which every round carries one.

    fragments of a model of four buckets      0 0 │ 1 │ 2
    rounds                                    0   1   2   0   1   2 ...

In turn; or, where not everybody comes to every round, in an order that is drawn anew for every
turn: a worker that comes to every second of four would bring the same two for ever.

A worker that leaves has moved in all of them. So the round after the one whose header says that
somebody has left is *whole*: it carries all buckets, and whoever has left gives all that it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.clusters import draws
from offbeat.rounds.layout import Layout

_SEED = 2501185


class Fragments:
    """Which buckets a round of some number carries; the same on every worker."""

    def __init__(self, layout: Layout, count: int, drawn: bool) -> None:
        buckets = len(layout.buckets)
        if not 1 <= count <= buckets:
            raise ValueError(
                f"fragments must be between 1 and the {buckets} buckets of the model, got {count}: "
                "take fewer, or attach(..., bucket_bytes=...) with a smaller number"
            )
        self.parts = even_runs([bucket.numel for bucket in layout.buckets], count)
        self._drawn = drawn

    def of(self, number: int) -> tuple[int, ...]:
        """The buckets that the round of this number carries, unless it is whole."""
        turn, place = divmod(number, len(self.parts))
        if self._drawn:
            stream = draws.key(_SEED, turn)
            order = sorted(range(len(self.parts)), key=lambda part: draws.bits(stream, part))
            place = order[place]
        return self.parts[place]


class Carried:
    """Which buckets the rounds carry in which this worker takes part, up to the last one.

    All of them, unless there are fragments.
    """

    def __init__(self, fragments: Fragments | None) -> None:
        self._fragments = fragments
        self._whole = False  # of the next round
        self._left: frozenset[int] = frozenset()  # who had left in the latest one
        self._told = False  # this worker's part in a header has said that it has left

    def told(self) -> tuple[bool, frozenset[int]]:
        """What a worker that joins must know."""
        return self._whole, self._left

    def hear(self, told: tuple[bool, frozenset[int]]) -> None:
        """Join: what others have told of the next round."""
        self._whole, self._left = told

    @property
    def in_fragments(self) -> bool:
        """Whether a round carries fewer than all, as a rule."""
        return self._fragments is not None

    def next(self, number: int) -> tuple[int, ...] | None:
        """The buckets that the next round, which has this number, carries; None: all."""
        return None if self._fragments is None or self._whole else self._fragments.of(number)

    def given(self, number: int, left: bool) -> tuple[int, tuple[int, ...] | None]:
        """Which round takes what this worker writes now, if the next has this number; its buckets.

        Of a worker that has left that is the first one after all have been told.
        """
        if self._fragments is None:
            return number, None
        return (number + (not self._told), None) if left else (number, self._fragments.of(number))

    def tell(self, left: bool) -> None:
        """This worker's part in the next header is written, and says whether it has left."""
        self._told |= left

    @property
    def flushes(self) -> bool:
        """Whether the next round takes all that this worker has, if it has left."""
        return self._fragments is None or self._told

    def ended(self, left: frozenset[int]) -> tuple[int, ...]:
        """A round has ended, and these have left; those of them who give all to the next."""
        gone, self._left = left - self._left, left
        self._whole = self._fragments is not None and bool(gone)
        return tuple(sorted(gone)) if self._whole else ()


def even_runs(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut a row into so many runs, none empty, each about as large as the others.

    >>> even_runs([1, 1, 1, 9], 2)
    [(0, 1, 2), (3,)]
    >>> even_runs([5, 1, 1, 1], 3)
    [(0,), (1, 2), (3,)]
    """
    runs, first = [], 0
    for left in range(count, 0, -1):
        fair, last, total = sum(sizes[first:]) / left, first + 1, sizes[first]
        while last <= len(sizes) - left and total + sizes[last] / 2 <= fair:
            total += sizes[last]
            last += 1
        last = len(sizes) if left == 1 else last
        runs.append(tuple(range(first, last)))
        first = last
    return runs
