"""A race: the same task, cluster, noise, data and initial model for every algorithm.

    race = Race.of(["sync", "eager:quorum=solo"], cluster="two-slow-of-eight", task="digits")
    standings = race.run()
    print(verdict.sentence(standings))

In virtual time a run is a call of `offbeat.run`; on real processes, paced by the cluster, a job for
a pool of workers that is started once. One run after the other: each has the machine to itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters import named as named_clusters
from offbeat.errors import ReportError
from offbeat.lab import contestants, tasks, tuning
from offbeat.lab.contestants import Contestant
from offbeat.lab.goals import Target, Until
from offbeat.lab.progress import Progress
from offbeat.lab.runners import Real, Virtual
from offbeat.lab.tasks import Task
from offbeat.lab.train import WorkerFailed
from offbeat.lab.watching import Outcome, Plan
from offbeat.records import Line, Sink

WorldName = Literal["virtual", "real"]
_SNAPSHOTS = {"virtual": 250, "real": 64}
_LOOK_AHEAD_STEPS = 32
_SEEDS = {"virtual": 2, "real": 1}


@dataclass(frozen=True)
class Result:
    """What one run came to. `None` is what was not reached, or not measured."""

    label: str
    algorithm: str
    settings: dict[str, Any]
    world: WorldName
    cluster: str
    task: str
    seed: int
    target: str | None
    """None if there is nothing to learn."""
    rate: float
    """The factor of the task's learning rate."""
    seconds_to_target: float | None = None
    seconds: float | None = None
    """Until the last worker had ended."""
    final_accuracy: float | None = None
    final_loss: float | None = None
    samples: float | None = None
    """Computed, by all workers."""
    rounds: int | None = None
    steps: int | None = None
    """Micro-batches, of all workers."""
    utilization: float | None = None
    """The share of all workers' time that they have computed."""
    waited_s: float | None = None
    """By all workers together."""
    dropped_samples: float | None = None
    mean_staleness_rounds: float | None = None
    max_staleness_rounds: int | None = None
    replicas_identical: bool | None = None
    error: str | None = None
    """The traceback of the worker that failed first, with its rank and the time."""


