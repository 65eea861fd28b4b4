"""A file that results are appended to, run by run, so that a command can go on where it stopped.

Its first line, the head, says of what the results are. A run is all of its lines, up to `result`.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from offbeat.errors import ReportError
from offbeat.records import Line

_FOLLOWED = {"run", "compute", "wait", "round", "evaluation", "lost", "end"}
"""Lines of a run after which its result must come."""
_OWNERS = {"campaign": "a campaign", "federated": "a federated comparison"}


class ResultsFile:
    """Lines that are appended once each; one command writes into it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("a+b", buffering=0)  # what failed must not come later
        except OSError as error:
            raise ReportError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ReportError(
                f"{path}: another command is writing there: let it end, or name another file"
            ) from None

    def append(self, *lines: Line) -> None:
        """Write lines so that all of them are there, or none."""
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            while text:
                text = text[self._file.write(text) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), end)
            raise ReportError(
                f"{self.path}: cannot be written: {error.strerror}; what was there is kept, and "
                "the same command goes on from it"
            ) from None

    def lines(self) -> Iterator[Line]:
        """What is there. The last run is cut off if a crash came while it was written down."""
        self._file.seek(0)
        found: list[Line] = []
        whole = at = kept = 0
        for number, raw in enumerate(self._file.read().splitlines(keepends=True), start=1):
            at += len(raw)
            if not raw.endswith(b"\n"):
                break
            found.append(self._parsed(number, raw))
            if found[-1]["kind"] not in _FOLLOWED:
                whole, kept = at, len(found)
        if whole < at:
            os.ftruncate(self._file.fileno(), whole)
        return iter(found[:kept])

    def _parsed(self, number: int, raw: bytes) -> Line:
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise ReportError(f"{self.path}, line {number}: not a line of results: take it out")
        return line

    def close(self) -> None:
        self._file.close()


def check_head(first: Line, head: Line, path: Path) -> None:
    """Raise ReportError unless a file of results, by its first line, is one with this head."""
    owner = _OWNERS[head["kind"]]
    if first.get("kind") != head["kind"]:
        raise ReportError(f"{path}: not a file of {owner}'s results: name another one")
    for name, words in (("version", "another version of offbeat"), ("offbeat", "another version")):
        if first.get(name) != head[name]:
            raise ReportError(
                f"{path}: its results are of {words} ({first.get(name)}, this is {head[name]}): "
                "name another file, or move it away"
            )
    if first.get("mark") != head["mark"]:
        raise ReportError(
            f"{path}: its results are of {owner} with other settings: name another file, or "
            "undo the change"
        )
