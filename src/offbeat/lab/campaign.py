"""A campaign: many races from one file, which can be interrupted and gone on with.

What is done is appended to a file of results, each once: what an algorithm was tuned to, and of
every run its `run` and `result` lines, which `offbeat report` reads. Started again with the same
file, a campaign does what is not there yet.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, replace
from typing import Any

import offbeat
from offbeat.lab import ray_crew, running
from offbeat.lab.campaign_file import Settings, mark
from offbeat.lab.contestants import Contestant, told
from offbeat.lab.progress import Progress
from offbeat.lab.ray_crew import RayCrew
from offbeat.lab.results import Result, end_line
from offbeat.lab.results_file import ResultsFile, check_head
from offbeat.records import Line

VERSION = 1
"""Of the file of results."""


PROCESSES = "processes"
AnyCrew = running.Crew | RayCrew


def check_engine(engine: str) -> None:
    """Raise ValueError for what runs cannot be made on."""
    if engine not in (PROCESSES, "ray") and not engine.startswith("ray:"):
        raise ValueError(f"engine must be {PROCESSES}, ray or ray:ADDRESS, got {engine!r}")
    if engine != PROCESSES:
        ray_crew.check_installed()


def _crew(engine: str, jobs: int) -> AnyCrew:
    if engine == PROCESSES:
        return running.Crew(jobs)
    return RayCrew(engine.partition(":")[2], jobs)


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
        self.races = settings.races(command)
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

    def run(self, file: ResultsFile, show: Progress, jobs: int, engine: str = PROCESSES) -> None:
        """Do what is not done yet; KeyboardInterrupt and errors leave a file to go on with."""
        with _crew(engine, jobs) as crew:
            self._work_off(crew, file, show)

    def _work_off(self, crew: AnyCrew, file: ResultsFile, show: Progress) -> None:
        """Hand out what is not done: the first races first, so that these are whole early."""
        queue = [
            piece
            for number, race in enumerate(self.races)
            for contestant in race.contestants
            for piece in self._next(number, contestant)
        ]
        calls: dict[Future[Any], Piece] = {}
        while queue or calls:
            while queue and len(calls) < crew.room:
                piece = queue.pop(0)
                calls[self._begin(crew, piece)] = piece
            ended = wait(calls, return_when=FIRST_COMPLETED).done
            for future in sorted(ended, key=lambda each: calls[each].race):
                queue += self._ended(file, show, calls.pop(future), future.result())
            queue.sort(key=lambda piece: piece.race)

    def _next(self, number: int, contestant: Contestant) -> list[Piece]:
        """What can be done for a contestant: it is tuned; or raced, if it was."""
        missing = self.missing(number, contestant)
        if missing and (number, contestant.label) not in self.tuned:
            return [Piece(number, contestant.label)]
        return missing

    def _begin(self, crew: AnyCrew, piece: Piece) -> Future[Any]:
        race = self.races[piece.race]
        if piece.seed is None:
            (named,) = (each for each in race.contestants if each.label == piece.label)
            return crew.submit(running.tune, race, named)
        tuned = self.tuned[piece.race, piece.label]
        return crew.submit(running.make, race, tuned, piece.seed, None)

    def _ended(self, file: ResultsFile, show: Progress, piece: Piece, found: Any) -> list[Piece]:
        race = self.races[piece.race]
        if isinstance(found, Contestant):
            self.tuned[piece.race, piece.label] = found
            figures = {"rate": found.rate, "tuned": found.tuned, "edge": found.edge}
            file.append({"kind": "tuned", "race": piece.race, "label": piece.label, **figures})
            show.tuned(self._name(piece), told(found), found.edge)
            return self._next(piece.race, found)
        contestant = self.tuned[piece.race, piece.label]
        lines = race.begin_line(contestant, found.seed), end_line(found)
        file.append(*({**line, "race": piece.race} for line in lines))
        self.results[piece] = found
        show.end(self._name(piece), asdict(found))
        return []

    def _name(self, piece: Piece) -> str:
        race = self.races[piece.race]
        return f"{race.task_name} on {race.cluster.name}: {piece.label}"

    # --- what is done already ------------------------------------------------------------------

    def read(self, file: ResultsFile) -> None:
        """Know what is done; ReportError if the file is of something else."""
        head = {"kind": "campaign", "version": VERSION, "mark": mark(self.settings, self.races)}
        head |= {"offbeat": offbeat.__version__, "settings": self.settings.model_dump()}
        lines = file.lines()
        first = next(lines, None)
        if first is None:
            file.append(head)
            return
        check_head(first, head, file.path)
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
