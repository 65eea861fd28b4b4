"""FedCBDR's choice of samples for clients and a server of Flower (the package flwr).

    app = ClientApp()

    @app.query(ACTION)                                       # on every client
    def choose(message, context):
        return answered(message, context, model(), x, y)     # its samples of the task at hand

    strategy = FedCBDR(budget=100)                           # in the ServerApp: FedAvg, and
    result = strategy.start(grid, arrays, num_rounds=10)
    strategy.choose(grid, result.arrays, task=0, classes=(3, 7))

    kept(context, task=0)                                    # on a client: which samples to replay

The functions are those of `learn`: Gram matrices, quotas, and the draw by counts. Here the server
adds up what clients send, and sees it: nothing is masked. A choice is 18 messages to each client;
if one does not answer, `choose` raises, and can be called again with those that are there: it
begins anew, and nothing of the lost one is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
except ImportError as error:
    raise ImportError(
        "offbeat.federated.flower needs Flower: pip install 'offbeat[flower]'"
    ) from error

from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from offbeat.federated import gram, sampling
from offbeat.federated.client import class_counts
from offbeat.federated.features import features
from offbeat.federated.quotas import quotas

ACTION = "fedcbdr"
_WORK = "offbeat.work"


class FedCBDR(FedAvg):
    """Flower's averaging, and the choice of what is kept at the end of a task."""

    def __init__(self, budget: int = 100, seed: int = 0, time_out_s: float = 3600.0, **more: Any):
        super().__init__(**more)
        if budget < 1:
            raise ValueError(f"a buffer must hold 1 sample or more, got {budget}")
        self.budget, self.seed, self.time_out_s = budget, seed, time_out_s

    def choose(
        self, grid: Grid, arrays: ArrayRecord, task: int, classes: Sequence[int]
    ) -> list[int]:
        """Have all clients keep samples of a task; return how many of each class are kept."""
        nodes = sorted(grid.get_node_ids())
        about: dict[str, Any] = {"task": task, "classes": list(classes), "seed": self.seed}

        def summed(step: str, sent: ArrayRecord, *names: str) -> list[Tensor]:
            replies = self._asked(grid, nodes, {**about, "step": step}, sent)
            return [torch.stack([each[name] for each in replies]).sum(0) for name in names]

        total, supply = summed("score", arrays, "gram", "counts")
        whitening = gram.whitening(total, len(classes))
        summed("keys", _record(whitening=whitening))

        def count(ends: Tensor) -> Tensor:
            return summed("below", _record(ends=ends), "counts")[0]

        last = sampling.search(quotas(self.budget, supply.tolist()), count)
        found: list[int] = summed("keep", _record(last=last), "counts")[0].tolist()
        return found

    def _asked(
        self, grid: Grid, nodes: list[int], about: dict[str, Any], sent: ArrayRecord
    ) -> list[dict[str, Tensor]]:
        """Ask all clients for the same; each is told its place."""
        messages = []
        for place, node in enumerate(nodes):
            config = ConfigRecord({**about, "place": place, "clients": len(nodes)})
            content = RecordDict({"config": config, "arrays": sent})
            messages.append(Message(content, dst_node_id=node, message_type=f"query.{ACTION}"))
        replies = list(grid.send_and_receive(messages, timeout=self.time_out_s))
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(
                    f"node {reply.metadata.src_node_id} failed while samples of task "
                    f"{about['task']} were chosen: {reply.error.reason}"
                )
        if len(replies) < len(nodes):
            raise RuntimeError(
                f"{len(replies)} of {len(nodes)} nodes answered while samples of task "
                f"{about['task']} were chosen: call choose again, with those that are there"
            )
        return [_tensors(reply.content["arrays"]) for reply in replies]


def answered(message: Message, context: Context, model: nn.Module, x: Tensor, y: Tensor) -> Message:
    """Do a client's part of a choice, among these samples of its own."""
    config, arrays = message.content["config"], message.content["arrays"]
    classes = tuple(int(kind) for kind in config["classes"])
    place, step = int(config["place"]), config["step"]
    reply: dict[str, Tensor] = {}
    if step == "score":
        model.load_state_dict(arrays.to_torch_state_dict())
        rows = features(model, x, place)
        context.state[_WORK] = _record(rows=rows)
        reply = {"gram": gram.gram(rows), "counts": class_counts(y, classes)}
    elif step == "keys":
        rows = _tensors(context.state[_WORK])["rows"]
        scores = gram.leverage(rows, _tensors(arrays)["whitening"])
        seed = (int(config["seed"]) * 1009 + int(config["task"])) * 100_003 + place
        draw = torch.Generator().manual_seed(seed)
        mine = sampling.keys(scores, draw, place, int(config["clients"]))
        context.state[_WORK] = _record(keys=mine)
    else:
        mine = _tensors(context.state[_WORK])["keys"]
        of = [y == kind for kind in classes]
        if step == "below":
            ordered = [mine[each].sort().values for each in of]
            reply = {"counts": sampling.below(ordered, _tensors(arrays)["ends"])}
        else:
            last = _tensors(arrays)["last"]
            limits = zip(of, last, strict=True)
            chosen = torch.stack([its & (mine <= limit) for its, limit in limits])
            indices = chosen.any(0).nonzero().flatten()
            context.state[_name(int(config["task"]))] = _record(indices=indices)
            del context.state[_WORK]
            reply = {"counts": chosen.sum(1)}
    return Message(RecordDict({"arrays": _record(**reply)}), reply_to=message)


def kept(context: Context, task: int) -> Tensor:
    """Which of its samples of a task this client is to keep; none before they were chosen."""
    name = _name(task)
    if name not in context.state:
        return torch.zeros(0, dtype=torch.int64)
    return _tensors(context.state[name])["indices"]


def _name(task: int) -> str:
    return f"offbeat.kept.{task}"


def _record(**tensors: Tensor) -> ArrayRecord:
    return ArrayRecord({name: Array(each.numpy()) for name, each in tensors.items()})


def _tensors(record: ArrayRecord) -> dict[str, Tensor]:
    return {name: torch.from_numpy(each.numpy().copy()) for name, each in record.items()}
