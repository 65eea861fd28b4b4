"""A race: the same task, cluster, noise, data and initial model for every algorithm.

    race = Race.of(["sync", "eager:quorum=solo"], cluster="two-slow-of-eight", task="digits")
    standings = race.run()
    print(verdict.sentence(standings))

In virtual time a run is a call of `offbeat.run`; on real processes, paced by the cluster, a job for
a pool of workers that is started once. One run after the other: each has the machine to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters import named as named_clusters
from offbeat.lab import contestants, running, tasks, tuning
from offbeat.lab.contestants import Contestant, told
from offbeat.lab.goals import Target, Until
from offbeat.lab.progress import Progress
from offbeat.lab.results import Result, Standings, WorldName, end_line, figures
from offbeat.lab.runners import Real, Virtual
from offbeat.lab.sizes import Sizes
from offbeat.lab.tasks import Task
from offbeat.lab.train import WorkerFailed
from offbeat.lab.watching import Outcome, Plan
from offbeat.records import Line, Sink
from offbeat.report.spread import ENOUGH_SEEDS

_WINDOWS = 10
"""The curve is smoothed over this part of what synchronous SGD computes in a task's budget."""
_EVALUATIONS = 16
"""In a window."""
_LEAST_EVALUATIONS = 12
"""With fewer, it would matter at which moments the model was evaluated."""
_LOOK_AHEAD_STEPS = 32
_SEEDS = {"virtual": ENOUGH_SEEDS, "real": 1}


