"""Federated clients, in virtual time and on real processes, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_federated import draw_of
from torch import Tensor, nn

import offbeat
from offbeat import federated as fed
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash
from offbeat.errors import NonFiniteGradientError, WorkerLostError
from offbeat.federated.features import features
from offbeat.lab import digits
from offbeat.testing import processes

CLIENTS = 3


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def learnt(
    method: Callable[[], fed.Method], tasks: int = 2, size: int = 240, **settings: Any
) -> tuple[fed.History, list[Tensor], fed.Method]:
    """Be a client: what came of it, its model and its method."""
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits.split()
    few = train_y < 4
    train_x, train_y = train_x[few][:size], train_y[few][:size]
    few = test_y < 4
    stream = fed.Stream.of(train_x, train_y, tasks=tasks, clients=CLIENTS, seed=1)
    model, mine = _net(), method()
    chosen = fed.Settings(**{"rounds": 3, "batch": 16, "lr": 0.1, **settings})
    history = fed.learn(model, stream, mine, chosen, (test_x[few], test_y[few]))
    return history, [each.detach() for each in model.parameters()], mine


def virtual(method: Callable[[], fed.Method], cluster: Any = "uniform-8", **more: Any) -> list[Any]:
    return offbeat.run(lambda: learnt(method, **more), cluster, workers=CLIENTS).results


def budget_30() -> fed.Method:
    return fed.FedCBDR(budget=30)


METHODS: dict[str, Callable[[], fed.Method]] = {
    "finetune": fed.Method,
    "ewc": fed.EWC,
    "lwf": fed.LwF,
    "importance": lambda: fed.Importance(budget=31),
    "uniform": lambda: fed.Uniform(budget=31),
    "joint": fed.Joint,
    "fedcbdr": lambda: fed.FedCBDR(budget=31),
    "svd": lambda: fed.FedCBDR(budget=31, scores="svd", balance="adjusted"),
}


@pytest.mark.parametrize("name", METHODS)
def test_all_clients_end_with_the_same_model_and_the_buffer_with_its_budget(name: str) -> None:
    results = virtual(METHODS[name])
    histories = [each[0] for each in results]
    assert all(
        torch.equal(a, b)
        for _, model, _ in results[1:]
        for a, b in zip(results[0][1], model, strict=True)
    )
    assert len(histories[0].seen_accuracy) == 2
    assert histories[1].accuracy == []
    kept = sum(histories[0].histograms[-1])
    assert kept == sum(len(each[2].buffer) for each in results)
    if name in ("uniform", "importance"):  # equal parts: a client with fewer samples keeps fewer
        assert 40 < kept <= 62
    else:
        assert kept == {"finetune": 0, "ewc": 0, "lwf": 0, "joint": 240}.get(name, 62)
    if name in ("fedcbdr", "svd"):
        assert histories[0].histograms[-1] == [16, 15, 16, 15]


def test_gram_and_svd_keep_the_same_samples() -> None:
    by_gram, by_svd, masked = (
        [
            each[2].buffer.after(torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64))[0]
            for each in virtual(lambda scores=scores: fed.FedCBDR(budget=31, scores=scores))
        ]
        for scores in ("gram", "svd", "svd-masked")
    )
    assert all(map(torch.equal, by_gram, by_svd))
    assert not all(map(torch.equal, by_svd, masked))


def test_replay_forgets_less_than_fine_tuning() -> None:
    few, none = (virtual(METHODS[name], rounds=4)[0][0] for name in ("fedcbdr", "finetune"))
    assert few.seen_accuracy[-1] > none.seen_accuracy[-1] + 0.2
    assert few.forgetting < none.forgetting


def test_one_round_of_averaging_is_the_weighted_mean_by_hand() -> None:
    sizes = (4, 8, 12)

    def client() -> Tensor:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        mine = sizes[offbeat.rank()]
        with offbeat.attach(model, optimizer, fed.FedAvg(steps=mine // 4, weight=mine)) as dp:
            for _ in dp.rounds(1):
                optimizer.zero_grad()
                (model.weight.sum() * (1 + offbeat.rank())).backward()
                optimizer.step()
        return model.weight.detach()

    results = offbeat.run(client, "uniform-8", workers=3).results
    ends = [1 - (1 + rank) * (mine // 4) for rank, mine in enumerate(sizes)]  # 0, -3, -8
    mean = sum(end * mine for end, mine in zip(ends, sizes, strict=True)) / sum(sizes)
    assert [each.item() for each in results] == pytest.approx([mean] * 3)


def test_a_quorum_does_not_wait_for_a_slow_client() -> None:
    waits, quorum = (
        virtual(budget_30, "two-slow-of-eight", quorum=each, rounds=6) for each in ("all", 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(quorum[0][1], quorum[2][1], strict=True))
    assert quorum[0][0].seconds[-1] < waits[0][0].seconds[-1]
    assert waits[0][0].histograms == quorum[0][0].histograms == [[15, 15], [15, 15, 15, 15]]


def test_a_fraction_of_the_clients_takes_part() -> None:
    results = virtual(budget_30, fraction=0.5)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[2][1], strict=True))
    assert results[0][0].histograms[-1] == [15, 15, 15, 15]


def _really() -> tuple[fed.History, list[Tensor]]:
    return learnt(budget_30)[:2]


@pytest.mark.real
def test_real_processes_learn_what_virtual_clients_do() -> None:
    real = [each.result for each in processes(_really, CLIENTS)]
    expected_of = virtual(budget_30)
    for (history, model), (expected, same, _) in zip(real, expected_of, strict=True):
        assert history.histograms == expected.histograms
        assert history.seen_accuracy == pytest.approx(expected.seen_accuracy, abs=0.02)
        for mine, other in zip(model, same, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


# --- what goes wrong -------------------------------------------------------------------------


def test_a_client_without_samples_of_a_class_or_of_a_task_takes_part() -> None:
    def client() -> Any:
        x, y = torch.randn(60, 64, generator=draw_of()), torch.arange(60) % 4
        first = y < 2
        parts = tuple(
            (here[:20], here[20:], here[:0])
            for here in (first.nonzero().flatten(), (~first).nonzero().flatten())
        )
        stream = fed.Stream(x, y, ((0, 1), (2, 3)), parts)
        model, method = _net(), fed.FedCBDR(budget=6)
        return fed.learn(model, stream, method, fed.Settings(rounds=2), (x, y)).histograms

    for quorum_of_all in offbeat.run(client, "uniform-8", workers=3).results:
        assert quorum_of_all == [[3, 3], [3, 3, 3, 3]]


def test_bad_input_is_named() -> None:
    y = torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="beta of a Dirichlet split"):
        fed.dirichlet(y, 2, 0.0)
    with pytest.raises(ValueError, match="cannot give 1 to each of 5 clients"):
        fed.dirichlet(y, 5, 1.0)
    with pytest.raises(ValueError, match="leave some of the 2"):
        fed.per_class(y, 1, 1)
    with pytest.raises(ValueError, match="tasks must be between 1 and the 2 classes"):
        fed.class_groups(y, 3)
    with pytest.raises(ValueError, match="no sample has the label 7"):
        fed.Stream.of(y, y, tasks=2, clients=2, classes=((0, 1), (7,)))
    with pytest.raises(ValueError, match="buffer of 2 samples cannot hold one of each of 3"):
        fed.quotas(2, [5, 5, 5])
    with pytest.raises(ValueError, match='goes with quorum="all"'):
        fed.Settings(fraction=0.5, quorum=2)
    with pytest.raises(ValueError, match="1 of 2 samples of client 4"):
        features(_net(), torch.tensor([[float("nan")] * 64, [0.0] * 64]), client=4)
    with pytest.raises(ValueError, match="there are 2 workers"):
        offbeat.run(lambda: learnt(fed.Method), "uniform-8", workers=2)


def _of_parts(parts: Any, x: Tensor, budget: int = 6) -> Any:
    """Three clients that have these samples of two tasks."""
    y = torch.arange(60) % 4

    def client() -> Any:
        stream = fed.Stream(x, y, ((0, 1), (2, 3)), parts)
        method = fed.FedCBDR(budget=budget)
        return fed.learn(_net(), stream, method, fed.Settings(rounds=1), (x, y)).histograms

    return offbeat.run(client, "uniform-8", workers=3).results


def test_a_task_without_data_a_small_buffer_and_samples_without_number_end_the_run() -> None:
    x, some = torch.randn(60, 64, generator=draw_of()), torch.arange(60)
    first, second = some[some % 4 < 2], some[some % 4 > 1]
    parts = ((first[:10], first[10:20], first[20:]), (second[:10], second[10:20], second[20:]))
    assert _of_parts(parts, x)[0] == [[3, 3], [3, 3, 3, 3]]
    with pytest.raises(ValueError, match="task 1 has no data on any client: leave it out"):
        _of_parts((parts[0], (some[:0],) * 3), x)
    with pytest.raises(ValueError, match="set the budget to 2 or more"):
        _of_parts(parts, x, budget=1)
    x[parts[0][1][3]] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="on worker 1 is NaN or infinite in round 0"):
        _of_parts(parts, x)


@pytest.mark.parametrize("secure", [False, True])
def test_a_client_that_is_lost_between_tasks_is_left_out(secure: bool) -> None:
    """It has given its part of the scores, and is gone when samples are chosen."""
    if secure:
        pytest.importorskip("cryptography", reason="secure sums need the package cryptography")
    cluster = Cluster.load("uniform-8").resized(CLIENTS)
    asked: list[float] = []

    class Slow(fed.FedCBDR):
        """Notes when scores are summed up."""

        def _leverage(self, *arguments: Any) -> Tensor:
            scores = super()._leverage(*arguments)
            world = self.client.world
            asked.append(world.now())
            world.sleep_until(world.now() + 10.0)  # time for the crash, between score and draw
            return scores

    def method() -> fed.Method:
        return Slow(budget=30)

    def results(*crashes: Crash) -> list[Any]:
        asked.clear()
        where = cluster.model_copy(update={"events": crashes})
        return offbeat.run(lambda: learnt(method, survive=True, secure=secure), where).results

    results()
    moment = min(asked) + 5.0
    survivors = results(Crash(kind="crash", worker=2, at_s=moment))
    assert survivors[2] is None
    assert len(asked) == 3 + 2 + 2  # the first task's were made twice
    for history, _, _ in survivors[:2]:  # of the last class the two have 12 samples in all
        assert history.histograms[-1] == [15, 15, 18, 12]
    with pytest.raises(WorkerLostError):
        lost = Crash(kind="crash", worker=2, at_s=moment)
        where = cluster.model_copy(update={"events": (lost,)})
        offbeat.run(lambda: learnt(method), where)
