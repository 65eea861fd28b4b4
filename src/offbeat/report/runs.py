"""Runs, read from records: what every table, page and trace is made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from offbeat import records
from offbeat.errors import ReportError
from offbeat.report.lines import (
    Begin,
    Checked,
    Compute,
    End,
    Evaluation,
    Lost,
    Result,
    Round,
    Verdict,
    Wait,
    checked,
)


@dataclass(frozen=True)
class Totals:
    """What one worker has done, in all."""

    compute_s: float
    wait_s: float
    samples: float
    dropped_samples: float

    @property
    def utilization(self) -> float:
        return self.compute_s / total if (total := self.compute_s + self.wait_s) else 1.0


@dataclass
class Run:
    """One run: what was run, and everything that happened in it.

    What is computed from the lines is kept: ask for it when all of them have been added.
    """

    about: Begin
    computes: list[Compute] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    losts: list[Lost] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    result: Result | None = None

    def add(self, line: Checked) -> None:
        match line:
            case Compute():
                self.computes.append(line)
            case Wait():
                self.waits.append(line)
            case Round():
                self.rounds.append(line)
            case Evaluation():
                self.evaluations.append(line)
            case Lost():
                self.losts.append(line)
            case End():
                self.ends.append(line)
            case Result():
                self.result = line

    @property
    def name(self) -> str:
        """What to call it where several runs are shown."""
        seed = self.about.seed
        return self.about.label if seed is None else f"{self.about.label}, seed {seed}"

    @property
    def error(self) -> str | None:
        """The traceback of the worker that failed, if one did."""
        return None if self.result is None else self.result.error

    @property
    def failure(self) -> str:
        """The error without its frames: the message, then the rank and the time."""
        lines = (self.error or "").splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
        return " ".join(lines[frames[-1] + 1 :] if frames else lines)

    @cached_property
    def workers(self) -> int:
        ranks = (line.rank for lines in self._by_rank() for line in lines)
        return max(self.about.workers, max(ranks, default=-1) + 1)

    @cached_property
    def seconds(self) -> float:
        """When the last thing that is recorded happened."""
        spans = (line.to_s for lines in (self.computes, self.waits, self.rounds) for line in lines)
        moments = (line.at_s for lines in (self.evaluations, self.ends) for line in lines)
        return max(max(spans, default=0.0), max(moments, default=0.0))

    @property
    def synchronous(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.about.algorithm.startswith(("SyncSGD", "DistributedDataParallel"))

    @cached_property
    def totals(self) -> dict[int, Totals]:
        """By rank: what its `end` line says, or its spans, if it was killed before that."""
        sums: dict[int, list[float]] = {}
        for compute in self.computes:
            sums.setdefault(compute.rank, [0.0] * 4)[0] += compute.seconds
            sums[compute.rank][2] += compute.samples
            sums[compute.rank][3] += compute.samples * (compute.arrival in ("dropped", "abandoned"))
        for wait in self.waits:
            sums.setdefault(wait.rank, [0.0] * 4)[1] += wait.seconds
        ended: dict[int, list[float]] = {}  # more than one line if it attached more than once
        for end in self.ends:
            each = (end.compute_s, end.wait_s, end.samples, end.dropped_samples)
            before = ended.get(end.rank, [0.0] * 4)
            ended[end.rank] = [a + b for a, b in zip(before, each, strict=True)]
        return {rank: Totals(*values) for rank, values in sorted((sums | ended).items())}

    @cached_property
    def distinct_rounds(self) -> list[Round]:
        """Every round once, in order: as the first worker that recorded it saw it."""
        first: dict[int, Round] = {}
        for line in self.rounds:
            known = first.setdefault(line.round, line)
            if (line.from_s, line.rank) < (known.from_s, known.rank):
                first[line.round] = line
        return [first[number] for number in sorted(first)]

    @cached_property
    def losses(self) -> list[Lost]:
        """Every loss once, in order: as the last worker to go on without the lost one told it."""
        last: dict[str, Lost] = {}
        for line in sorted(self.losts, key=lambda line: line.at_s):
            last[line.words] = line
        return sorted(last.values(), key=lambda line: line.at_s)

    def synchronising_from(self) -> dict[int, float]:
        """By round: when its all-reduce had begun everywhere, so that nobody was waited for."""
        began: dict[int, float] = {}
        for line in self.rounds:
            began[line.round] = max(line.from_s, began.get(line.round, line.from_s))
        return began

    def _by_rank(self) -> Iterator[Iterable[Compute | Wait | Round | End]]:
        yield from (self.computes, self.waits, self.rounds, self.ends)


@dataclass
class Runs:
    """The runs of all records that were read, and what was concluded from them."""

    runs: list[Run]
    verdicts: list[str]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def _repr_html_(self) -> str:
        """What Jupyter shows: the report, inline."""
        from offbeat.report.html import framed  # it imports this module

        return framed(self)

    def groups(self) -> dict[str, list[Run]]:
        """Runs that differ by their seed only, by a name that tells them from the others."""
        found: dict[tuple[str, ...], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.about.label, *setting(run)), []).append(run)
        differ = [len(set(parts)) > 1 for parts in zip(*found, strict=True)]
        return {
            ", ".join(
                part
                for number, (part, differs) in enumerate(zip(key, differ, strict=True))
                if part and (differs or number == 0)
            ): runs
            for key, runs in found.items()
        }


def setting(run: Run) -> tuple[str, ...]:
    """What must be equal for two algorithms to be comparable."""
    about = run.about
    workers = f"{run.workers} workers"
    return about.cluster, workers, about.world, about.task, about.target or ""


def load(paths: Iterable[str | Path]) -> Runs:
    """Read the runs of these files and folders; raises ReportError for what cannot be read."""
    loaded, asked = Runs([], []), [Path(path) for path in paths]
    for path in asked:
        try:
            _load(path, loaded)
        except FileNotFoundError:
            raise ReportError(f"{path}: there is no such file or folder of records") from None
        except OSError as error:
            raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ReportError(str(error)) from None
    if not loaded.runs:
        raise ReportError(f"{', '.join(map(str, asked)) or 'no records'}: there is no run in it")
    return loaded


def measured(lines: Iterable[records.Line]) -> Runs:
    """Return the runs of lines that are at hand, one run after the other."""
    found: list[Run] = []
    for number, raw in enumerate(lines, start=1):
        match checked(raw, Path("a race"), number):
            case None | Verdict():
                continue
            case Begin() as about:
                found.append(Run(about))
            case line:
                found[-1].add(line)
    return Runs(found, [])


def _load(path: Path, loaded: Runs) -> None:
    unnamed: Run | None = None  # workers' own files: the folder is one run
    for file in records.files(path):
        run: Run | None = None
        for number, raw in records.numbered(file):
            match checked(raw, file, number):
                case None:
                    continue
                case Verdict(text=text):
                    loaded.verdicts.append(text)
                case Begin() as about:
                    run = Run(about)
                    loaded.runs.append(run)
                case line:
                    if run is None:
                        if unnamed is None:
                            unnamed = Run(_about(path))
                            loaded.runs.append(unnamed)
                        run = unnamed
                    run.add(line)


def _about(path: Path) -> Begin:
    """Real workers do not write what was run: call it by the name of its folder or file."""
    path = path.resolve()
    return Begin(kind="run", label=path.name if path.is_dir() else path.stem, world="real")


def edges(runs: Runs) -> list[str]:
    """Say whose best settings may lie beyond what was tried."""
    groups = runs.groups().items()
    found = [f"{name}: {edge}" for name, group in groups if (edge := group[0].about.edge)]
    words = "; ".join(found)
    return [f"Not tried, though the best was next to it ({words}): more --trials."] if found else []