@dataclass
class Standings:
    """What a race has measured, be it to its end or to Ctrl-C."""

    results: list[Result] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    """What records say of each run at its begin and at its end, for the table."""
    interrupted: bool = False
    stopped: str | None = None
    """Why the records cannot be written any more: the race ends there."""


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
        rates: str = "1,2,4",
        workers: int | None = None,
        command: str = "",
    ) -> Race:
        """Check everything that a user may say; ValueError (ClusterError) says what is wrong."""
        loaded = Cluster.load(cluster)
        found = tasks.find(task)
        chosen = [contestants.parse(spec) for spec in algorithms] or contestants.default(world)
        sized = loaded if workers is None else loaded.resized(workers)
        contestants.check(chosen, sized.workers)
        count = _SEEDS[world] if seeds is None else seeds
        if not 1 <= count <= tuning.SEED:
            raise ValueError(f"seeds must be between 1 and {tuning.SEED}, got {count}")
        goal = found.target if target is None else Target.parse(target)
        if found.target is None:
            _check_timed(found.name, target, until, world)
        ending, snapshots = Until.parse(until or "target"), _SNAPSHOTS[world]
        if ending.kind == "target":
            budget_s = found.budget_steps * _slowest_step_s(sized, found)
            ending = Until("target" if found.target else "seconds", budget_s)
            snapshots = found.budget_steps if world == "virtual" else snapshots
        return cls(
            chosen,
            sized,
            _text_of(cluster),
            found,
            task,
            world,
            Plan(ending, goal, snapshots, stops=ending.kind == "target"),
            count,
            tuning.parse_rates(rates) if found.target else (1.0,),
            command,
        )

    @property
    def unit(self) -> str:
        """Seconds, called what they are."""
        return "virtual s" if self.world == "virtual" else "s"

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

    def run(self, show: Progress | None = None, sink: Sink | None = None) -> Standings:
        """Run all contestants for all seeds; on Ctrl-C return what there is."""
        show = Progress() if show is None else show
        standings = Standings()
        field_of_runners = Virtual() if self.world == "virtual" else Real(self.cluster.workers)
        try:
            tuned = self._tuned(show)
            with field_of_runners as runner:
                for seed in range(self.seeds):
                    for contestant in tuned:
                        result = self._one(runner, contestant, seed, show, sink)
                        standings.results.append(result)
                        standings.lines += self._begin(contestant, seed), _end(result)
        except KeyboardInterrupt:
            standings.interrupted = True
        except ReportError as error:
            standings.stopped = str(error)
        return standings

    def _tuned(self, show: Progress) -> list[Contestant]:
        """Give every contestant its learning rate, found in virtual time in either world."""
        known: dict[str, tuple[float, str]] = {}
        tuned = []
        with Virtual() as runner:
            for contestant in self.contestants:
                same = repr(contestant.algorithm)  # ddp and sync
                if same not in known:
                    trial = partial(self._trial, runner, show, contestant)
                    known[same] = tuning.best_rate(self.rates, self.plan.target, trial)
                rate, words = known[same]
                show.tuned(contestant.label, rate, words)
                tuned.append(replace(contestant, rate=rate))
        return tuned

    def _trial(
        self,
        runner: Virtual,
        show: Progress,
        contestant: Contestant,
        rate: float,
        limit_s: float,
    ) -> list[Outcome]:
        show.tune(contestant.label, rate)
        race = replace(self, plan=replace(self.plan, stops=True, limit_s=limit_s))
        return runner.outcomes(race, replace(contestant, rate=rate), tuning.SEED, show, None)

    def _one(
        self,
        runner: Virtual | Real,
        contestant: Contestant,
        seed: int,
        show: Progress,
        sink: Sink | None,
    ) -> Result:
        if sink is not None:
            sink(self._begin(contestant, seed))
        show.begin(contestant.label, seed)
        try:
            outcomes = runner.outcomes(self, contestant, seed, show, sink)
        except WorkerFailed as failure:
            result = self._result(contestant, seed, error=str(failure))
        else:
            result = self._result(contestant, seed, **_figures(outcomes, self.plan.target))
        if sink is not None:
            sink(_end(result))
        show.end(result.label, asdict(result))
        return result

    def _begin(self, contestant: Contestant, seed: int) -> Line:
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
        }

    def _result(self, contestant: Contestant, seed: int, **figures: Any) -> Result:
        return Result(
            contestant.label,
            contestant.label.partition(":")[0],
            contestant.settings,
            self.world,
            self.cluster.name,
            self.task.name,
            seed,
            self.plan.goal,
            contestant.rate,
            **figures,
        )


def _end(result: Result) -> Line:
    return {"kind": "result", **asdict(result)}


def _figures(outcomes: list[Outcome], target: Target | None) -> dict[str, Any]:
    first = outcomes[0]
    spent_s = sum(each.compute_s + each.wait_s for each in outcomes)
    learnt: dict[str, Any] = {}
    if target is not None:
        reached_s, _ = tuning.judged(first, target)
        last = first.evaluations[-1]
        learnt = {
            "seconds_to_target": reached_s if math.isfinite(reached_s) else None,
            "final_accuracy": last["accuracy"],
            "final_loss": last["loss"] if math.isfinite(last["loss"]) else None,
        }
    return learnt | {
        "seconds": max(each.seconds for each in outcomes),
        "steps": sum(each.steps for each in outcomes),
        "samples": sum(each.computed_samples for each in outcomes),
        "rounds": first.rounds,
        "utilization": sum(each.compute_s for each in outcomes) / spent_s if spent_s else 1.0,
        "waited_s": sum(each.wait_s for each in outcomes),
        "dropped_samples": sum(each.dropped_samples for each in outcomes),
        "mean_staleness_rounds": first.mean_staleness_rounds,
        "max_staleness_rounds": first.max_staleness_rounds,
        "replicas_identical": all(each.replicas_identical for each in outcomes),
    }


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


def _slowest_step_s(cluster: Cluster, task: Task) -> float:
    """What a micro-batch costs the slowest worker, on average over its first ones."""
    batches = task.batches(0, cluster.workers, 0)
    samples = [task.samples(next(batches)) for _ in range(_LOOK_AHEAD_STEPS)]
    devices = [cluster.device(rank, seed=0) for rank in range(cluster.workers)]
    return max(
        fmean(device.seconds(step, each, 0.0) for step, each in enumerate(samples))
        for device in devices
    )


def _text_of(cluster: str) -> str:
    path = Path(cluster)
    if cluster in named_clusters():
        path = Path(offbeat.clusters.__file__).parent / "named" / f"{cluster}.toml"
    return path.read_text(encoding="utf-8")
