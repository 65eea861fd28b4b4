"""A crowd: thousands of workers and one server, in virtual time.

    found = crowd.run(
        RingmasterASGD(6, "expired"), start, gradient, optimizer,
        workers=6174, seconds=seconds, until_s=2000.0,
    )

What `attach` runs has no server: all workers are replicas, and each of them applies every gradient.
The theory of asynchronous methods has a server, which alone has the newest parameters: a worker
computes a gradient at what it was sent (a *job*), sends it, and is sent the newest parameters. That
is what runs here, with the same judges as on replicas (rounds/judge.py); see docs/crowd.md.

A job is an event, not a program: when it ends, by whom, which of its jobs. The gradient is computed
only then, so a job that is stopped costs nothing but its event. Workers that have been sent the
same parameters share them. A gradient costs time for itself and for those that it stops, never for
all workers.

The clock of the virtual world (worlds/clock.py) is not used: it takes equal moments in the order in
which they were put on its heap, where a server takes them by rank, and would have a closure for
each of some 1,000 jobs that an update starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.asynchronous import Asynchronous
from offbeat.clusters import Cluster
from offbeat.clusters.network import Network
from offbeat.errors import DeadlockError
from offbeat.lab.crowd_costs import Costs, Seconds
from offbeat.lab.crowd_sums import Sums
from offbeat.rounds import Judge, Ticket, Verdict

Gradient = Callable[[Tensor, int, int], Tensor]
"""Of a point, which it must not change, for a worker and its job of that number: a new tensor."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The server at a moment."""

    seconds: float
    updates: int
    value: Any


@dataclass
class Outcome:
    """What came out of a crowd's run."""

    point: Tensor
    """The server's parameters at the end."""
    seconds: float = 0.0
    """Virtual seconds until then."""
    updates: int = 0
    gradients: int = 0
    """That have come to the server."""
    dropped: int = 0
    """Of these, how many came too late."""
    stopped: int = 0
    """Jobs that were left in the middle."""
    models: int = 0
    """How often the server has sent its parameters to a worker."""
    sent_bytes: int = 0
    """By all: gradients that have come, and parameters."""
    largest_delay: int = 0
    """Updates between the oldest gradient in an update and that update."""
    curve: list[Seen] = field(default_factory=list)
    moments_s: list[float] = field(default_factory=list)
    """When updates were made, if asked for."""


def run(
    method: Asynchronous | Judge,
    start: Tensor,
    gradient: Gradient,
    optimizer: Callable[[list[Tensor]], Optimizer],
    *,
    seconds: Seconds | Cluster,
    workers: int | None = None,
    network: Network | None = None,
    samples: float = 1.0,
    seed: int = 0,
    expected_s: Sequence[float] | None = None,
    until_s: float = inf,
    updates: float = inf,
    done: Callable[[Tensor], bool] | None = None,
    at_s: Iterable[float] = (),
    value: Callable[[Tensor], Any] | None = None,
    moments: bool = False,
    watch: Callable[[Judge, Tensor, Ticket, Verdict], None] | None = None,
) -> Outcome:
    """Run a method with a server and so many workers, from `start`, until an end that is given.

    `optimizer` makes the server's, from its parameters, which are one flat tensor: such as
    `lambda x: SGD(x, lr=0.1)`. See `of_model` for a torch model.
    `seconds` is a cluster, or what a job of each worker takes, or a function that says it for many
    jobs at once, from the tensors of their workers and numbers. A network comes with the cluster,
    or is given, or takes no time. `expected_s`, by worker, is what a job of a worker that has
    finished none is expected to take, for `stop="longer"`; without it, such a worker goes on.
    It ends after `until_s` virtual seconds, after so many updates, or after the update whose point
    is `done`. `value` of the point is taken at the moments `at_s`, when all that is due then has
    happened. `watch` is told of every gradient that counts and what becomes of it.
    """
    if until_s == inf and updates == inf and done is None:
        raise ValueError("a crowd runs on and on: give until_s, updates or done")
    size = seconds.workers if workers is None and isinstance(seconds, Cluster) else workers
    if size is None or size < 1:
        raise ValueError(f"workers must be a whole number above 0, got {size!r}")
    costs = Costs(seconds, size, network, start.nbytes, samples, seed)
    judge = method.judge(size) if isinstance(method, Asynchronous) else method
    if judge.size != size:
        raise ValueError(f"the judge is for {judge.size} workers, but there are {size}")
    server = _Server(judge, start, gradient, optimizer, costs, samples)
    server.chooses = getattr(method, "stop", None) == "longer"
    server.expected_s = expected_s
    server.watch = watch
    server.keeps_moments = moments
    server.pending = sorted(at_s, reverse=True)
    server.value = value if value is not None else _nothing
    server.serve(until_s, updates, done)
    return server.outcome


