"""What a run of a race is to reach, and what its workers remember on the way.

Worker 0 takes snapshots. In virtual time, where that is free, it evaluates them at once, and when
the target has been reached it says so to the others, who share its process: that costs no virtual
time and sends no message, so it cannot change what an algorithm does. On real processes it only
copies the parameters, and evaluates when the run is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from offbeat.attach import Attachment
from offbeat.lab.goals import Target, Until
from offbeat.lab.tasks import Task
from offbeat.records import Line, Sink

Tell = Callable[[Line], None]
"""Takes a line of progress: rank, seconds, rounds, share, compute_s, wait_s, loss, accuracy."""


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
    totals: list[Totals] = field(default_factory=list)
    """Of all workers in this process."""


class Totals(Protocol):
    """What one worker has done so far."""

    @property
    def compute_s(self) -> float: ...

    @property
    def wait_s(self) -> float: ...

    @property
    def samples(self) -> float:
        """Of all workers, in the rounds that were applied here."""


class OfAttached:
    """The totals that an attachment keeps itself."""

    def __init__(self, dp: Attachment) -> None:
        self._apply = dp._apply

    @property
    def compute_s(self) -> float:
        return self._apply.stats.compute_s

    @property
    def wait_s(self) -> float:
        return self._apply.stats.wait_s

    @property
    def samples(self) -> float:
        return self._apply.samples


@dataclass
class Watch:
    """The totals of a worker without one, read off its records, which are handed on."""

    sink: Sink | None
    compute_s: float = 0.0
    wait_s: float = 0.0
    samples: float = 0.0

    def __call__(self, line: Line) -> None:
        kind = line["kind"]
        if kind == "compute":
            self.compute_s += line["to_s"] - line["from_s"]
        elif kind == "wait":
            self.wait_s += line["to_s"] - line["from_s"]
        elif kind == "round":
            self.samples += line["samples"]
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


@dataclass
class _Snapshot:
    at_s: float
    round: int
    samples: float
    parameters: list[Tensor]


class Keeping:
    """When this worker's loop ends, and what it remembers on the way."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        plan: Plan,
        shared: Shared,
        tell: Tell,
        records: Sink | None,
        virtual: bool,
        rank: int,
    ) -> None:
        self._task = task
        self._model = model
        self._plan = plan
        self._shared = shared
        self._tell = tell
        self._records = records
        self._totals: Totals = Watch(None)
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

    def reads(self, totals: Totals) -> None:
        """Have this worker's totals from there."""
        self._totals = totals
        self._shared.totals.append(totals)

    def goes_on(self, seconds: float, rounds: int) -> bool:
        """Say whether there is another micro-batch to compute."""
        if self._shared.over or seconds >= self._plan.limit_s:
            return False
        return self._plan.until.share(seconds, rounds, self._totals.samples) < 1.0

    def stepped(self, seconds: float, rounds: int, loss: Tensor) -> None:
        """Look at the run after a step, and take a snapshot if one is due."""
        share = self._plan.until.share(seconds, rounds, self._totals.samples)
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
        self._evaluate(outcome.seconds, outcome.rounds, self._totals.samples)
        outcome.evaluations = self._evaluations

    def _snapshot(self, seconds: float, rounds: int) -> None:
        if not self._virtual:
            copied = _copied(self._model)
            self._snapshots.append(_Snapshot(seconds, rounds, self._totals.samples, copied))
            return
        loss, accuracy = self._evaluate(seconds, rounds, self._totals.samples)
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
        if self._records is not None:
            self._records(line)
        return loss, accuracy

    def _progress(self, seconds: float, rounds: int, loss: float | None) -> None:
        last = self._evaluations[-1] if self._evaluations else {}
        self._tell(
            {
                "rank": self._rank,
                "seconds": seconds,
                "rounds": rounds,
                "share": self._plan.until.share(seconds, rounds, self._totals.samples),
                "compute_s": sum(each.compute_s for each in self._shared.totals),
                "wait_s": sum(each.wait_s for each in self._shared.totals),
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
