"""FedCBDR for people who live in Flower: a strategy for the server, and a client's part of it.

    replay = Replay(model, samples)                  # samples(context, task) -> x, y of this client
    app = ClientApp()
    app.query(ACTION)(replay)                        # its part of choosing what is kept

    @app.train()
    def train(message, context):
        task = int(message.content["config"]["task"])
        x, y = replay.data(context, task)            # the task's samples, and those kept so far
        ...

    strategy = FedCBDR(budget=100)                   # in the ServerApp: Flower's FedAvg, and
    arrays = strategy.learn(grid, arrays, classes=[(0, 1), (2, 3)], num_rounds=10)

The functions are those of `offbeat.federated.learn`: Gram matrices, exact quotas, and the draw by
counts. A choice is 18 messages to each node, whatever the number of samples.

Differs from `learn`: the server adds up what nodes send, and sees it: nothing is masked. A node
that fails or does not answer ends the choice with a RuntimeError; `choose` can be called again with
those that are there: it begins anew, and nothing of the lost one is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise ImportError(
        "offbeat.federated.flower needs Flower: pip install 'offbeat[flower]'"
    ) from error

from offbeat.federated import gram, sampling
from offbeat.federated.client import class_counts
from offbeat.federated.features import features
from offbeat.federated.quotas import quotas

ACTION = "fedcbdr"
"""Of the queries that a client answers by a `Replay`."""
_WORK = "offbeat.work"

Samples = Callable[[Context, int], tuple[Tensor, Tensor]]
"""What a client has of a task: the same samples in the same order whenever it is asked."""
Reply = dict[str, Tensor]


# --- the server ------------------------------------------------------------------------------


class FedCBDR(FedAvg):
    """Flower's averaging, and the choice of what is kept at the end of a task."""

    def __init__(self, budget: int = 100, seed: int = 0, time_out_s: float = 3600.0, **more: Any):
        super().__init__(**more)
        if budget < 1:
            raise ValueError(f"a buffer must hold 1 sample or more, got {budget}")
        self.budget, self.seed, self.time_out_s = budget, seed, time_out_s

    def learn(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        classes: Sequence[Sequence[int]],
        num_rounds: int,
        after: Callable[[int, ArrayRecord, list[int]], None] | None = None,
    ) -> ArrayRecord:
        """Train task by task, and choose after each; return the model of the last one.

        Clients find `task` and the `classes` seen so far in the config of a message. `after` hears
        of every task that is over: its number, the model, and how many of each class were kept.
        """
        for task, its in enumerate(classes):
            seen = [kind for group in classes[: task + 1] for kind in group]
            config = ConfigRecord({"task": task, "classes": seen})
            result = self.start(grid, arrays, num_rounds, self.time_out_s, train_config=config)
            if not result.arrays:
                raise RuntimeError(f"no node has trained task {task}: look at the nodes' logs")
            arrays = result.arrays
            kept = self.choose(grid, arrays, task, its)
            if after is not None:
                after(task, arrays, kept)
        return arrays

    def choose(
        self, grid: Grid, arrays: ArrayRecord, task: int, classes: Sequence[int]
    ) -> list[int]:
        """Have all nodes keep samples of a task; return how many of each class are kept."""
        nodes = sorted(grid.get_node_ids())
        if not nodes:
            raise RuntimeError(f"no node is connected to choose samples of task {task}")
        about = {"task": task, "classes": list(classes), "seed": self.seed}

        def summed(step: str, sent: ArrayRecord, *names: str) -> list[Tensor]:
            replies = self._asked(grid, nodes, {**about, "step": step}, sent)
            return [torch.stack([each[name] for each in replies]).sum(0) for name in names]

        total, supply = summed("score", arrays, "gram", "counts")
        if not int(supply.sum()):
            raise ValueError(f"task {task} has no data on any node: leave it out")
        wanted = quotas(self.budget, supply.tolist())
        summed("keys", _record(whitening=gram.whitening(total, len(classes))))

        def count(ends: Tensor) -> Tensor:
            return summed("below", _record(ends=ends), "counts")[0]

        last = sampling.search(wanted, count)
        found: list[int] = summed("keep", _record(last=last), "counts")[0].tolist()
        return found

    def _asked(
        self, grid: Grid, nodes: list[int], about: dict[str, Any], sent: ArrayRecord
    ) -> list[dict[str, Tensor]]:
        """Ask all nodes for the same; each is told its place. Their answers, in that order."""
        messages = []
        for place, node in enumerate(nodes):
            config = ConfigRecord({**about, "place": place, "clients": len(nodes)})
            content = RecordDict({"config": config, "arrays": sent})
            messages.append(Message(content, dst_node_id=node, message_type=f"query.{ACTION}"))
        replies = list(grid.send_and_receive(messages, timeout=self.time_out_s))
        when = f"while samples of task {about['task']} were chosen"
        for reply in replies:
            if reply.has_error():
                node, why = reply.metadata.src_node_id, reply.error.reason
                raise RuntimeError(f"node {node} failed {when}: {why}")
        if len(replies) < len(nodes):
            raise RuntimeError(
                f"{len(replies)} of {len(nodes)} nodes answered {when}: call choose again, with "
                "those that are there"
            )
        replies.sort(key=lambda reply: reply.metadata.src_node_id)
        return [_tensors(reply.content["arrays"]) for reply in replies]


