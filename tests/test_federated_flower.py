"""FedCBDR's choice inside Flower's own simulation, on two clients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from offbeat import federated as fed
from offbeat.federated import gram, sampling
from offbeat.federated.features import features
from offbeat.lab import digits

flwr = pytest.importorskip("flwr", reason="pip install 'offbeat[flower]'")

CLASSES, CLIENTS, BUDGET = (0, 1), 2, 21


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def _mine(place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client has mostly zeros, the other mostly ones."""
    x, y, *_ = digits.split()
    zeros, ones = (y == 0).nonzero().flatten(), (y == 1).nonzero().flatten()
    some = [torch.cat([zeros[:50], ones[:6]]), torch.cat([zeros[50:58], ones[6:60]])][place]
    return x[some], y[some]


def _client_app() -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from offbeat.federated import flower

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = _net(), _mine(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        kept = flower.kept(context, 0)
        labels = y[kept].bincount(minlength=2).tolist()
        metrics = {"num-examples": len(y), "zeros": labels[0], "ones": labels[1]}
        arrays = ArrayRecord(model.state_dict())
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.query(flower.ACTION)
    def choose(message: Message, context: Context) -> Message:
        x, y = _mine(context.node_config["partition-id"])
        return flower.answered(message, context, _net(), x, y)

    return app


def _served(grid: Any) -> dict[str, Any]:
    """What a ServerApp does: a round, the choice, and a round in which clients tell theirs."""
    from flwr.app import ArrayRecord

    from offbeat.federated import flower

    strategy = flower.FedCBDR(budget=BUDGET, fraction_evaluate=0.0)
    first = strategy.start(grid, ArrayRecord(_net().state_dict()), num_rounds=1)
    kept = strategy.choose(grid, first.arrays, task=0, classes=CLASSES)
    after = strategy.start(grid, first.arrays, num_rounds=1)
    metrics = dict(after.train_metrics_clientapp[1])
    return {"arrays": first.arrays.to_torch_state_dict(), "kept": kept, "metrics": metrics}


def _check(seen: dict[str, Any]) -> None:
    assert seen["kept"] == fed.quotas(BUDGET, [58, 60]) == [11, 10]
    for kind, name in enumerate(("zeros", "ones")):
        assert seen["metrics"][name] == pytest.approx(_expected(seen["arrays"], kind))


class _Here:
    """Hands messages to Flower's own ClientApp in this process, one client after the other."""

    def __init__(self, silent: bool = False) -> None:
        from flwr.app import Context, RecordDict

        self._app, self._silent = _client_app(), silent
        self._contexts = {
            11 + place: Context(1, 11 + place, {"partition-id": place}, RecordDict(), {})
            for place in range(CLIENTS)
        }

    def get_node_ids(self) -> list[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        to = [(each, each.metadata.dst_node_id) for each in messages]
        replies = [self._app(message, self._contexts[node]) for message, node in to]
        return replies[1:] if self._silent else replies


def test_clients_of_flower_keep_exactly_the_quotas_by_the_scores_of_the_pooled_features() -> None:
    _check(_served(_Here()))


def test_a_client_of_flower_that_does_not_answer_ends_the_choice() -> None:
    from flwr.app import ArrayRecord

    from offbeat.federated import flower

    strategy = flower.FedCBDR(budget=BUDGET)
    with pytest.raises(RuntimeError, match="1 of 2 nodes answered while samples of task 0"):
        strategy.choose(_Here(silent=True), ArrayRecord(_net().state_dict()), 0, CLASSES)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flowers_simulation_comes_to_the_same() -> None:
    pytest.importorskip("ray", reason="Flower's simulation needs ray")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, seen = ServerApp(), dict[str, Any]()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        seen.update(_served(grid))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's and ray's own
        config: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, _client_app(), CLIENTS, backend_config=config)
    _check(seen)


def _expected(arrays: dict[str, torch.Tensor], kind: int) -> float:
    """What clients keep of a class, chosen with all samples at hand; Flower's mean by samples."""
    model = _net()
    model.load_state_dict(arrays)
    parts = [_mine(place) for place in range(CLIENTS)]
    rows = [features(model, x) for x, _ in parts]
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in rows]).sum(0), 2)
    keys = [
        sampling.keys(
            gram.leverage(each, whitening), torch.Generator().manual_seed(place), place, CLIENTS
        )
        for place, each in enumerate(rows)
    ]
    pooled = torch.cat([key[y == kind] for key, (_, y) in zip(keys, parts, strict=True)])
    limit = pooled.sort().values[(11, 10)[kind] - 1]
    kept = [int((key[y == kind] <= limit).sum()) for key, (_, y) in zip(keys, parts, strict=True)]
    assert sum(kept) == (11, 10)[kind]
    sizes = [len(y) for _, y in parts]
    return sum(a * b for a, b in zip(kept, sizes, strict=True)) / sum(sizes)
