"""What a run of a race is to reach, and what its workers remember on the way.

The model is evaluated every so many samples that all workers have applied, off the clock: it costs
no virtual time and sends no message, so to be watched changes nothing. Which model? The one that
all agree on: that of the newest round, as the worker has it that came to it first. Where models are
never all the same, the mean of all.

In virtual time, where the workers share a process, it is evaluated at once, and all leave when the
target has been reached. On real processes models are only copied, and evaluated when the run is
over: worker 0's, or, where models differ, those of all workers at the same number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offbeat.lab.goals import Target, Until
from offbeat.lab.reaching import Reaching
from offbeat.lab.tasks import Task
from offbeat.lab.totals import Totals, Watch
from offbeat.records import Line
from offbeat.replica import Replica
from offbeat.rounds import Flats, Layout
from offbeat.worlds import World

Tell = Callable[[Line], None]
"""Takes a line of progress: rank, seconds, rounds, share, compute_s, wait_s, loss, accuracy."""
_TOLD = 250
"""How often worker 0 says how far a virtual run has come, at most."""
_TELL_EVERY_S = 0.25
"""How often a real worker does."""


@dataclass(frozen=True)
class Plan:
    """What is the same for every contestant and seed of a race."""

    until: Until
    """With `target`, its amount is the cap in seconds."""
    target: Target | None
    every: float
    """Samples of all workers between two evaluations."""
    window: float
    """Samples over which the curve is smoothed: see reaching.py."""
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
    replicas: list[Replica] = field(default_factory=list)
    """Likewise."""
    applied: float = 0.0
    """Samples in the steps that workers have made on their own, where models differ."""
    due: float = 0.0
    """With so many samples comes the next evaluation."""
    evaluations: list[Line] = field(default_factory=list)
    reaching: Reaching | None = None


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
    steps: int = 0
    sent_bytes: float | None = None
    """By all workers until this one ended, where that is counted."""
    evaluations: list[Line] = field(default_factory=list)
    """Of the whole run: worker 0 has them."""
    reached_s: float = math.inf
    """When the target was reached, likewise."""
    reached_samples: float = math.inf
    """Applied by all workers then."""


@dataclass
class _Snapshot:
    at_s: float
    round: int
    samples: float
    tensors: list[Tensor]


class Keeping:
    """When this worker's loop ends, and what it remembers on the way."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        plan: Plan,
        shared: Shared,
        tell: Tell,
        world: World,
        virtual: bool,
    ) -> None:
        self._task = task
        self._model = model
        self._plan = plan
        self._shared = shared
        self._tell = tell
        self._records = world.records
        self._totals: Totals = Watch(None)
        self._replica: Replica | None = None
        self._own = 0.0  # samples in this worker's own steps
        self._virtual = virtual
        self._rank = world.rank
        self._told = self._told_s = 0.0
        self._snapshots: list[_Snapshot] = []
        if shared.reaching is None and plan.target is not None:
            shared.reaching = Reaching(plan.target, plan.window)

    @property
    def looks(self) -> bool:
        """Whether this worker has `stepped` called after each of its steps."""
        return self._rank == 0 or not self._virtual or self._plan.target is not None

    def reads(self, totals: Totals, replica: Replica | None = None) -> None:
        """Have this worker's totals from there; and its model, unless a plain one is all it has."""
        self._totals = totals
        self._replica = replica
        self._shared.totals.append(totals)
        if replica is not None:
            self._shared.replicas.append(replica)

    def goes_on(self, seconds: float, rounds: int) -> bool:
        """Say whether there is another micro-batch to compute."""
        if self._shared.over or seconds >= self._plan.limit_s:
            return False
        return self._plan.until.share(seconds, rounds, self._totals.samples) < 1.0

    def stepped(self, seconds: float, rounds: int, loss: Tensor) -> None:
        """Look at the run after a step, and evaluate the model if that is due."""
        samples = self._applied()
        if self._plan.target is not None and samples >= self._shared.due:
            self._shared.due = samples - samples % self._plan.every + self._plan.every
            self._look(seconds, rounds, samples)
        if self._rank == 0 or not self._virtual:
            self._say(seconds, rounds, loss)

    def finish(self, outcome: Outcome, world: World) -> None:
        """Evaluate what is left to evaluate, and the model that the run has ended with."""
        if self._plan.target is None:
            return
        if self._differ and not self._virtual:
            self._average(world)
        if self._rank != 0:
            return
        trained, places = _copied(self._places), self._places
        for snapshot in self._snapshots:
            _put(snapshot.tensors, places)
            self._evaluate(snapshot.at_s, snapshot.round, snapshot.samples)
        _put(trained, places)
        reaching = self._shared.reaching
        assert reaching is not None
        if reaching.samples is not None and reaching.seconds is not None:
            outcome.reached_s, outcome.reached_samples = reaching.seconds, reaching.samples
        self._evaluate(outcome.seconds, outcome.rounds, self._applied(), ends=True)
        outcome.evaluations = self._shared.evaluations

    # --- the model that all agree on -----------------------------------------------------------

    @property
    def _differ(self) -> bool:
        """Whether models are never all the same."""
        return self._replica is not None and self._replica.means is not None

    @property
    def _places(self) -> list[Tensor]:
        """What a snapshot is of."""
        if self._differ and self._replica is not None:
            return [each.detach() for each in self._replica.tensors]
        return [each.detach() for each in self._model.state_dict().values()]

    def _applied(self) -> float:
        """Samples that all workers have applied, as far as this one knows."""
        if not (self._virtual and self._differ):
            return self._totals.samples
        own = self._totals.own_samples
        self._shared.applied += own - self._own
        self._own = own
        return self._shared.applied

    def _look(self, seconds: float, rounds: int, samples: float) -> None:
        if self._differ and self._replica is not None and self._replica.shift is not None:
            if not self._virtual:
                mine = _read(self._replica)
                self._snapshots.append(_Snapshot(seconds, rounds, samples, mine.views))
                return
            self._replica.shift.show(_mean(self._shared.replicas).views)
            try:
                self._judge(seconds, rounds, samples)
            finally:
                self._replica.shift.hide()
        elif self._virtual:
            with _agreed(self._replica):
                self._judge(seconds, rounds, samples)
        elif self._rank == 0:
            with _agreed(self._replica):
                copied = _copied(self._places)
            self._snapshots.append(_Snapshot(seconds, rounds, samples, copied))

    def _judge(self, seconds: float, rounds: int, samples: float) -> None:
        self._evaluate(seconds, rounds, samples)
        reaching = self._shared.reaching
        if self._plan.stops and reaching is not None and reaching.samples is not None:
            self._shared.over = True

    @torch.no_grad()
    def _average(self, world: World) -> None:
        """Real workers: have in each snapshot the mean of what all had at as many samples."""
        channel = world.channel("race/means")
        count = torch.tensor([float(len(self._snapshots))])
        channel.all_reduce(count, "min").wait()
        del self._snapshots[int(count) :]
        for snapshot in self._snapshots:
            for tensor in snapshot.tensors:
                channel.all_reduce(flat := tensor.flatten().clone()).wait()
                tensor.copy_((flat / world.size).view_as(tensor))

    @torch.no_grad()
    def _evaluate(self, seconds: float, rounds: int, samples: float, ends: bool = False) -> None:
        training = self._model.training
        self._model.eval()
        loss, accuracy = self._task.evaluate(self._model)
        self._model.train(training)
        line = {"kind": "evaluation", "at_s": seconds, "round": rounds, "samples": samples}
        line |= {"loss": loss, "accuracy": accuracy}
        self._shared.evaluations.append(line)
        if self._shared.reaching is not None and not ends:
            self._shared.reaching.add(samples, seconds, loss, accuracy)
        if self._records is not None:
            self._records(line)

    # --- progress ------------------------------------------------------------------------------

    def _say(self, seconds: float, rounds: int, loss: Tensor) -> None:
        """Say how far this worker has come, now and then."""
        share = self._plan.until.share(seconds, rounds, self._totals.samples)
        due = self._rank == 0 and share * _TOLD >= self._told
        if not due and (self._virtual or seconds - self._told_s <= _TELL_EVERY_S):
            return
        self._told, self._told_s = int(share * _TOLD) + 1, seconds
        last = self._shared.evaluations[-1] if self._shared.evaluations else {}
        self._tell(
            {
                "rank": self._rank,
                "seconds": seconds,
                "rounds": rounds,
                "share": share,
                "compute_s": sum(each.compute_s for each in self._shared.totals),
                "wait_s": sum(each.wait_s for each in self._shared.totals),
                "loss": last.get("loss", loss.item() if self._plan.target else None),
                "accuracy": last.get("accuracy"),
            }
        )


def _agreed(replica: Replica | None) -> AbstractContextManager[None]:
    """Show what all agree on; not dp.agreed, which brings a worker to the newest round."""
    return nullcontext() if replica is None else replica.agreed()


def _read(replica: Replica) -> Flats:
    """A copy of one worker's model, where models differ."""
    assert replica.shift is not None
    replica.shift.read(model := Flats(Layout(replica.names, replica.tensors)))
    return model


def _mean(replicas: list[Replica]) -> Flats:
    """The mean of all models."""
    first, *others = replicas
    total = _read(first)
    for each in others:
        torch._foreach_add_(total.bodies, _read(each).bodies)
    torch._foreach_div_(total.bodies, float(len(replicas)))
    return total


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    return [each.clone() for each in tensors]


@torch.no_grad()
def _put(tensors: list[Tensor], into: list[Tensor]) -> None:
    for here, there in zip(tensors, into, strict=True):
        there.copy_(here)