# --- a client --------------------------------------------------------------------------------


class Replay:
    """A client's part: answers queries, and remembers in its context which samples are kept.

    `model()` makes a net whose state the server's arrays are.
    """

    def __init__(self, model: Callable[[], nn.Module], samples: Samples) -> None:
        self.model, self.samples = model, samples

    def kept(self, context: Context, task: int) -> Tensor:
        """Which of its samples of a task this client keeps; none before they were chosen."""
        name = _name(task)
        if name not in context.state:
            return torch.zeros(0, dtype=torch.int64)
        return _tensors(context.state[name])["indices"]

    def data(self, context: Context, task: int) -> tuple[Tensor, Tensor]:
        """What to train on: the samples of a task, followed by those kept of the tasks before."""
        parts = [self.samples(context, task)]
        for old in range(task):
            x, y = self.samples(context, old)
            its = self.kept(context, old)
            parts.append((x[its], y[its]))
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer one query of a choice."""
        config, arrays = message.content["config"], message.content["arrays"]
        x, y = self.samples(context, config["task"])
        query = _Query(context, config, arrays, x, y)
        answer = {"score": self._score, "keys": _keys, "below": _below, "keep": _keep}
        reply = answer[config["step"]](query)
        return Message(RecordDict({"arrays": _record(**reply)}), reply_to=message)

    def _score(self, query: _Query) -> Reply:
        model = self.model()
        model.load_state_dict(query.arrays.to_torch_state_dict())
        rows = features(model, query.x, query.config["place"])
        query.context.state[_WORK] = _record(rows=rows)
        return {"gram": gram.gram(rows), "counts": class_counts(query.y, query.classes)}


@dataclass(frozen=True)
class _Query:
    """What the server asks of a client, and what the client has of that task."""

    context: Context
    config: Any
    arrays: ArrayRecord
    x: Tensor
    y: Tensor

    @property
    def classes(self) -> tuple[int, ...]:
        return tuple(self.config["classes"])

    @property
    def work(self) -> dict[str, Tensor]:
        """What the query before has left."""
        return _tensors(self.context.state[_WORK])


def _keys(query: _Query) -> Reply:
    config, place = query.config, query.config["place"]
    scores = gram.leverage(query.work["rows"], _tensors(query.arrays)["whitening"])
    draw = torch.Generator().manual_seed(_seed(config["seed"], config["task"], place))
    mine = sampling.keys(scores, draw, place, config["clients"])
    query.context.state[_WORK] = _record(keys=mine)
    return {}


def _below(query: _Query) -> Reply:
    mine, y = query.work["keys"], query.y
    ordered = [mine[y == kind].sort().values for kind in query.classes]
    return {"counts": sampling.below(ordered, _tensors(query.arrays)["ends"])}


def _keep(query: _Query) -> Reply:
    mine, last = query.work["keys"], _tensors(query.arrays)["last"]
    pairs = zip(query.classes, last, strict=True)
    chosen = torch.stack([(query.y == kind) & (mine <= limit) for kind, limit in pairs])
    indices = chosen.any(0).nonzero().flatten()
    query.context.state[_name(query.config["task"])] = _record(indices=indices)
    del query.context.state[_WORK]
    return {"counts": chosen.sum(1)}


def _seed(seed: int, task: int, place: int) -> int:
    return (seed * 1009 + task) * 100_003 + place


def _name(task: int) -> str:
    return f"offbeat.kept.{task}"


def _record(**tensors: Tensor) -> ArrayRecord:
    return ArrayRecord({name: Array(each.numpy()) for name, each in tensors.items()})


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(each.numpy().copy()) for name, each in record.items()}