@dataclass(frozen=True)
class Race:
    """Everything that is decided before the first run."""

    contestants: list[Contestant]
    cluster: Cluster
    cluster_file: str
    task: Task
    task_name: str
    world: WorldName
    plan: Plan
    seeds: int
    rates: tuple[float, ...]
    trials: int
    """Tries of each contestant, of a learning rate and a size."""
    step_samples: float
    """Of a micro-batch, on average."""
    first_seed: int = 0
    command: str = ""

    @classmethod
    def of(
        cls,
        algorithms: Sequence[str] = (),
        *,
        cluster: str,
        task: str = "digits",
        world: WorldName = "virtual",
        until: str | None = None,
        target: str | None = None,
        seeds: int | None = None,
        first_seed: int = 0,
        rates: str = "1,2,4",
        trials: int = tuning.TRIALS,
        workers: int | None = None,
        every: float | None = None,
        command: str = "",
    ) -> Race:
        """Check everything that a user may say; ValueError (ClusterError) says what is wrong."""
        loaded = Cluster.load(cluster)
        found = tasks.find(task, tries=True)
        chosen = [contestants.parse(spec) for spec in algorithms] or contestants.default(world)
        sized = loaded if workers is None else loaded.resized(workers)
        contestants.check(chosen, sized.workers)
        count = _SEEDS[world] if seeds is None else seeds
        if count < 1 or not 0 <= first_seed <= first_seed + count <= tuning.SEED:
            raise ValueError(
                f"seeds must be between 0 and {tuning.SEED - 1}, got {count} of them from "
                f"{first_seed} on"
            )
        factors = tuning.parse_rates(rates) if found.target else (1.0,)
        tuning.check(factors, trials)
        goal = found.target if target is None else Target.parse(target)
        if found.target is None:
            _check_timed(found.name, target, until, world)
        elif goal is not None and goal.metric == "accuracy" != found.target.metric:
            _check_accuracy(found, goal)
        ending, (step_s, step_samples) = Until.parse(until or "target"), _look_ahead(sized, found)
        if ending.kind == "target":
            budget_s = found.budget_steps * step_s
            ending = Until("target" if found.target else "seconds", budget_s)
        window = found.budget_steps * step_samples * sized.workers / _WINDOWS
        often = window / _EVALUATIONS if every is None else every
        if not 0 < often <= window / _LEAST_EVALUATIONS:
            raise ValueError(
                f"every must be above 0 and at most {window / _LEAST_EVALUATIONS:.0f} samples, "
                f"got {often:g}: the curve is smoothed over {window:.0f} samples, and needs "
                f"{_LEAST_EVALUATIONS} evaluations in them"
            )
        return cls(
            chosen,
            sized,
            _text_of(cluster),
            found,
            task,
            world,
            Plan(ending, goal, often, window, stops=ending.kind == "target"),
            count,
            factors,
            trials,
            step_samples,
            first_seed,
            command,
        )

    @property
    def seed_numbers(self) -> range:
        """The seeds that race."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def unit(self) -> str:
        """Seconds, called what they are."""
        return "virtual s" if self.world == "virtual" else "s"

    def __getstate__(self) -> dict[str, Any]:
        """Without the task, whose functions cannot travel to another process; its name can."""
        return {name: value for name, value in vars(self).items() if name != "task"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, task=tasks.find(state["task_name"]))

    @property
    def _budget_s(self) -> float | None:
        """How long a run may take, where that is known before."""
        until = self.plan.until
        return until.amount if until.kind in ("target", "seconds") else None

    def notes(self) -> list[str]:
        """What a user should know before the figures."""
        found = []
        if self.world == "virtual" and any(each.is_ddp for each in self.contestants):
            found.append(
                "ddp in virtual time is SyncSGD, its equal; --world real runs torch's own."
            )
        if self.task.name == "text" and not self.cluster.compute.sample_s:
            found.append(
                f"The cluster {self.cluster.name} has no sample_s: its micro-batches cost the same "
                "whatever their length. Set sample_s in its [compute] to see the imbalance."
            )
        if self.world == "real" and self.plan.until.kind == "target":
            found.append(
                "Real processes are evaluated when a run is over, so every run takes "
                f"{self.plan.until.amount:.0f} s; --until 20s makes them shorter."
            )
        return found

    def run(
        self, show: Progress | None = None, sink: Sink | None = None, jobs: int = 1
    ) -> Standings:
        """Run all contestants for all seeds; on Ctrl-C return what there is.

        With several jobs, as many virtual runs at a time, each in a process of its own. Real runs
        have the machine to themselves, one after the other.
        """
        return running.run(self, Progress() if show is None else show, sink, jobs)

    def tuned(self, contestant: Contestant, show: Progress) -> Contestant:
        """Give a contestant its learning rate and size, found in virtual time in either world."""
        sizes = Sizes.of(contestant, self.cluster.workers, self.step_samples)
        search = tuning.Search(
            self.rates, self.plan.target, self.trials, len(sizes.values), sizes.start
        )
        with Virtual() as runner:
            rate, size = search.run(partial(self._trial, runner, show, contestant, sizes))
        if not search.found:
            return replace(contestant, rate=rate)
        return replace(sizes.put(contestant, size), rate=rate, edge=search.edge)

    def _trial(
        self,
        runner: Virtual,
        show: Progress,
        contestant: Contestant,
        sizes: Sizes,
        point: tuning.Point,
        limit_s: float,
    ) -> list[Outcome]:
        rate, size = point
        tried = replace(sizes.put(contestant, size), rate=rate)
        show.tune(contestant.label, told(tried))
        race = replace(self, plan=replace(self.plan, stops=True, limit_s=limit_s))
        return runner.outcomes(race, tried, tuning.SEED, show, None)

    def one(
        self,
        runner: Virtual | Real,
        contestant: Contestant,
        seed: int,
        show: Progress,
        sink: Sink | None,
    ) -> Result:
        """Make one run."""
        if sink is not None:
            sink(self.begin_line(contestant, seed))
        show.begin(contestant.label, seed)
        try:
            outcomes = runner.outcomes(self, contestant, seed, show, sink)
        except WorkerFailed as failure:
            diverged = tuning.has_diverged(failure)
            error = None if diverged else str(failure)
            result = self._result(contestant, seed, error=error, diverged=diverged)
        else:
            result = self._result(contestant, seed, **figures(outcomes, self.plan.target))
        if sink is not None:
            sink(end_line(result))
        return result

    def begin_line(self, contestant: Contestant, seed: int) -> Line:
        is_torchs = contestant.is_ddp and self.world == "real"
        return {
            "kind": "run",
            "label": contestant.label,
            "algorithm": "DistributedDataParallel" if is_torchs else repr(contestant.algorithm),
            "settings": contestant.settings,
            "world": self.world,
            "cluster": self.cluster.name,
            "cluster_file": self.cluster_file,
            "workers": self.cluster.workers,
            "task": self.task.name,
            "seed": seed,
            "command": self.command,
            "offbeat": offbeat.__version__,
            "target": self.plan.goal,
            "rate": contestant.rate,
            "tuned": contestant.tuned,
            "edge": contestant.edge,
        }

    def _result(self, contestant: Contestant, seed: int, **figures: Any) -> Result:
        return Result(
            contestant.label,
            contestant.name,
            contestant.settings,
            self.world,
            self.cluster.name,
            self.task.name,
            seed,
            self.plan.goal,
            contestant.rate,
            contestant.tuned,
            contestant.edge,
            budget_s=None if self.plan.target is None else self._budget_s,
            **figures,
        )


def _check_timed(task: str, target: str | None, until: str | None, world: str) -> None:
    """Say what does not go with a task that has nothing to learn."""
    if target is not None or until == "target":
        asked = "--until target" if target is None else f"--target {target}"
        raise ValueError(
            f"the task {task!r} has nothing to learn, and no target: leave out {asked}. "
            "Runs can end with --until 60s, 300rounds or 20000samples"
        )
    if world == "real":
        raise ValueError(f"the task {task!r} is for virtual time: leave out --world real")


def _check_accuracy(task: Task, goal: Target) -> None:
    """Say that a task has none: nobody could reach it."""
    model = task.model().eval()
    with torch.no_grad():
        _, accuracy = task.evaluate(model)
    if accuracy is None:
        raise ValueError(
            f"the task {task.name!r} has no accuracy, so nobody can reach {goal}: give a loss, "
            f"such as --target {task.target}"
        )


def _look_ahead(cluster: Cluster, task: Task) -> tuple[float, float]:
    """What a micro-batch costs the slowest worker, and its samples; means over the first ones."""
    batches = task.batches(0, cluster.workers, 0)
    samples = [task.samples(next(batches)) for _ in range(_LOOK_AHEAD_STEPS)]
    devices = [cluster.device(rank, seed=0) for rank in range(cluster.workers)]
    slowest_s = max(
        fmean(device.seconds(step, each, 0.0) for step, each in enumerate(samples))
        for device in devices
    )
    return slowest_s, fmean(samples)


def _text_of(cluster: str) -> str:
    path = Path(cluster)
    if cluster in named_clusters():
        path = Path(offbeat.clusters.__file__).parent / "named" / f"{cluster}.toml"
    return path.read_text(encoding="utf-8")
