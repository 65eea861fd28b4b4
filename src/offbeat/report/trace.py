"""Traces in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

One process per run, one thread per worker. What a worker did are complete events, synchronising
inside its waiting; rounds are asynchronous events, because they may overlap; loss and accuracy are
counters; a loss is an instant. Times are in microseconds, virtual ones virtual.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.report.files import WholeFile
from offbeat.report.runs import Run, Runs
from offbeat.report.spans import STATES

Event = dict[str, Any]

_STATES = {"on time": STATES[0]} | {state: state for state in ("late", "dropped", "abandoned")}
_COLOURS = {
    "computing": "thread_state_running",
    "late": "thread_state_runnable",
    "dropped": "terrible",
    "abandoned": "bad",
    "waiting": "thread_state_sleeping",
    "synchronising": "thread_state_iowait",
}


def write(runs: Runs, path: str | Path) -> None:
    """Write the trace of these runs; raises ReportError if that cannot be done."""
    with WholeFile(path) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(events(runs)):
            file.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def events(runs: Runs) -> Iterator[Event]:
    """Yield the events of all runs, those of a run in the order in which they began."""
    for process, run in enumerate(runs, start=1):
        yield _names(process, 0, "process_name", run.name)
        for rank in range(run.workers):
            yield _names(process, rank + 1, "thread_name", f"worker {rank}")
        happened = [*_done(run), *_rounds(run), *_counters(run), *_losses(run)]
        # Of two that begin together the longer one comes first: the other lies inside it.
        for event in sorted(happened, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
            yield {"pid": process, **event}


def _names(process: int, thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _done(run: Run) -> Iterator[Event]:
    for compute in run.computes:
        samples = {"samples": compute.samples}
        state = _STATES[compute.arrival]
        yield _complete(compute.rank, compute.from_s, compute.to_s, state, samples)
    began = run.synchronising_from()
    for wait in run.waits:
        ended_by = {"round": wait.round}
        yield _complete(wait.rank, wait.from_s, wait.to_s, "waiting", ended_by)
        border = math.inf if wait.round is None else began.get(wait.round, math.inf)
        if border < wait.to_s:
            inside = max(border, wait.from_s)
            yield _complete(wait.rank, inside, wait.to_s, "synchronising", ended_by)


def _complete(rank: int, from_s: float, to_s: float, state: str, args: dict[str, Any]) -> Event:
    begins = _microseconds(from_s)
    return {
        "ph": "X",
        "tid": rank + 1,
        "ts": begins,
        "dur": round(_microseconds(to_s) - begins, 3),
        "name": state,
        "cat": "worker",
        "cname": _COLOURS[state],
        "args": args,
    }


def _rounds(run: Run) -> Iterator[Event]:
    ended: dict[int, float] = {}
    for line in run.rounds:
        ended[line.round] = max(line.to_s, ended.get(line.round, line.to_s))
    for line in run.distinct_rounds:
        facts = line.model_dump(include={"samples", "workers", "staleness_rounds"})
        event = {"cat": "round", "name": f"round {line.round}", "id2": {"local": line.round}}
        yield {"ph": "b", "tid": 0, "ts": _microseconds(line.from_s), "args": facts, **event}
        yield {"ph": "e", "tid": 0, "ts": _microseconds(ended[line.round]), **event}


def _counters(run: Run) -> Iterator[Event]:
    for line in run.evaluations:
        for name, value in (("loss", line.loss), ("accuracy", line.accuracy)):
            if value is not None and math.isfinite(value):
                at = _microseconds(line.at_s)
                yield {"ph": "C", "tid": 0, "ts": at, "name": name, "args": {name: value}}


def _losses(run: Run) -> Iterator[Event]:
    for line in run.losses:
        at, facts = _microseconds(line.at_s), {"workers": line.workers, "took_s": line.took_s}
        yield {"ph": "i", "tid": 0, "ts": at, "s": "p", "name": line.sentence, "args": facts}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
