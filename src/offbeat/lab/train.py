"""One worker of one run, in whichever world it is: the loop that every contestant goes through.

Worker 0 takes snapshots. In virtual time, where that is free, it evaluates them at once, and when
the target has been reached it says so to the others, who share its process: that costs no virtual
time and sends no message, so it cannot change what an algorithm does. On real processes it only
copies the parameters, and evaluates when the run is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.contestants import Contestant
from offbeat.lab.goals import Target, Until
from offbeat.lab.tasks import Task
from offbeat.records import Line, Sink
from offbeat.worlds import World, enter_world, leave_world

_LATEST_STEP = "race/latest-step"


@dataclass(frozen=True)
class Plan:
    """What is the same for every contestant and seed of a race."""

    until: Until
    """With `target`, its amount is the cap in seconds."""
    target: Target | None
    snapshots: int
    """How many to take, evenly over the run."""
    stops: bool
    """Whether a virtual run ends when it has reached the target."""
    limit_s: float = math.inf
    """It ends then in any case."""

    @property
    def goal(self) -> str | None:
        """The target in words."""
        return None if self.target is None else str(self.target)


@dataclass
class Shared:
    """What the workers of a virtual run tell each other; each real process has its own."""

    over: bool = False
    """The target has been reached: everybody leaves."""
    watches: list[Watch] = field(default_factory=list)
    """Of all workers in this process."""


@dataclass
class Watch:
    """Reads what happens to one worker off its records, and hands them on."""

    sink: Sink | None
    compute_s: float = 0.0
    wait_s: float = 0.0
    samples: float = 0.0
    """Of all workers, in the rounds that were applied here."""
    stale: float = 0.0
    """Staleness times samples."""
    oldest_rounds: int = 0

    def __call__(self, line: Line) -> None:
        kind = line["kind"]
        if kind == "compute":
            self.compute_s += line["to_s"] - line["from_s"]
        elif kind == "wait":
            self.wait_s += line["to_s"] - line["from_s"]
        elif kind == "round":
            self.samples += line["samples"]
            self.stale += line["samples"] * line["mean_staleness_rounds"]
            self.oldest_rounds = max(self.oldest_rounds, line["staleness_rounds"])
        if self.sink is not None:
            self.sink(line)


@dataclass
class Outcome:
    """What one worker has to say of a run."""

    rank: int
    seconds: float
    rounds: int
    computed_samples: float
    dropped_samples: float
    compute_s: float
    wait_s: float
    mean_staleness_rounds: float
    max_staleness_rounds: int
    replicas_identical: bool
    evaluations: list[Line] = field(default_factory=list)
    """Of worker 0."""
    steps: int = 0


class WorkerFailed(Exception):  # noqa: N818 - it happened to a worker
    """A worker has raised or died; the text is its traceback, with its rank and the time."""


Tell = Callable[[Line], None]
"""Takes a line of progress: rank, seconds, rounds, share, compute_s, wait_s, loss, accuracy."""


def train(
    task: Task,
    contestant: Contestant,
    plan: Plan,
    seed: int,
    shared: Shared,
    tell: Tell,
    pace: Cluster | None = None,
) -> Outcome:
    """Train until the budget is used up or the target is reached; `pace` is for real processes."""
    _seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= contestant.rate
    batches = task.batches(offbeat.rank(), offbeat.world_size(), seed)
    world = enter_world(pace, seed)
    with _watched(world) as watch:
        run = _Run(task, model, plan, shared, tell, watch, virtual=pace is None, rank=world.rank)
        if contestant.is_ddp and pace is not None:
            outcome = _ddp(world, run, task, model, optimizer, batches, watch)
        else:
            outcome = _attached(world, run, task, model, optimizer, batches, watch, contestant)
    leave_world(world)
    run.finish(outcome)
    return outcome


def _seed(seed: int) -> None:
    """As torch does, which also keeps a traceback for every kind of device that is not there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _attached(
    world: World,
    run: _Run,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    watch: Watch,
    contestant: Contestant,
) -> Outcome:
    with offbeat.attach(model, optimizer, contestant.algorithm) as dp:
        run.agreed = dp.agreed
        while run.goes_on(dp.seconds, dp.round):
            batch = next(batches)
            optimizer.zero_grad()
            dp.samples(task.samples(batch))
            loss = task.loss(model, batch)
            if loss.requires_grad:
                torch.autograd.backward(loss)
            optimizer.step()
            if run.looks:
                run.stepped(dp.seconds, dp.round, loss)
    stats = dp.stats()
    return Outcome(
        world.rank,
        dp.seconds,
        dp.round,
        stats.computed_samples,
        stats.dropped_samples,
        stats.compute_s,
        stats.wait_s,
        watch.stale / watch.samples if watch.samples else 0.0,
        watch.oldest_rounds,
        bool(stats.replicas_identical),
        steps=stats.steps,
    )


