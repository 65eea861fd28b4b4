"""A campaign: many races from one file, which can be interrupted and gone on with.

    algorithms = ["sync", "eager", "abs", "local"]
    clusters = ["mixed-4", "two-slow-of-eight"]
    tasks = ["noisy"]
    seeds = 5

Every cluster with every task is a race. What is done is appended to a file of results, each once:
what an algorithm was tuned to, and of every run its `run` and `result` lines, which `offbeat
report` reads. Started again with the same file, a campaign does what is not there yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import offbeat
from offbeat.errors import ReportError
from offbeat.lab import running
from offbeat.lab.contestants import Contestant, told
from offbeat.lab.progress import Progress
from offbeat.lab.race import Race
from offbeat.lab.results import Result, end_line
from offbeat.lab.tuning import TRIALS
from offbeat.records import Line
from offbeat.report.spread import ENOUGH_SEEDS

_VERSION = 1
"""Of the file of results."""


class Settings(BaseModel):
    """The file: what is to be raced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    algorithms: list[str] = Field(min_length=1)
    clusters: list[str] = Field(min_length=1)
    tasks: list[str] = Field(min_length=1)
    seeds: int = ENOUGH_SEEDS
    first_seed: int = 0
    rates: str = "1,2,4"
    trials: int = TRIALS
    until: str | None = None
    target: str | None = None
    """Of all tasks, instead of their own."""

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read a file; ValueError says what is wrong with it."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not TOML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ValueError(f'{path}, key "{key}": {first["msg"]}') from None

    @property
    def mark(self) -> str:
        """Tells one campaign from another."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Piece:
    """One run, or with no seed the tuning before it."""

    race: int
    label: str
    seed: int | None = None


class Campaign:
    """Races, and which of their pieces are done."""

    def __init__(self, settings: Settings, command: str = "") -> None:
        self.settings = settings
        for what in (settings.clusters, settings.tasks):
            if twice := [each for number, each in enumerate(what) if each in what[:number]]:
                raise ValueError(f"{twice[0]} is named twice")
        shared = settings.model_dump(exclude={"algorithms", "clusters", "tasks"})
        self.races = [
            Race.of(settings.algorithms, cluster=cluster, task=task, command=command, **shared)
            for cluster in settings.clusters
            for task in settings.tasks
        ]
        self.tuned: dict[tuple[int, str], Contestant] = {}
        self.results: dict[Piece, Result] = {}

    def missing(self, race: int, contestant: Contestant) -> list[Piece]:
        """The runs of a contestant that are not done."""
        pieces = (Piece(race, contestant.label, each) for each in self.races[race].seed_numbers)
        return [piece for piece in pieces if piece not in self.results]

    @property
    def labels(self) -> list[str]:
        """Of all contestants of all races."""
        return [each.label for race in self.races for each in race.contestants]

    def lines(self, race: int) -> tuple[list[Line], list[Result]]:
        """What a table and a sentence of one race are made from, by contestant and seed."""
        lines: list[Line] = []
        results = []
        for contestant in self.races[race].contestants:
            for seed in self.races[race].seed_numbers:
                if (result := self.results.get(Piece(race, contestant.label, seed))) is not None:
                    tuned = self.tuned[race, contestant.label]
                    lines += self.races[race].begin_line(tuned, seed), end_line(result)
                    results.append(result)
        return lines, results

    def run(self, file: ResultsFile, show: Progress, jobs: int) -> None:
        """Do what is not done yet; KeyboardInterrupt and errors leave a file to go on with."""
        with running.Crew(jobs) as crew:
            calls: dict[Future[Any], Piece] = {}
            for number, race in enumerate(self.races):
                for contestant in race.contestants:
                    calls |= self._begin(crew, number, contestant)
            while calls:
                for future in wait(calls, return_when=FIRST_COMPLETED).done:
                    calls |= self._ended(crew, file, show, calls.pop(future), future.result())

    def _begin(
        self, crew: running.Crew, number: int, contestant: Contestant
    ) -> dict[Future[Any], Piece]:
        """Have a contestant tuned; or raced, if it was."""
        race, missing = self.races[number], self.missing(number, contestant)
        if not missing:
            return {}
        tuned = self.tuned.get((number, contestant.label))
        if tuned is None:
            piece = Piece(number, contestant.label)
            return {crew.submit(running.tune, race, contestant): piece}
        return {
            crew.submit(running.make, race, tuned, piece.seed, None): piece for piece in missing
        }

    def _ended(
        self, crew: running.Crew, file: ResultsFile, show: Progress, piece: Piece, found: Any
    ) -> dict[Future[Any], Piece]:
        race = self.races[piece.race]
        if isinstance(found, Contestant):
            self.tuned[piece.race, piece.label] = found
            figures = {"rate": found.rate, "tuned": found.tuned, "edge": found.edge}
            file.append({"kind": "tuned", "race": piece.race, "label": piece.label, **figures})
            show.tuned(self._name(piece), told(found), found.edge)
            return self._begin(crew, piece.race, found)
        contestant = self.tuned[piece.race, piece.label]
        lines = race.begin_line(contestant, found.seed), end_line(found)
        file.append(*({**line, "race": piece.race} for line in lines))
        self.results[piece] = found
        show.end(self._name(piece), asdict(found))
        return {}

    def _name(self, piece: Piece) -> str:
        race = self.races[piece.race]
        return f"{race.task_name} on {race.cluster.name}: {piece.label}"

    # --- what is done already ------------------------------------------------------------------

    def read(self, file: ResultsFile) -> None:
        """Know what is done; ReportError if the file is of something else."""
        head = {"kind": "campaign", "version": _VERSION, "mark": self.settings.mark}
        head |= {"offbeat": offbeat.__version__, "settings": self.settings.model_dump()}
        lines = file.lines()
        first = next(lines, None)
        if first is None:
            file.append(head)
            return
        _check(first, head, file.path)
        for line in lines:
            if line["kind"] == "tuned":
                self._know(line["race"], line)
            elif line["kind"] == "result":
                named = {key: value for key, value in line.items() if key not in ("kind", "race")}
                result = Result(**named)
                self.results[Piece(line["race"], result.label, result.seed)] = result

    def _know(self, race: int, line: Line) -> None:
        (named,) = (each for each in self.races[race].contestants if each.label == line["label"])
        algorithm = replace(named.algorithm, **line["tuned"])  # type: ignore[type-var]
        found = {name: line[name] for name in ("rate", "tuned", "edge")}
        self.tuned[race, named.label] = replace(named, algorithm=algorithm, **found)


class ResultsFile:
    """Lines that are appended once each; one campaign writes into it at a time."""

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
                f"{path}: another campaign is writing there: let it end, or name another file"
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
            if found[-1]["kind"] != "run":  # its result follows it
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


def _check(first: Line, head: Line, path: Path) -> None:
    """Raise ReportError unless a file of results is of this campaign."""
    if first.get("kind") != "campaign":
        raise ReportError(f"{path}: not a file of a campaign's results: name another one")
    for name, words in (("version", "another version of offbeat"), ("offbeat", "another version")):
        if first.get(name) != head[name]:
            raise ReportError(
                f"{path}: its results are of {words} ({first.get(name)}, this is {head[name]}): "
                "name another file, or move it away"
            )
    if first.get("mark") != head["mark"]:
        raise ReportError(
            f"{path}: its results are of a campaign with other settings: name another file, or "
            "undo the change"
        )
