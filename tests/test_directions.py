"""DiLoCo(average="directions"), the RDA merge of Decoupled DiLoCo: by hand, and in virtual time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from crashes import Lives
from nets import same, train
from test_abs import resumes_bit_for_bit
from test_dasgd import cluster
from test_survival import lived_through, moments
from torch import nn

import offbeat
from offbeat.clusters import Cluster

Pair = tuple[float, float]


def Di(steps: int = 1, **settings: Any) -> offbeat.DiLoCo:  # noqa: N802 - as the class
    """Without an outer optimizer, unless it is asked for."""
    return offbeat.DiLoCo(
        steps, **{"average": "directions", "lr": 1.0, "momentum": 0.0, **settings}
    )


def _once(algorithm: offbeat.DiLoCo, moves: list[Pair], samples: list[float]) -> Pair:
    """Where all are after one step, by which each worker moves so."""

    def worker() -> list[float]:
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, opt, algorithm) as dp:
            dp.samples(samples[dp.rank])
            model.weight.grad = -torch.tensor([moves[dp.rank]]).double()
            opt.step()
        return model.weight.flatten().tolist()

    first, *others = offbeat.run(worker, Cluster.uniform(len(moves))).results
    assert all(other == first for other in others)
    return first[0], first[1]


@pytest.mark.parametrize(
    ("moves", "samples", "expected"),
    [
        ([(2.0, 0.0), (0.0, 2.0)], [1.0, 1.0], (1.414214, 1.414214)),
        ([(1.0, 0.0), (0.0, 2.0)], [3.0, 1.0], (1.185854, 0.395285)),
        ([(1.0, 0.0), (0.0, 0.0)], [1.0, 1.0], (0.5, 0.0)),
        ([(1.0, 0.0), (-3.0, 0.0)], [1.0, 1.0], (0.0, 0.0)),
        ([(0.3, -0.4)], [5.0], (0.3, -0.4)),
    ],
    ids=str,
)
def test_the_result_is_as_long_as_the_moves_whatever_their_directions(
    moves: list[Pair], samples: list[float], expected: Pair
) -> None:
    assert _once(Di(), moves, samples) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("average", "settles"), [("directions", (0.6958, 0.7512)), ("moves", (4 / 3, 1.0))]
)
def test_it_settles_at_the_geometric_median_and_the_mean_move_at_the_mean(
    average: str, settles: Pair
) -> None:
    """Optima (0, 0), (4, 0) and (0, 3), with a rate that decays."""

    def worker() -> list[float]:
        model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        optimum = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 3.0]]).double()[offbeat.rank()]
        with offbeat.attach(model, opt, Di(average=average)):
            for _ in range(150):
                opt.zero_grad()
                (0.5 * (model.weight - optimum).square()).sum().backward()
                opt.step()
                opt.param_groups[0]["lr"] *= 0.95
        return model.weight.flatten().tolist()

    for weight in offbeat.run(worker, Cluster.uniform(3)).results:
        assert weight == pytest.approx(settles, abs=0.01)


EVERY = [
    {"steps": 4},
    {"steps": 4, "overlap": 2, "lr": 0.7, "momentum": 0.5},
    {"steps": 4, "overlap": 1, "quorum": 2, "grace_s": 0.3},
    {"steps": 4, "fragments": 2, "overlap": 1},
]


@pytest.mark.parametrize("settings", EVERY, ids=str)
def test_replicas_are_identical_and_a_run_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    there = cluster(3, 0.1, (1.0, 0.9, 0.4))
    run = offbeat.run(lambda: train(12, Di(**settings), bucket_bytes=64), there)
    for trajectory, stats in run.results:
        assert same(trajectory[-1], run.results[0][0][-1])
        assert stats.pending_samples == 0
    resumes_bit_for_bit(Di(**settings), there, 10, bucket_bytes=64)


@pytest.mark.parametrize("settings", EVERY[:2], ids=str)
def test_a_loss_is_survived(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, random, lost = Di(**settings), Random(str(settings)), 0
    times = moments(Lives(algorithm), monkeypatch)
    for _ in range(8):
        lost += lived_through(Lives(algorithm), (random.randrange(3), random.choice(times)))
    assert lost > 3


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="average must be one of"):
        offbeat.DiLoCo(average="median")  # type: ignore[arg-type]

    def worker() -> None:
        model = nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        offbeat.attach(model, opt, Di(), codec=offbeat.Int8())

    with pytest.raises(ValueError, match="leave codec out"):
        offbeat.run(worker, Cluster.uniform(2))
