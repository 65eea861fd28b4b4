"""What a run leaves behind: one JSON object a line, the same in every world.

Reports, traces and scalars are made from these lines alone. Times are seconds since the world
began; virtual ones are virtual. Every line has a `kind`:

    run         what was run: algorithm, cluster, seed, rate (the factor of the task's learning
                rate), tuned (settings that were found by trying), ...; the lines after it belong
                to it
    compute     rank, from_s, to_s, samples, arrival: "on time", "late", "dropped" or
                "abandoned": it was stopped before its end, and dropped
    wait        rank, from_s, to_s, round: the round that ended it, or null
    round       rank, round, from_s, to_s: its all-reduce, as this worker took part in it;
                at_s: when it was applied here; samples, workers: what is in it;
                staleness_rounds: the oldest gradient's; mean_staleness_rounds; group: the ranks
                whose models it has averaged here, where it did so in groups
    evaluation  at_s, round, samples: those applied until then; loss, accuracy or null
    lost        rank, at_s, round, words: this worker goes on without another; workers: how many are
                left; took_s: to regroup; lost_samples: what all that are lost had computed, and
                given to no round
    end         rank, at_s, steps, compute_s, wait_s, samples and dropped_samples of one worker
    result      what a race says of the run: its figures; error: the traceback, if a worker failed
    verdict     text: what a race concludes from all its runs

A *sink* is a function that takes such a line as a dictionary. `offbeat.run(..., records=sink)`
hands one to every virtual worker. Real processes that find $OFFBEAT_RECORDS write into the folder
of that name, each its own file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Sink = Callable[[Line], None]
_MOMENTS = ("from_s", "to_s", "at_s")


class RecordsFile:
    """A sink that writes lines to a file, each at once: a worker may be killed at any time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._began_s = 0.0
        self._first_round = 0
        self._next_round = 0

    def __call__(self, line: Line) -> None:
        if self._began_s or self._first_round:
            line = {**line, **self._continued(line)}
        if line["kind"] == "round":
            self._next_round = max(self._next_round, line["round"] + 1)
        self._file.write(json.dumps(line) + "\n")

    def go_on(self, began_s: float) -> None:
        """The lines from now on are of a later world of this process, which began then.

        Its seconds and rounds are counted on, so that nothing in the file overlaps.
        """
        self._began_s, self._first_round = began_s, self._next_round

    def _continued(self, line: Line) -> Line:
        times = {key: line[key] + self._began_s for key in _MOMENTS if key in line}
        if line.get("round") is not None:
            times["round"] = line["round"] + self._first_round
        return times

    def close(self) -> None:
        self._file.close()


def worker_file(folder: str | Path, rank: int, attempt: int = 0) -> Path:
    """Where a real worker writes its lines; one that is started again, beside those of before."""
    return Path(folder) / (f"worker-{rank}-{attempt}.jsonl" if attempt else f"worker-{rank}.jsonl")


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, or of all workers' files in a folder."""
    for file in files(path):
        for _, line in numbered(file):
            yield line


def files(path: Path) -> list[Path]:
    """The files that hold the records: this one, or those in this folder."""
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"{path}: no records (*.jsonl) in this folder")
    return found


def numbered(file: Path) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a file, each with its number."""
    with file.open("rb") as lines:
        yield from _parsed(file, lines)


def _parsed(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, Line]]:
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if not text.endswith(b"\n"):
                return  # cut off in the middle: whoever wrote it was killed
            raise ValueError(f"{file}, line {number}: not JSON: {error}") from None
        if not isinstance(line, dict) or "kind" not in line:
            raise ValueError(f'{file}, line {number}: not a record: it has no "kind"')
        yield number, line
