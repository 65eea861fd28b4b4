"""Rounds among neighbours: who waits for whom, who is absent, and how all end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd, train
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.testing import processes

METHODS: dict[str, Callable[[], offbeat.Algorithm]] = {
    "dpsgd": lambda: offbeat.DPSGD("one-peer"),
    "dmsgd": lambda: offbeat.DmSGD(),
    "decentlam": lambda: offbeat.DecentLaM(),
    "edm": lambda: offbeat.EDM(),
    "tracking": lambda: offbeat.MomentumTracking(),
}
every_method = pytest.mark.parametrize("name", METHODS)


def test_a_stall_is_noticed_one_hop_a_round() -> None:
    """Worker 0 of a ring of eight stalls once: k hops away, round 3 + k is the first to wait."""

    def worker() -> list[float]:
        model = net()
        optimizer = sgd(model)
        ends = []
        with offbeat.attach(model, optimizer, offbeat.DmSGD("ring")) as dp:
            for step in range(12):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                if dp.rank == 0 and step == 4:
                    dp._world.sleep_until(dp.seconds + 100.0)
                optimizer.step()
                ends.append(dp.seconds)
        return ends

    results = offbeat.run(worker, Cluster.uniform(8)).results
    for rank, ends in enumerate(results):
        hops = min(rank, 8 - rank)
        first = next(number for number, at_s in enumerate(ends) if at_s > 50)
        assert first == max(4, 3 + hops), f"worker {rank}"


@every_method
def test_who_is_away_holds_up_nobody(name: str) -> None:
    def worker() -> tuple[float, list[Tensor], int]:
        model = net()
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer, METHODS[name]()) as dp:
            for step in range(6):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
                if dp.rank == 2 and step == 1:
                    with dp.away():
                        before = parameters(model)
                        dp._world.sleep_until(dp.seconds + 50.0)
                        assert same(before, parameters(model)), "the program's own meanwhile"
            left_s = dp.seconds
        return left_s, parameters(model), dp.round

    results = offbeat.run(worker, Cluster.uniform(5)).results
    assert all(left_s < 10 for rank, (left_s, _, _) in enumerate(results) if rank != 2)
    assert len({rounds for _, _, rounds in results}) == 1
    assert all(same(model, results[0][1]) for _, model, _ in results)


@every_method
def test_the_agreed_model_is_the_mean_of_all(name: str) -> None:
    def worker() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = net()
        optimizer = sgd(model)
        agreed: list[Tensor] = []
        with offbeat.attach(model, optimizer, METHODS[name]()) as dp:
            for step in range(4):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
            own = parameters(model)
            dp._world.sleep_until(1000.0)  # all have made four rounds
            if dp.rank == 1:
                with dp.agreed():
                    agreed = parameters(model)
                assert same(own, parameters(model))
        return own, agreed, parameters(model)

    results = offbeat.run(worker, Cluster.uniform(4)).results
    mean = [torch.stack(each).mean(0) for each in zip(*(own for own, _, _ in results), strict=True)]
    assert not same(results[0][0], results[1][0])
    for found in (results[1][1], results[0][2], results[3][2]):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, mean, strict=True))


@pytest.mark.parametrize("graph", ["ring", "one-peer", "star"])
def test_all_end_with_the_same_round_when_one_asks(graph: str) -> None:
    def worker() -> tuple[int, int]:
        model = net()
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer, offbeat.DPSGD(graph)) as dp:
            for step in dp.until(rounds=1000):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                if dp.rank == 3 and step == 5:
                    dp.stop()
                optimizer.step()
            ended_with = dp.round
        assert dp.ticks == dp.round
        return ended_with, dp.round

    results = offbeat.run(worker, "two-slow-of-eight").results
    assert len(set(results)) == 1
    assert results[0][0] == results[0][1] <= 5 + 4


def test_until_so_many_samples_all_end_together() -> None:
    def worker() -> int:
        model = net()
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer, offbeat.DPSGD("star")) as dp:
            for step in dp.until(samples=64):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
        return dp.round

    assert offbeat.run(worker, Cluster.uniform(8)).results == [8 + 2] * 8  # and to tell it


@every_method
def test_a_checkpoint_resumes_bit_by_bit(name: str) -> None:
    def worker(stops: bool) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        saved: list[Any] = []
        with offbeat.attach(model, optimizer, METHODS[name]()) as dp:
            for step in range(6):
                if step == 3:
                    saved = [dp.state_dict(), model.state_dict(), optimizer.state_dict()]
                    if stops:
                        saved = [_copied(each) for each in saved]
                        break
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
        if not stops:
            return parameters(model)
        model = net(seed=9)
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer, METHODS[name]()) as dp:
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
            dp.load_state_dict(saved[0])
            for step in range(3, 6):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
        return parameters(model)

    through, resumed = (
        offbeat.run(lambda stops=stops: worker(stops), "two-slow-of-eight", workers=5).results
        for stops in (False, True)
    )
    assert all(same(a, b) for a, b in zip(through, resumed, strict=True))


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    if isinstance(state, list):
        return [_copied(value) for value in state]
    return state.detach().clone() if isinstance(state, Tensor) else state


@every_method
def test_a_bad_gradient_is_left_out_and_seen_by_nobody_else(name: str) -> None:
    def worker() -> tuple[int, float, bool]:
        model = net()
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer, METHODS[name](), nonfinite="skip") as dp:
            for step in range(4):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                if dp.rank == 1 and step == 1:
                    next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
                optimizer.step()
        finite = all(bool(each.isfinite().all()) for each in model.parameters())
        return dp.stats().skipped_rounds, dp.stats().dropped_samples, finite

    assert offbeat.run(worker, Cluster.uniform(3)).results == [
        (int(rank == 1), float(rank == 1), True) for rank in range(3)
    ]


def test_running_statistics_are_mixed_with_the_models() -> None:
    def worker() -> float:
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, offbeat.DecentLaM("complete")) as dp:
            for _ in range(30):
                optimizer.zero_grad()
                model(torch.randn(64, 1) + 10 * dp.rank).sum().backward()
                optimizer.step()
            statistics = model[0].running_mean
            assert isinstance(statistics, Tensor)
            return float(statistics)

    results = offbeat.run(worker, Cluster.uniform(3)).results
    assert results == pytest.approx([10.0] * 3, abs=1.5)


@pytest.mark.real
@every_method
def test_four_processes_on_a_graph_with_a_straggler_and_unequal_data(name: str) -> None:
    ended = [each.result for each in processes(_uneven, 4, name)]
    for trajectory, stats in ended:
        assert same(trajectory[-1], ended[0][0][-1])
        assert stats.replicas_identical
        assert stats.pending_samples == 0


def _uneven(name: str) -> Any:
    return train(
        steps=lambda rank: (9, 4, 0, 6)[rank],
        algorithm=METHODS[name](),
        bucket_bytes=64,
        pace=Cluster.load("two-slow-of-eight").resized(4),
    )
