"""A run's timeline as columns of integers, small enough for a page.

A moment is a number of ticks since the run began. Spans are stored as the gap since the end of the
span before them, which is mostly 0, and their length. page/timeline.js reads them back.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from offbeat.report.lines import Round
from offbeat.report.runs import Run
from offbeat.report.spans import Span

_MOST = 2**31 - 1
_MOST_TICKS = 2_000_000_000


def packed(run: Run, spans: list[Span]) -> dict[str, Any]:
    """Return how many there are of what, and all of it as one string.

    The columns, one after the other: of spans how many each worker has, gaps, lengths, notes; of
    rounds in which a worker took part the same, with the round as note; of rounds their number,
    samples, workers and staleness; and the states of the spans, a byte each.
    """
    tick_s = tick(run.seconds)
    lanes = sorted(run.rounds, key=attrgetter("rank", "from_s"))
    facts = run.distinct_rounds
    numbers = array("i")
    numbers.extend(_counts(run.workers, spans))
    numbers.extend(_gaps_and_lengths(spans, tick_s))
    numbers.extend(min(span.note, _MOST) for span in spans)
    numbers.extend(_counts(run.workers, lanes))
    numbers.extend(_gaps_and_lengths(lanes, tick_s))
    numbers.extend(lane.round for lane in lanes)
    for name in ("round", "samples", "workers", "staleness_rounds"):
        numbers.extend(min(round(getattr(line, name)), _MOST) for line in facts)
    if sys.byteorder == "big":
        numbers.byteswap()
    states = bytes(span.state for span in spans)
    return {
        "tick_s": tick_s,
        "spans": len(spans),
        "lanes": len(lanes),
        "rounds": len(facts),
        "columns": b64encode(zlib.compress(numbers.tobytes() + states, level=6)).decode("ascii"),
    }


def tick(seconds: float) -> float:
    """The smallest power of ten, from a nanosecond up, of which so long a run has not too many."""
    return 10.0 ** max(-9, math.ceil(math.log10(max(seconds, 1e-9) / _MOST_TICKS)))


def _counts(workers: int, sorted_by_rank: Iterable[Span | Round]) -> list[int]:
    counts = [0] * workers
    for rank, of_rank in groupby(sorted_by_rank, key=attrgetter("rank")):
        counts[rank] = sum(1 for _ in of_rank)
    return counts


def _gaps_and_lengths(spans: Sequence[Span | Round], tick_s: float) -> list[int]:
    gaps, lengths = [], []
    rank, end = -1, 0
    for span in spans:
        if span.rank != rank:
            rank, end = span.rank, 0
        start, stop = round(span.from_s / tick_s), round(span.to_s / tick_s)
        gaps.append(start - end)
        lengths.append(stop - start)
        end = stop
    return gaps + lengths
