"""FedCBDR inside Flower: its own ClientApp in one process, and its own simulation on two nodes."""

from __future__ import annotations

import warnings
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import federated as fed
from offbeat.federated import gram, sampling
from offbeat.federated.features import features
from offbeat.lab import digits

flwr = pytest.importorskip("flwr", reason="pip install 'offbeat[flower]'")

TASKS, CLIENTS, BUDGET = ((0, 1), (2, 3)), 2, 21
KEPT = [11, 10]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def _has(client: int, task: int) -> tuple[Tensor, Tensor]:
    """Of the first task, one client has mostly one class; of the second, the other has nothing."""
    x, y, *_ = digits.split()
    if task == 0:
        a, b = ((y == kind).nonzero().flatten() for kind in TASKS[0])
        some = [torch.cat([a[:50], b[:6]]), torch.cat([a[50:58], b[6:60]])][client]
        return x[some], y[some]
    if task == 2:
        raise FileNotFoundError("no such file")
    some = torch.isin(y, torch.tensor(TASKS[1])).nonzero().flatten()[: 60 * client]
    return x[some], y[some]


def _samples(context: Any, task: int) -> tuple[Tensor, Tensor]:
    return _has(int(context.node_config["partition-id"]), task)


def _client_app() -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from offbeat.federated import flower

    app, replay = ClientApp(), flower.Replay(_net, _samples)
    app.query(flower.ACTION)(replay)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = _net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = replay.data(context, int(message.content["config"]["task"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.autograd.backward(cross_entropy(model(x), y))
        optimizer.step()
        metrics = {f"has-{kind}": int((y == kind).sum()) for kind in range(4)}
        metrics |= {"client": int(context.node_config["partition-id"]), "num-examples": len(y)}
        arrays = ArrayRecord(model.state_dict())
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def _served(grid: Any) -> dict[str, Any]:
    """What a ServerApp does; returned is what it hears of clients, and what was kept."""
    from flwr.app import ArrayRecord, MetricRecord

    from offbeat.federated import flower

    heard: list[dict[int, dict[str, int]]] = []
    tasks: list[tuple[dict[str, Tensor], list[int]]] = []

    def hear(records: Any, key: str) -> MetricRecord:
        its = [dict(each["metrics"]) for each in records]
        heard.append({each["client"]: each for each in its})
        return MetricRecord({})

    def after(task: int, arrays: ArrayRecord, kept: list[int]) -> None:
        assert task == len(tasks)
        tasks.append((arrays.to_torch_state_dict(), kept))

    strategy = flower.FedCBDR(BUDGET, fraction_evaluate=0.0, train_metrics_aggr_fn=hear)
    strategy.learn(grid, ArrayRecord(_net().state_dict()), TASKS, num_rounds=2, after=after)
    return {"heard": heard, "tasks": tasks}


def _check(seen: dict[str, Any]) -> None:
    (model, first), (_, second) = seen["tasks"]
    assert first == fed.quotas(BUDGET, [58, 60]) == KEPT
    assert second == KEPT
    before, after = seen["heard"][0], seen["heard"][-1]
    assert [before[0]["has-0"], before[0]["has-1"]] == [50, 6]
    found = [[after[client][f"has-{kind}"] for kind in TASKS[0]] for client in range(CLIENTS)]
    expected = [_expected(model, places) for places in permutations(range(CLIENTS))]
    assert found in expected  # the order of nodes is Flower's own
    assert after[0]["num-examples"] == sum(found[0])
    assert after[1]["num-examples"] == 60 + sum(found[1])


def _expected(arrays: dict[str, Tensor], places: tuple[int, ...]) -> list[list[int]]:
    """What each client keeps of each class of the first task, found with all samples at hand."""
    model = _net()
    model.load_state_dict(arrays)
    parts = [_has(client, 0) for client in range(CLIENTS)]
    rows = [features(model, x) for x, _ in parts]
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in rows]).sum(0), 2)
    keys = [
        sampling.keys(
            gram.leverage(each, whitening), torch.Generator().manual_seed(place), place, CLIENTS
        )
        for place, each in zip(places, rows, strict=True)
    ]
    labels = [y for _, y in parts]
    pooled, of = torch.cat(keys), torch.cat(labels)
    limits = [pooled[of == kind].sort().values[KEPT[kind] - 1] for kind in TASKS[0]]
    return [
        [int((key[y == kind] <= limits[kind]).sum()) for kind in TASKS[0]]
        for key, y in zip(keys, labels, strict=True)
    ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> _Here:
    """A grid without processes; a process of Flower's knows which task of a run it is."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    return _Here()


class _Here:
    """Hands messages to Flower's own ClientApp in this process, one client after the other."""

    def __init__(self) -> None:
        from flwr.app import Context, RecordDict

        self._app, self.silent = _client_app(), False
        self.contexts = {
            11 + client: Context(1, 11 + client, {"partition-id": client}, RecordDict(), {})
            for client in range(CLIENTS)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        to = [(each, each.metadata.dst_node_id) for each in messages]
        replies = [self._app(message, self.contexts[node]) for message, node in to]
        return replies[1:] if self.silent else replies[::-1]


def _choose(grid: Any, task: int = 0, budget: int = BUDGET) -> list[int]:
    from flwr.app import ArrayRecord

    from offbeat.federated import flower

    classes = TASKS[task] if task < len(TASKS) else (4, 5)
    arrays = ArrayRecord(_net().state_dict())
    return flower.FedCBDR(budget).choose(grid, arrays, task, classes)


def test_nodes_of_flower_keep_exactly_the_quotas_by_the_scores_of_the_pooled_features(
    here: _Here,
) -> None:
    _check(_served(here))


def test_a_node_of_flower_that_does_not_answer_ends_the_choice_and_it_can_be_made_again(
    here: _Here,
) -> None:
    here.silent = True
    with pytest.raises(RuntimeError, match="1 of 2 nodes answered while samples of task 0"):
        _choose(here)
    here.silent = False
    assert _choose(here) == KEPT
    assert _choose(here, task=1) == KEPT


def test_a_buffer_too_small_no_budget_and_no_nodes_are_refused(here: _Here) -> None:
    with pytest.raises(ValueError, match="a buffer of 1 samples cannot hold one of each of 2"):
        _choose(here, budget=1)
    with pytest.raises(ValueError, match="a buffer must hold 1 sample or more, got 0"):
        _choose(here, budget=0)
    here.contexts.clear()
    with pytest.raises(RuntimeError, match="no node is connected to choose samples of task 0"):
        _choose(here)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flowers_simulation_comes_to_the_same_and_tells_which_node_failed() -> None:
    pytest.importorskip("ray", reason="Flower's simulation needs ray: flwr[simulation]")
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, seen = ServerApp(), dict[str, Any]()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        seen.update(_served(grid))
        with pytest.raises(RuntimeError) as failed:
            _choose(grid, task=2)
        seen["error"] = str(failed.value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's and ray's own
        config: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, _client_app(), CLIENTS, backend_config=config)
    _check(seen)
    assert "failed while samples of task 2 were chosen" in seen["error"]
    assert "no such file" in seen["error"]
