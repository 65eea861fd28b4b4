"""Graphs without a worker that was lost: balanced, connected, and stable; or an error says so."""

from __future__ import annotations

import pytest
import torch
from crashes import Lives, Schedule

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import WorkerLostError
from offbeat.graph_of_some import among
from offbeat.graphs import graph_of, spec_of
from offbeat.merges import Mix

NAMES = ("ring", "mesh", "exponential", "one-peer", "star", "lazy-ring", "hypercube")
PAIRS = [[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]
PAIRS += [[[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]]
"""Three workers, of which 0 and 2 hear of each other through worker 1 alone, in turn."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lost", [(0,), (3,), (1, 6), (0, 1, 2, 3, 4)])
def test_without_some_workers_a_graph_keeps_the_mean_and_brings_the_others_together(
    name: str, lost: tuple[int, ...]
) -> None:
    ranks = [rank for rank in range(8) if rank not in lost]
    graph = among(graph_of(name, 8), ranks)
    for matrix in graph.matrices:
        assert matrix.min() >= 0
        for sums in (matrix.sum(0), matrix.sum(1)):
            assert (sums - 1).abs().max() < 1e-12
    assert graph.radius(Mix.recursion(0.0))[0] < 1 - 1e-3
    for number in range(len(graph.matrices)):
        for rank in ranks:
            heard = graph.received(rank, number)
            assert rank in heard
            assert set(heard) <= set(ranks)
            assert all(rank in graph.sent(other, number) for other in heard if other != rank)


def test_a_ring_closes_where_a_worker_is_missing() -> None:
    graph = among(graph_of("ring", 5), (0, 1, 3, 4))
    assert graph.received(1, 0) == pytest.approx({0: 1 / 3, 1: 1 / 2, 3: 1 / 6})
    assert graph.received(4, 7) == pytest.approx({0: 1 / 3, 3: 1 / 3, 4: 1 / 3})
    assert graph.sent(3, 0) == (1, 4)


def test_a_graph_that_falls_apart_is_named() -> None:
    with pytest.raises(ValueError, match=r"workers \[2\] never hear of worker 0"):
        among(graph_of(spec_of(PAIRS), 3), (0, 2))


def _crash(worker: int) -> Cluster:
    return Cluster.parse(
        "workers = 3\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 0.01\n"
        f"[[event]]\nkind = 'crash'\nworker = {worker}\nat_s = 2.5\n"
    )


def test_a_run_whose_graph_falls_apart_ends_with_a_sentence() -> None:
    words = r"without the workers \[1\], the graph is not connected"
    with pytest.raises(WorkerLostError, match=words):
        offbeat.run(Lives(offbeat.DPSGD(PAIRS), (5, 5, 5)), _crash(1))
    lives = Lives(offbeat.DPSGD(PAIRS), (5, 5, 5))
    assert lives.check(offbeat.run(lives, _crash(2)).results) == 1


def test_what_is_given_again_goes_by_the_matrix_of_the_round_that_takes_it() -> None:
    """Worker 3 was in round 0 when the others had made it; with one-peer, the next has others."""
    schedule = Schedule("dpsgd-one-peer", (2, 1, 2, 3), (1.0, 0.3, 0.45, 0.9))
    for event in range(120, 127):
        assert schedule.lived_through((event, 0)) == 1


@pytest.mark.parametrize("method", [offbeat.EDM, offbeat.MomentumTracking])
def test_what_balances_is_balanced_again_without_the_lost_worker(method: type) -> None:
    """Without gradients nothing may drift: the mean of the models stays where it is."""

    def train() -> list[float]:
        model, seen = torch.nn.Linear(1, 1, bias=False), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = method("lazy-ring", beta=0.5)
        with offbeat.attach(model, optimizer, algorithm, survive=True) as dp:
            for step in range(60):
                optimizer.zero_grad()
                pull = float(dp.rank) if step < 4 else 0.0  # unlike for a while, then nothing
                (pull * model.weight.sum()).backward()
                optimizer.step()
                seen.append(model.weight.item())
        return seen

    zero, one, two = offbeat.run(train, _crash(2)).results
    assert two is None
    means = [(a + b) / 2 for a, b in zip(zero, one, strict=True)]
    assert means[-1] == pytest.approx(means[-10], abs=1e-4)  # else it moves in every round
    assert zero[-1] == pytest.approx(one[-1], abs=1e-4)
