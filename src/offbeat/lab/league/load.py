"""Files of campaigns' results, read together. A campaign may still be running meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from offbeat.errors import ReportError
from offbeat.lab.campaign import VERSION
from offbeat.lab.campaign_file import Settings
from offbeat.lab.results import Result
from offbeat.lab.verdict import Standing, standings
from offbeat.records import Line

_AGAIN = "write them anew with offbeat campaign"


@dataclass(frozen=True)
class Cell:
    """One race: a task on a cluster."""

    task: str
    cluster: str
    workers: int
    cluster_file: str
    standings: list[Standing]
    planned: int
    """Runs that the campaign asks for."""

    @property
    def runs(self) -> int:
        return sum(len(each.runs) for each in self.standings)

    @property
    def whole(self) -> bool:
        """Whether all contestants have run with all seeds: only then are they compared fairly."""
        return self.runs >= self.planned

    @property
    def target(self) -> str:
        return next((run.target for each in self.standings for run in each.runs if run.target), "")

    @property
    def name(self) -> str:
        return f"{self.task} on {self.cluster}"


@dataclass(frozen=True)
class League:
    """All races of all files."""

    cells: list[Cell]
    """Those that have a result."""
    waiting: list[str]
    """Races that the files ask for, and that nobody has run yet."""
    versions: list[str]
    seeds: int

    @property
    def whole(self) -> list[Cell]:
        """The races that count: those which are not half run."""
        return [cell for cell in self.cells if cell.whole]

    @property
    def labels(self) -> list[str]:
        """Of all contestants, in the order in which they are named."""
        found = (each.label for cell in self.cells for each in cell.standings)
        return list(dict.fromkeys(found))


@dataclass
class _Race:
    about: Line = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)


def load(paths: Sequence[Path]) -> League:
    """Read files of results; ReportError says which one is something else."""
    cells: list[Cell] = []
    waiting: list[str] = []
    versions: list[str] = []
    seeds = 0
    for path in paths:
        lines = _lines(path)
        head = next(lines, None)
        settings = _settings(path, head)
        versions.append(str(head["offbeat"]) if head else "")
        seeds = max(seeds, settings.seeds)
        races = _races(path, lines)
        for number, (task, cluster, algorithms) in enumerate(settings.places()):
            name = f"{task} on {cluster}"
            if any(name == cell.name for cell in cells):
                raise ReportError(f"{path}: {name} is in another of the files: leave one out")
            if number not in races:
                waiting.append(name)
                continue
            race, planned = races[number], algorithms * settings.seeds
            about = race.about["workers"], race.about["cluster_file"]
            known = race.about["task"], race.about["cluster"]
            cells.append(Cell(*known, *about, standings(race.results), planned))
    done = {cell.name for cell in cells}
    return League(cells, [each for each in waiting if each not in done], versions, seeds)


def _settings(path: Path, head: Line | None) -> Settings:
    if head is None or head.get("kind") != "campaign":
        raise ReportError(f"{path}: not a file of a campaign's results: name one of those")
    if head.get("version") != VERSION:
        raise ReportError(
            f"{path}: its results are of another version of offbeat ({head.get('version')}, this "
            f"is {VERSION}): {_AGAIN}"
        )
    try:
        return Settings.model_validate(head.get("settings"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ReportError(f"{path}, line 1: settings: {first['msg']}: {_AGAIN}") from None


def _races(path: Path, lines: Iterator[Line]) -> dict[int, _Race]:
    """What there is of each race, by its number."""
    races: dict[int, _Race] = {}
    for line in lines:
        try:
            if line["kind"] == "run":
                races.setdefault(line["race"], _Race()).about = line
            elif line["kind"] == "result":
                named = {key: value for key, value in line.items() if key not in ("kind", "race")}
                races[line["race"]].results.append(Result(**named))
        except (KeyError, TypeError) as error:
            raise ReportError(
                f"{path}: a {line.get('kind')} that is not one of ours ({error}): {_AGAIN}"
            ) from None
    return {number: race for number, race in races.items() if race.results}


def _lines(path: Path) -> Iterator[Line]:
    """What is whole; the last line may be half written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        try:
            line = json.loads(raw)
        except ValueError:
            if not raw.endswith(b"\n"):
                return
            line = None
        if not isinstance(line, dict):
            raise ReportError(f"{path}, line {number}: not a line of results: take it out")
        yield line
