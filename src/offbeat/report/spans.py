"""What every worker was doing when: spans of one state each."""

from __future__ import annotations

from typing import NamedTuple

from offbeat.report.runs import Run

STATES = ("computing", "late", "dropped", "abandoned", "waiting", "synchronising")
_COMPUTING = {"on time": 0, "late": 1, "dropped": 2, "abandoned": 3}
_WAITING, _SYNCHRONISING = 4, 5
NO_ROUND = -1


class Span(NamedTuple):
    """A worker in one state."""

    rank: int
    from_s: float
    to_s: float
    state: int
    """Its place in STATES."""
    note: int
    """Of a wait: the round that ended it, or NO_ROUND. Of compute: its samples."""


def spans(run: Run) -> list[Span]:
    """Return the spans of all workers, by rank and then by time.

    Waiting becomes synchronising where the round's all-reduce has begun everywhere: from there on
    the worker waits for the network and for nobody.
    """
    found = [
        Span(line.rank, line.from_s, line.to_s, _COMPUTING[line.arrival], round(line.samples))
        for line in run.computes
    ]
    began = run.synchronising_from()
    for wait in run.waits:
        number = NO_ROUND if wait.round is None else wait.round
        border = min(max(began.get(number, wait.to_s), wait.from_s), wait.to_s)
        if border > wait.from_s:
            found.append(Span(wait.rank, wait.from_s, border, _WAITING, number))
        if border < wait.to_s:
            found.append(Span(wait.rank, border, wait.to_s, _SYNCHRONISING, number))
    return sorted(found)


def seconds_by_state(found: list[Span]) -> list[float]:
    """Add up the spans, in the order of STATES."""
    sums = [0.0] * len(STATES)
    for span in found:
        sums[span.state] += span.to_s - span.from_s
    return sums
