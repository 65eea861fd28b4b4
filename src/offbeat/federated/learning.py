"""Federated class-incremental learning: one client's program, the same in every world.

    def client():
        return learn(model(), stream, FedCBDR(budget=100), test=(x, y), settings=Settings())

    offbeat.run(client, "uniform-8", workers=5)         # virtual; or under torchrun

Task by task: train on what the method wants, in rounds of federated averaging; then let the
method remember; then see how well all classes so far are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.attach import Attachment, attach
from offbeat.federated.averaging import FedAvg
from offbeat.federated.client import Client
from offbeat.federated.methods import Method
from offbeat.federated.streams import Stream
from offbeat.records import Sink
from offbeat.worlds import enter_world, leave_world

Tell = Callable[[dict[str, Any]], None]
"""Hears after every round how far a client has come."""


@dataclass(frozen=True)
class Settings:
    """How each task is trained; alike on every client."""

    rounds: int = 10
    """Of federated averaging, a task."""
    epochs: int = 2
    """Of each client over its own samples, a round."""
    batch: int = 64
    lr: float = 0.05
    momentum: float = 0.0
    """Begins anew in every round."""
    weight_decay: float = 0.0
    fraction: float = 1.0
    """Of the clients, drawn anew for every round; the others wait."""
    weights: Literal["samples", "clients"] = "samples"
    """What a client's model counts in the mean."""
    quorum: str | int | float = "all"
    grace_s: float = 0.0
    secure: bool = False
    """Whether sums between tasks are masked; the mean of models is not: see docs/federated.md."""
    survive: bool = False
    """Whether the others go on without a client that is lost."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")
        if self.fraction < 1 and self.quorum != "all":
            raise ValueError(
                f'fraction={self.fraction} goes with quorum="all": with a quorum, a round does not '
                "wait for the others anyway"
            )
        if self.weights not in ("samples", "clients"):
            raise ValueError(f'weights must be "samples" or "clients", got {self.weights!r}')


@dataclass
class History:
    """What came of it, on one client."""

    accuracy: list[list[float]] = field(default_factory=list)
    """After each task, of each task so far; of the first client, the others have none."""
    seen_accuracy: list[float] = field(default_factory=list)
    """After each task, over all classes so far."""
    histograms: list[list[int]] = field(default_factory=list)
    """After each task, how many samples of each class so far all clients have kept."""
    seconds: list[float] = field(default_factory=list)
    """When each task was over."""
    sent_bytes: int = 0
    """For sums and scores, by this client; models not counted."""
    rounds: int = 0
    """Of all tasks."""
    samples: float = 0.0
    """In the applied rounds, of all clients."""

    @property
    def forgetting(self) -> float:
        """How much accuracy old tasks have lost since their best, on average."""
        last = len(self.accuracy) - 1
        falls = [
            max(row[task] for row in self.accuracy[task:last]) - self.accuracy[last][task]
            for task in range(last)
        ]
        return sum(falls) / len(falls) if falls else 0.0


def learn(
    model: nn.Module,
    stream: Stream,
    method: Method,
    settings: Settings,
    test: tuple[Tensor, Tensor],
    tell: Tell | None = None,
) -> History:
    """Be one client, of as many as the stream was made for, through all tasks."""
    world = enter_world(survivors=1 if settings.survive else None)
    recorded = world.records
    try:
        if stream.clients != world.size:
            raise ValueError(
                f"the stream was made for {stream.clients} clients, but there are {world.size} "
                "workers: make it for as many"
            )
        client = Client(world, settings.seed, settings.secure)
        history = History()
        for task, classes in enumerate(stream.classes):
            x, y = stream.share(task, world.rank)
            client.see(classes)
            if not int(client.class_counts(y, classes).sum()):
                raise ValueError(f"task {task} has no data on any client: leave it out")
            world.records = _counted_on(recorded, history.rounds)
            say = None if tell is None else _saying(tell, client, history, stream, settings, task)
            method.begin(client, model, x, y)
            dp = train(client, model, method, *method.data(x, y), settings, task, say)
            history.rounds += dp.round
            history.samples += sum(each.samples for each in dp.stats().history)
            method.end(model, x, y)
            _note(history, client, model, method, stream, test, recorded)
        history.sent_bytes = client.sent_bytes
        client.close()
    except BaseException as error:
        leave_world(world, error)
        raise
    world.records = recorded
    leave_world(world)
    return history


def train(
    client: Client,
    model: nn.Module,
    method: Method,
    x: Tensor,
    y: Tensor,
    settings: Settings,
    task: int,
    say: Callable[[Attachment, float | None], None] | None = None,
) -> Attachment:
    """Make the rounds of a task; all clients have the same model at its end."""
    optimizer = torch.optim.SGD(
        model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )
    algorithm = FedAvg(
        steps=max(1, settings.epochs * math.ceil(len(y) / settings.batch)),
        weight=float(max(1, len(y))) if settings.weights == "samples" else 1.0,
        quorum=settings.quorum,
        grace_s=settings.grace_s,
    )
    batches, round_ = _batches(len(y), settings.batch, client.private), -1
    latest: Tensor | None = None
    with attach(model, optimizer, algorithm, survive=settings.survive) as dp:
        for _ in dp.rounds(settings.rounds):
            if dp.round != round_:
                round_ = dp.round
                optimizer.state.clear()
                if say is not None:
                    say(dp, None if latest is None else float(latest))
            optimizer.zero_grad()
            if len(y) and client.rank in _drawn(client, settings, task, round_):
                some = next(batches)
                dp.samples(len(some))
                loss = method.loss(model, x[some], y[some])
                torch.autograd.backward(loss)
                latest = loss.detach()
            optimizer.step()
    dp.detach()
    return dp


def _counted_on(sink: Sink | None, first: int) -> Sink | None:
    """A sink of records in which the rounds of a task follow those of the tasks before."""
    if sink is None:
        return None

    def counted(line: dict[str, Any]) -> None:
        has = line.get("round") is not None
        sink({**line, "round": line["round"] + first} if has else line)

    return counted


def _saying(
    tell: Tell, client: Client, history: History, stream: Stream, settings: Settings, task: int
) -> Callable[[Attachment, float | None], None]:
    """What a client says at the beginning of a round; its keys are those of a race's progress."""

    def say(dp: Attachment, loss: float | None) -> None:
        stats = dp.stats()
        done = min(dp.round / settings.rounds, 1.0)
        tell(
            {"rank": client.rank, "task": task, "seconds": dp.seconds}
            | {"rounds": history.rounds + dp.round, "loss": loss}
            | {"share": (task + done) / len(stream.classes)}
            | {"accuracy": history.seen_accuracy[-1] if history.seen_accuracy else None}
            | {"compute_s": stats.compute_s, "wait_s": stats.wait_s}
        )

    return say