def _ddp(
    world: World,
    run: _Run,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    watch: Watch,
) -> Outcome:
    """Train with DistributedDataParallel; its compute is paced before backward begins to reduce.

    Nobody may leave alone, or the others would hang. Worker 0 decides: when it has ended step k,
    nobody can have ended k + 1 without it, so k + 1 is the last one for all.
    """
    wrapped = DistributedDataParallel(model)
    step, computed = 0, 0.0
    latest = 0
    while not latest or step < latest:
        began = world.now()
        batch = next(batches)
        samples = task.samples(batch)
        optimizer.zero_grad()
        loss = task.loss(wrapped, batch)
        world.sleep_until(began + world.compute_s(step, samples, began))
        ready = world.now()
        torch.autograd.backward(loss)
        optimizer.step()
        step += 1
        computed += samples
        ended = world.now()
        _tell_step(world, watch, step, samples, began, ready, ended)
        run.stepped(ended, step, loss)
        if world.rank == 0 and not latest and not run.goes_on(ended, step):
            latest = world.control.add(_LATEST_STEP, step + 1)
        elif world.rank != 0:
            latest = world.control.add(_LATEST_STEP, 0)
    ended, same = world.now(), _same_on_all(world, model)
    watch(
        {"kind": "end", "rank": world.rank, "at_s": ended, "steps": step, "samples": computed}
        | {"compute_s": watch.compute_s, "wait_s": watch.wait_s, "dropped_samples": 0.0}
    )
    seconds = watch.compute_s, watch.wait_s
    return Outcome(world.rank, ended, step, computed, 0.0, *seconds, 0.0, 0, same, steps=step)


def _tell_step(
    world: World, watch: Watch, step: int, samples: float, began: float, ready: float, ended: float
) -> None:
    rank, number = world.rank, step - 1
    watch(
        {"kind": "compute", "rank": rank, "from_s": began, "to_s": ready, "samples": samples}
        | {"arrival": "on time"}
    )
    watch({"kind": "wait", "rank": rank, "from_s": ready, "to_s": ended, "round": number})
    watch(
        {"kind": "round", "rank": rank, "round": number, "from_s": ready, "to_s": ended}
        | {"at_s": ended, "samples": samples * world.size, "workers": world.size}
        | {"staleness_rounds": 0, "mean_staleness_rounds": 0.0}
    )


