"""Numbers of batches as runs: a thousand of them are a few ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def packed(runs: Iterable[range]) -> list[list[int]]:
    """For a state, or a message."""
    return [[run.start, run.stop] for run in runs]


def unpacked(pairs: Iterable[Sequence[int]]) -> list[range]:
    """From a state, or a message."""
    return [range(start, stop) for start, stop in pairs]


def length(runs: Iterable[range]) -> int:
    """How many numbers there are in these."""
    return sum(map(len, runs))


def add(runs: list[range], number: int) -> None:
    """Put one number behind the others."""
    if runs and runs[-1].stop == number:
        runs[-1] = range(runs[-1].start, number + 1)
    else:
        runs.append(range(number, number + 1))


def part(runs: Iterable[range], first: int, last: int) -> list[range]:
    """The numbers from place `first` to before place `last`."""
    found = []
    for run in runs:
        if piece := run[max(first, 0) : max(last, 0)]:
            found.append(piece)
        first, last = first - len(run), last - len(run)
    return found


def others(count: int, gone: Iterable[range]) -> list[range]:
    """The numbers below `count` that are in none of these."""
    found, at = [], 0
    for run in sorted(gone, key=lambda run: run.start):
        if run.start > at:
            found.append(range(at, run.start))
        at = max(at, run.stop)
    return [*found, range(at, count)] if at < count else found