def _batches(samples: int, size: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Epochs without end, each in an order of its own."""
    while samples:
        yield from torch.split(torch.randperm(samples, generator=draw), size)


def _drawn(client: Client, settings: Settings, task: int, round_: int) -> set[int]:
    """Who takes part in a round: the same on every client."""
    size = client.world.size
    if settings.fraction == 1:
        return set(range(size))
    seed = ((settings.seed + 1) * 1009 + task) * 100_003 + round_
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return set(order[: max(1, round(settings.fraction * size))].tolist())


def _note(
    history: History,
    client: Client,
    model: nn.Module,
    method: Method,
    stream: Stream,
    test: tuple[Tensor, Tensor],
    sink: Sink | None,
) -> None:
    """Write down what came of a task."""
    history.histograms.append(client.counts(method.buffer.histogram(client.seen)).tolist())
    history.seconds.append(client.world.now())
    if client.rank != client.world.members[0]:
        return
    x, y = test
    groups = stream.classes[: len(history.histograms)]
    its = [torch.isin(y, torch.tensor(group)) for group in groups]
    history.accuracy.append([client.accuracy(model, x[one], y[one]) for one in its])
    seen = torch.stack(its).any(dim=0)
    history.seen_accuracy.append(client.accuracy(model, x[seen], y[seen]))
    if sink is not None:
        sink(
            {"kind": "evaluation", "at_s": history.seconds[-1], "round": history.rounds}
            | {"samples": history.samples, "loss": None, "accuracy": history.seen_accuracy[-1]}
        )