def _same_on_all(world: World, model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    channel = world.channel("race/same")
    channel.all_reduce(least := flat.clone(), "min").wait()
    channel.all_reduce(most := flat.clone(), "max").wait()
    return bool(torch.equal(least, most))


@contextmanager
def _watched(world: World) -> Iterator[Watch]:
    before = world.records
    world.records = watch = Watch(before)
    yield watch
    world.records = before


@dataclass
class _Snapshot:
    at_s: float
    round: int
    samples: float
    parameters: list[Tensor]


class _Run:
    """When this worker's loop ends, and what it remembers on the way."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        plan: Plan,
        shared: Shared,
        tell: Tell,
        watch: Watch,
        virtual: bool,
        rank: int,
    ) -> None:
        self._task = task
        self._model = model
        self._plan = plan
        self._shared = shared
        self._tell = tell
        self._watch = watch
        self._virtual = virtual
        self._rank = rank
        self.looks = rank == 0 or not virtual
        """Whether this worker has `stepped` called after each of its steps."""
        self._told_s = 0.0
        self._taken = 0
        self._snapshots: list[_Snapshot] = []
        self._evaluations: list[Line] = []
        self.agreed: Callable[[], AbstractContextManager[None]] = nullcontext
        """Shows the model that all workers agree on, where they have steps of their own."""
        shared.watches.append(watch)

    def goes_on(self, seconds: float, rounds: int) -> bool:
        """Say whether there is another micro-batch to compute."""
        if self._shared.over or seconds >= self._plan.limit_s:
            return False
        return self._plan.until.share(seconds, rounds, self._watch.samples) < 1.0

    def stepped(self, seconds: float, rounds: int, loss: Tensor) -> None:
        """Look at the run after a step, and take a snapshot if one is due."""
        share = self._plan.until.share(seconds, rounds, self._watch.samples)
        due = self._rank == 0 and share * self._plan.snapshots >= self._taken
        if due:
            self._taken = int(share * self._plan.snapshots) + 1
            if self._plan.target is not None:
                with self.agreed():
                    self._snapshot(seconds, rounds)
        if due or (not self._virtual and seconds - self._told_s > 0.25):
            self._told_s = seconds
            self._progress(seconds, rounds, loss.item() if self._plan.target else None)

    def finish(self, outcome: Outcome) -> None:
        """Evaluate what is left to evaluate, and the model that the run has ended with."""
        if self._rank != 0 or self._plan.target is None:
            return
        trained = _copied(self._model)
        for snapshot in self._snapshots:
            _put_back(self._model, snapshot.parameters)
            self._evaluate(snapshot.at_s, snapshot.round, snapshot.samples)
        _put_back(self._model, trained)
        self._evaluate(outcome.seconds, outcome.rounds, self._watch.samples)
        outcome.evaluations = self._evaluations

    def _snapshot(self, seconds: float, rounds: int) -> None:
        if not self._virtual:
            copied = _copied(self._model)
            self._snapshots.append(_Snapshot(seconds, rounds, self._watch.samples, copied))
            return
        loss, accuracy = self._evaluate(seconds, rounds, self._watch.samples)
        target = self._plan.target
        if self._plan.stops and target is not None and target.reached(loss, accuracy):
            self._shared.over = True

    def _evaluate(self, seconds: float, rounds: int, samples: float) -> tuple[float, float | None]:
        training = self._model.training
        self._model.eval()
        with torch.no_grad():
            loss, accuracy = self._task.evaluate(self._model)
        self._model.train(training)
        line = {"kind": "evaluation", "at_s": seconds, "round": rounds, "samples": samples}
        line |= {"loss": loss, "accuracy": accuracy}
        self._evaluations.append(line)
        self._watch(line)
        return loss, accuracy

    def _progress(self, seconds: float, rounds: int, loss: float | None) -> None:
        last = self._evaluations[-1] if self._evaluations else {}
        self._tell(
            {
                "rank": self._rank,
                "seconds": seconds,
                "rounds": rounds,
                "share": self._plan.until.share(seconds, rounds, self._watch.samples),
                "compute_s": sum(watch.compute_s for watch in self._shared.watches),
                "wait_s": sum(watch.wait_s for watch in self._shared.watches),
                "loss": last.get("loss", loss),
                "accuracy": last.get("accuracy"),
            }
        )


def _copied(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def _put_back(model: nn.Module, copied: list[Tensor]) -> None:
    with torch.no_grad():
        for value, copy in zip(model.state_dict().values(), copied, strict=True):
            value.copy_(copy)