def of_model(
    model: torch.nn.Module, loss: Callable[[torch.nn.Module, int, int], Tensor]
) -> tuple[Tensor, Gradient]:
    """Return a model's parameters as one tensor, and the gradient of `loss(model, worker, job)`.

    The model becomes the place where gradients are computed; its own parameters mean nothing.
    """
    parameters = list(model.parameters())
    flat = torch.cat([each.detach().flatten() for each in parameters])
    start = flat.clone()
    for each, part in zip(parameters, _parts(flat, parameters), strict=True):
        each.data = part

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        flat.copy_(point)
        found = torch.zeros_like(flat)
        for each, part in zip(parameters, _parts(found, parameters), strict=True):
            each.grad = part
        with torch.enable_grad():
            loss(model, worker, job).backward()  # type: ignore[no-untyped-call]
        return found

    return start, gradient


def _parts(flat: Tensor, parameters: list[torch.nn.Parameter]) -> Iterable[Tensor]:
    pieces = torch.split(flat, [each.numel() for each in parameters])
    return (piece.view_as(each) for piece, each in zip(pieces, parameters, strict=True))


def _nothing(point: Tensor) -> None:
    return None


_Job = tuple[float, int, int]  # when its gradient comes, of which worker, and which of its jobs


class _Server:
    """The newest parameters, who computes since when, and the heap of jobs that end."""

    chooses = False
    """Whether a worker is stopped only if the rest takes longer than a job anew."""
    expected_s: Sequence[float] | None = None
    watch: Callable[[Judge, Tensor, Ticket, Verdict], None] | None = None
    value: Callable[[Tensor], Any]

    def __init__(
        self,
        judge: Judge,
        start: Tensor,
        gradient: Gradient,
        optimizer: Callable[[list[Tensor]], Optimizer],
        costs: Costs,
        samples: float,
    ) -> None:
        size = judge.size
        self._judge = judge
        self._gradient = gradient
        self._costs = costs
        self._samples = samples
        self._point = start.detach().clone()
        self._optimizer = optimizer([self._point])
        self._sums = Sums(judge)
        self._newest = start.detach().clone()  # the point as it is sent
        self._at = [self._newest] * size  # by worker: what it computes at,
        self._version = [judge.version] * size  # and the version of that
        self._job = [-1] * size  # which of its jobs; others on the heap are dead
        self._begun_s = [0.0] * size
        self._ends_s = [inf] * size  # its gradient comes to the server; inf: it is idle
        self._came_s = [0.0] * size  # the latest one did
        self._finished: dict[int, tuple[int, float]] = {}  # jobs of a worker, their seconds
        self._heap: list[tuple[float, int, int, list[_Job]]] = []
        self._now = 0.0
        self.pending: list[float] = []
        self.keeps_moments = False
        self.outcome = Outcome(self._point)

    def serve(self, until_s: float, updates: float, done: Callable[[Tensor], bool] | None) -> None:
        """Take what comes, in order of time and rank, until the end."""
        self._begin(range(self._judge.size))
        heap, jobs, found = self._heap, self._job, self.outcome
        over = False
        while not over:
            if not heap:
                raise DeadlockError(
                    f"at virtual time {self._now:g} s nobody computes, after {found.updates} "
                    f"updates: all {self._judge.size} workers are idle, or have crashed or left"
                )
            if heap[0][0] > until_s:
                break
            moment, worker, job, others = heappop(heap)
            self._push(others)
            if job != jobs[worker]:  # it was stopped
                continue
            self._look(moment)
            self._now = moment
            before = found.updates
            self._take(worker, job)
            if found.updates > before:
                over = found.updates >= updates or (done is not None and done(self._point))
        found.seconds = self._now if over else until_s
        self._look(inf if not over else self._now)

    def _look(self, moment: float) -> None:
        """Add to the curve what is due before `moment`."""
        found, pending = self.outcome, self.pending
        while pending and pending[-1] < moment:
            found.curve.append(Seen(pending.pop(), found.updates, self.value(self._point)))

    def _take(self, worker: int, job: int) -> None:
        """A gradient has come: do as the judge says."""
        now, found, version = self._now, self.outcome, self._version[worker]
        ticket = Ticket(worker, version, self._samples, now - self._came_s[worker])
        self._came_s[worker] = now
        self._ends_s[worker] = inf
        self._remember(worker, now - self._begun_s[worker])
        found.gradients += 1
        found.sent_bytes += self._point.nbytes
        verdict = self._judge.judge(ticket)
        if verdict.into is None:
            found.dropped += 1
        else:
            self._count(ticket, verdict, job)
        stopped = self._to_stop(verdict)
        found.stopped += sum(self._ends_s[each] < inf for each in stopped)
        again = stopped if verdict.idle else [worker, *stopped]
        self._begin(again, None if verdict.fresh or verdict.idle else worker)

    def _count(self, ticket: Ticket, verdict: Verdict, job: int) -> None:
        """Add a gradient to its sum, and update the parameters if it is time."""
        gradient = self._gradient(self._at[ticket.worker], ticket.worker, job)
        if self.watch is not None:
            self.watch(self._judge, gradient, ticket, verdict)
        mean = self._sums.add(gradient, ticket, verdict)
        if mean is None:
            return
        found = self.outcome
        delay = int(self._judge.version - 1 - self._sums.oldest)
        found.largest_delay = max(found.largest_delay, delay)
        self._step(mean, verdict.scale)
        self._sums.then(verdict.then)
        self._newest = self._point.clone()
        found.updates += 1
        if self.keeps_moments:
            found.moments_s.append(self._now)

    def _step(self, mean: Tensor, scale: float) -> None:
        """One step of the optimizer, with its learning rate scaled for once."""
        self._point.grad = mean
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if scale != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * scale
        self._optimizer.step()
        if scale != 1.0:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _begin(self, workers: Sequence[int], stays: int | None = None) -> None:
        """Have these begin a job now, at the newest parameters but for one who stays."""
        if not workers:
            return
        version, jobs, sent = self._judge.version, self._job, []
        for worker in workers:
            jobs[worker] += 1
            if self._version[worker] != version and worker != stays:
                self._at[worker] = self._newest
                self._version[worker] = version
                sent.append(worker)
        self.outcome.models += len(sent)
        self.outcome.sent_bytes += len(sent) * self._point.nbytes
        numbers = [jobs[worker] for worker in workers]
        ends_s = self._costs.ends_s(workers, numbers, self._now, sent)
        for worker, end_s in zip(workers, ends_s, strict=True):
            self._begun_s[worker] = self._now
            self._ends_s[worker] = end_s
        self._push(sorted(zip(ends_s, workers, numbers, strict=True), reverse=True))

    def _push(self, jobs: list[_Job]) -> None:
        """Put the last of these on the heap, and with it the rest.

        Most jobs of a crowd are stopped: on the heap, each would cost its logarithm.
        """
        while jobs:
            end_s, worker, job = jobs.pop()
            if job == self._job[worker] and end_s < inf:
                heappush(self._heap, (end_s, worker, job, jobs))
                return

    def _to_stop(self, verdict: Verdict) -> list[int]:
        """Whom the verdict stops; if they may choose, those for whom the rest is the longer."""
        if not self.chooses:
            return list(verdict.stopped)
        return [
            each
            for each in verdict.stopped
            if self._ends_s[each] == inf or self._ends_s[each] - self._now > self._expected(each)
        ]

    def _remember(self, worker: int, seconds: float) -> None:
        if self.chooses:
            count, total = self._finished.get(worker, (0, 0.0))
            self._finished[worker] = (count + 1, total + seconds)

    def _expected(self, worker: int) -> float:
        """What a job of a worker takes: the mean of those that it has finished."""
        count, total = self._finished.get(worker, (0, 0.0))
        if count:
            return total / count
        return inf if self.expected_s is None else self.expected_s[worker]
