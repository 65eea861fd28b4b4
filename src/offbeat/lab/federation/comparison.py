"""A comparison: the same data, clients, rounds and initial model for every method.

    comparison = Comparison.of(["fedcbdr", "uniform"], task="digits", tasks=5, clients=5)
    results = comparison.run()

Runs are independent of each other. With a file of results, those that are in it are not made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import offbeat
from offbeat import federated as fed
from offbeat.clusters import Cluster
from offbeat.clusters.write import to_toml
from offbeat.federated.secure import check_installed
from offbeat.lab.federation import entrants, running, tasks
from offbeat.lab.federation.entrants import Entrant
from offbeat.lab.federation.results import Outcome, Result
from offbeat.lab.federation.tasks import CLASSES, Samples, Task
from offbeat.lab.progress import Progress
from offbeat.lab.results import WorldName
from offbeat.lab.results_file import ResultsFile, check_head
from offbeat.lab.runners import Real, Virtual
from offbeat.lab.train import WorkerFailed
from offbeat.records import Line, Sink
from offbeat.worlds import enter_world, leave_world

VERSION = 1
"""Of the file of results."""
CLUSTER = "uniform-8"
Tell = Callable[[Line], None]
Place = tuple[str, int]
"""A method's label and a seed: which run it is."""


@dataclass(frozen=True)
class Comparison:
    """Everything that is decided before the first run."""

    entrants: list[Entrant]
    task: Task
    task_name: str
    model: str
    size: int | None
    tasks: int
    clients: int
    cluster: Cluster
    """Whose speeds clients have; on real processes, only if it was named."""
    paced: bool
    beta: float
    budget: int
    settings: fed.Settings
    seeds: range
    world: WorldName = "virtual"
    command: str = ""

    @classmethod
    def of(
        cls,
        methods: Sequence[str] = (),
        *,
        task: str = "digits",
        tasks: int = 5,
        clients: int = 5,
        model: str = "small",
        samples: int | None = None,
        rounds: int | None = None,
        budget: int | None = None,
        beta: float = 0.5,
        quorum: str | int | float = "all",
        secure: bool = False,
        cluster: str | None = None,
        world: WorldName = "virtual",
        seeds: int = 3,
        first_seed: int = 0,
        command: str = "",
    ) -> Comparison:
        """Check everything that a user may say; ValueError (ClusterError) says what is wrong."""
        found = _task(task, model, samples)
        if not 1 <= tasks <= CLASSES:
            raise ValueError(
                f"tasks must be between 1 and the {CLASSES} classes of {found.name}, got {tasks}: "
                "a task without a class has no data"
            )
        if clients < 1 or seeds < 1 or first_seed < 0:
            raise ValueError(
                f"there must be 1 client and 1 seed or more, and seeds from 0 on, got {clients} "
                f"clients and {seeds} seeds from {first_seed} on"
            )
        kept = found.budget(tasks) if budget is None else budget
        most = -(-CLASSES // tasks)
        if kept < most:
            raise ValueError(
                f"a buffer of {kept} samples cannot hold one of each of the {most} classes of a "
                f"task: --budget {most} or more"
            )
        if secure:
            check_installed()
        settings = replace(found.settings, quorum=quorum, secure=secure)
        if rounds is not None:
            settings = replace(settings, rounds=rounds)
        fed.FedAvg(quorum=quorum).check(clients)
        comparison = cls(
            entrants.parse(methods, kept),
            found,
            task,
            model,
            samples,
            tasks,
            clients,
            Cluster.load(cluster or CLUSTER).resized(clients),
            world == "virtual" or cluster is not None,
            beta,
            kept,
            settings,
            range(first_seed, first_seed + seeds),
            world,
            command,
        )
        comparison.stream(found.samples(first_seed), first_seed)  # what cannot be split is said now
        return comparison

    @property
    def unit(self) -> str:
        """Seconds, called what they are."""
        return "virtual s" if self.world == "virtual" else "s"

    @property
    def places(self) -> list[Place]:
        """All runs: seed by seed, so that methods can be compared early."""
        return [(each.label, seed) for seed in self.seeds for each in self.entrants]

    def __getstate__(self) -> dict[str, Any]:
        """Without the task, whose functions cannot travel to another process; its name can."""
        return {name: value for name, value in vars(self).items() if name != "task"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = _task(state["task_name"], state["model"], state["size"])
        vars(self).update(state, task=found)

    # --- one run -------------------------------------------------------------------------------

    def stream(self, samples: Samples, seed: int) -> fed.Stream:
        """The tasks of a seed, and which client has what."""

        def split(labels: Tensor, seed: int) -> list[Tensor]:
            return fed.dirichlet(labels, self.clients, self.beta, seed=seed)

        x, y, *_ = samples
        settings = {"tasks": self.tasks, "clients": self.clients, "seed": seed}
        return fed.Stream.of(x, y, **settings, split=split)  # type: ignore[arg-type]

    def client(self, entrant: Entrant, seed: int, tell: Tell) -> Outcome:
        """Be one client of a run."""
        torch.manual_seed(seed)
        model = self.task.model()
        samples = self.task.samples(seed)
        method, settings = entrant.method(self.budget), replace(self.settings, seed=seed)
        pace = self.cluster if self.paced and self.world == "real" else None
        world = enter_world(pace, seed)
        stream, test = self.stream(samples, seed), (samples[2], samples[3])
        history = fed.learn(model, stream, method, settings, test, tell)
        outcome = Outcome(history, stream.classes, world.sent_bytes)
        leave_world(world)
        return outcome

    def one(
        self, runner: Virtual | Real, place: Place, show: Progress
    ) -> tuple[Result, list[Line]]:
        """Make one run; return also all its lines."""
        label, seed = place
        (entrant,) = (each for each in self.entrants if each.label == label)
        lines = [self.begin_line(entrant, seed)]
        show.begin(label, seed)
        began = time.process_time()
        try:
            outcomes = self._outcomes(runner, entrant, seed, show, lines.append)
        except WorkerFailed as failure:
            result = Result(label, seed, error=str(failure))
        else:
            took_s = time.process_time() - began if self.world == "virtual" else None
            result = Result.of(label, seed, outcomes, took_s)
        return result, [*lines, result.line]

    def _outcomes(
        self, runner: Virtual | Real, entrant: Entrant, seed: int, show: Progress, sink: Sink
    ) -> list[Outcome]:
        if isinstance(runner, Real):
            return runner.done(partial(ClientJob, self, entrant, seed), show, sink)
        work = partial(self.client, entrant, seed, show.tell)
        return runner.done(work, self.cluster, seed, sink)

    def run(
        self,
        show: Progress | None = None,
        file: ResultsFile | None = None,
        jobs: int = 1,
        done: dict[Place, list[Line]] | None = None,
    ) -> dict[Place, list[Line]]:
        """Make the runs that are not `done`; their lines go there, and into the file.

        With several jobs, as many virtual runs at a time, each in a process of its own. After
        Ctrl-C, what is done is in both.
        """
        done = {} if done is None else done
        running.run(self, Progress() if show is None else show, file, jobs, done)
        return done

    def begin_line(self, entrant: Entrant, seed: int) -> Line:
        method = entrant.method(self.budget)
        return {
            "kind": "run",
            "label": entrant.label,
            "algorithm": repr(method) if is_dataclass(method) else "",
            "world": self.world,
            "cluster": self.cluster.name if self.paced else "this machine",
            "cluster_file": to_toml(self.cluster) if self.paced else "",
            "workers": self.clients,
            "task": f"{self.task.name} in {self.tasks} tasks",
            "seed": seed,
            "command": self.command,
            "offbeat": offbeat.__version__,
        }

    # --- what is done already --------------------------------------------------------------------

    def head(self) -> Line:
        """What must be the same for results to go into one file; methods and seeds may differ."""
        about = {name: getattr(self, name) for name in ("task_name", "model", "size", "tasks")}
        about |= {name: getattr(self, name) for name in ("clients", "beta", "budget", "world")}
        about |= {"cluster": to_toml(self.cluster) if self.paced else ""}
        about |= {"settings": asdict(self.settings)}
        head = {"kind": "federated", "version": VERSION, "offbeat": offbeat.__version__}
        return {**head, "mark": about}

    def read(self, file: ResultsFile) -> dict[Place, list[Line]]:
        """The runs in a file that are of this comparison; ReportError if it is of another one."""
        lines = file.lines()
        first = next(lines, None)
        if first is None:
            file.append(self.head())
            return {}
        check_head(first, self.head(), file.path)
        found: dict[Place, list[Line]] = {}
        run: list[Line] = []
        for line in lines:
            run.append(line)
            if line["kind"] == "result":
                place = (line["label"], line["seed"])
                if place in self.places and line["error"] is None:  # a failure is tried again
                    found[place] = run
                run = []
        return found


@dataclass(frozen=True)
class ClientJob:
    """One run, as every client's process gets it."""

    comparison: Comparison
    entrant: Entrant
    seed: int
    records: Path

    def work(self, tell: Tell) -> Outcome:
        """Be one client."""
        return self.comparison.client(self.entrant, self.seed, tell)


def _task(name: str, model: str, size: int | None) -> Task:
    return tasks.find(name, model, size)
