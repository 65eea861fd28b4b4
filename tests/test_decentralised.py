"""The methods that mix models among neighbours, in the library's own worlds, against formulas.

Worker i has the quadratic a_i (x - c_i)^2 / 2, and its gradient without noise; or noise alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.graphs import graph_of, spec_of

Gradient = Callable[[int, Tensor], Tensor]


def _models(
    algorithm: offbeat.Algorithm,
    gradient: Gradient,
    workers: int,
    steps: int,
    lr: float | Callable[[int], float],
    momentum: float = 0.0,
    start: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """By step and worker: the models; and in the end the one that all have."""

    def worker() -> tuple[Tensor, Tensor]:
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64) if start is None else start.clone())
        model = nn.ParameterList([x])
        optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum)
        seen = []
        with offbeat.attach(model, optimizer, algorithm):
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = lr if isinstance(lr, float) else lr(step)
                x.grad = gradient(offbeat.rank(), x.detach())
                optimizer.step()
                seen.append(x.detach().clone())
        return torch.stack(seen), x.detach().clone()

    results = offbeat.run(worker, Cluster.uniform(workers)).results
    for _, end in results:
        assert torch.equal(end, results[0][1])
    return torch.stack([seen for seen, _ in results], dim=1), results[0][1]


CURVATURES = torch.tensor([0.5, 1.0, 1.5, 0.7, 1.2, 0.9, 1.1, 0.6], dtype=torch.float64)
CENTRES = torch.tensor([3.0, -1.0, 2.0, 0.0, -4.0, 1.0, 5.0, -2.0], dtype=torch.float64)
MINIMUM = float((CURVATURES * CENTRES).sum() / CURVATURES.sum())


def _quadratic(rank: int, x: Tensor) -> Tensor:
    return CURVATURES[rank] * (x - CENTRES[rank])


def _dgd(graph: Any, lr: float) -> Tensor:
    """The fixed point of x = W (x - lr g(x)), solved for."""
    [matrix] = graph_of(spec_of(graph), 8).matrices
    left = torch.eye(8, dtype=torch.float64) - matrix @ torch.diag(1 - lr * CURVATURES)
    return torch.linalg.solve(left, matrix @ (lr * CURVATURES * CENTRES))


# --- the methods, written down once more ------------------------------------------------------


def _reference(name: str, graph: Any, lr: float, beta: float, rounds: int) -> Tensor:
    """By round and worker: what the papers say, on all workers at once."""
    matrices = graph_of(spec_of(graph), 8).matrices
    x = torch.zeros(8, dtype=torch.float64)
    m, c, before, psi, seen = x, x, x, x, []
    for number in range(rounds):
        w, g = matrices[number % len(matrices)], CURVATURES * (x - CENTRES)
        m = beta * m + g
        if name == "DPSGD":
            x = w @ (x - lr * g)
        elif name == "DmSGD":
            x = w @ (x - lr * m)
        elif name == "DecentLaM":
            x, before = w @ (x - lr * g) + beta * (x - before), x
        elif name == "EDM":
            psi, x = x - lr * m, w @ (x - lr * m + x - psi)
        else:
            x, c = w @ (x - lr * (m - c)), w @ (c - m) + m
        seen.append(x)
    return torch.stack(seen)


PAIRS = [
    ("DPSGD", "star"),
    ("DPSGD", "one-peer"),
    ("DmSGD", "exponential"),
    ("DecentLaM", "ring"),
    ("DecentLaM", "mesh"),
    ("EDM", "lazy-ring"),
    ("EDM", "lazy-one-peer"),
    ("MomentumTracking", "ring"),
    ("MomentumTracking", "one-peer"),
    ("MomentumTracking", "exponential"),
]


def _of(name: str, graph: Any, beta: float = 0.9) -> offbeat.Algorithm:
    settings = {} if name in ("DPSGD", "DmSGD") else {"beta": beta}
    method: offbeat.Algorithm = getattr(offbeat, name)(graph, **settings)
    return method


@pytest.mark.parametrize(("name", "graph"), PAIRS)
def test_every_round_is_what_the_paper_says(name: str, graph: str) -> None:
    momentum = 0.9 if name == "DmSGD" else 0.0
    seen, end = _models(_of(name, graph), _quadratic, 8, 25, lr=0.02, momentum=momentum)
    expected = _reference(name, graph, 0.02, 0.9, 25)
    assert (seen[:, :, 0] - expected).abs().max() < 1e-12
    assert abs(end.item() - expected[-1].mean()) < 1e-12


# --- fixed points -----------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("graph", ["ring", "mesh", "star"])
def test_the_fixed_point_of_decentlam_is_that_of_dgd_whatever_the_momentum(
    graph: str, beta: float
) -> None:
    last = _reference("DecentLaM", graph, 0.05, beta, 2000)[-1]
    assert (last - _dgd(graph, 0.05)).abs().max() < 1e-12


def test_the_fixed_point_of_dmsgd_is_that_of_dgd_with_a_larger_step() -> None:
    last = _reference("DmSGD", "ring", 0.05, 0.9, 2000)[-1]
    assert (last - _dgd("ring", 0.05 / (1 - 0.9))).abs().max() < 1e-12
    bias = [(_dgd("ring", lr) - MINIMUM).abs().max() for lr in (0.05, 0.5)]
    assert bias[1] > 2 * bias[0]


def test_the_fixed_point_is_reached_over_real_rounds() -> None:
    seen, _ = _models(offbeat.DecentLaM("ring"), _quadratic, 8, 300, lr=0.05)
    assert (seen[-1, :, 0] - _dgd("ring", 0.05)).abs().max() < 1e-5
    assert (seen[-1, :, 0] - MINIMUM).abs().max() > 0.1


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "graph"),
    [
        *(("EDM", graph) for graph in ("lazy-ring", "lazy-one-peer", "lazy-mesh")),
        *(("MomentumTracking", graph) for graph in ("ring", "lazy-ring", "exponential")),
        *(("MomentumTracking", graph) for graph in ("one-peer", "lazy-one-peer", "star")),
    ],
)
def test_without_a_bias_all_workers_come_to_the_minimum(name: str, graph: str, beta: float) -> None:
    last = _reference(name, graph, 0.1 * (1 - beta), beta, 2000)[-1]
    assert (last - MINIMUM).abs().max() < 1e-8


@pytest.mark.parametrize("graph", ["ring", "exponential", "one-peer"])
def test_dpsgd_has_a_bias_where_workers_are_unlike(graph: str) -> None:
    last = _reference("DPSGD", graph, 0.1, 0.0, 2000)[-1]
    assert (last - MINIMUM).abs().max() > 0.1


# --- by hand ----------------------------------------------------------------------------------


def test_three_rounds_of_edm_by_hand() -> None:
    method = offbeat.EDM([[0.75, 0.25], [0.25, 0.75]], beta=0.5)
    seen, _ = _models(method, lambda rank, x: x - (1, -1)[rank], 2, 3, lr=0.25)
    assert seen[:, 0, 0].tolist() == [0.125, 0.171875, 0.126953125]
    assert seen[:, 1, 0].tolist() == [-0.125, -0.171875, -0.126953125]


def test_three_rounds_of_decentlam_by_hand() -> None:
    """g = (-1, 1), always: x_1 = W (x - lr g) + beta (x - the x before)."""
    method = offbeat.DecentLaM([[0.75, 0.25], [0.25, 0.75]], beta=0.5)
    seen, _ = _models(method, lambda rank, x: x * 0 + (-1, 1)[rank], 2, 3, lr=0.5)
    assert seen[:, 0, 0].tolist() == [0.25, 0.5, 0.625]


def test_momentum_tracking_keeps_the_sum_of_what_it_tracks_at_zero() -> None:
    def worker() -> list[float]:
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer, seen = torch.optim.SGD([x], lr=0.02), []
        with offbeat.attach(nn.ParameterList([x]), optimizer, offbeat.MomentumTracking()) as dp:
            for _ in range(20 - offbeat.rank()):  # also when some have left
                x.grad = _quadratic(offbeat.rank(), x.detach())
                optimizer.step()
                seen.append(float(dp._replica.shift._kept["c"][0]))  # type: ignore[union-attr]
        return seen

    results = offbeat.run(worker, Cluster.uniform(8)).results
    for step in range(13):
        tracked = [seen[step] for seen in results]
        assert sum(tracked) == pytest.approx(0.0, abs=1e-12)
        assert max(tracked) > 0.1


@pytest.mark.parametrize("name", ["DmSGD", "DecentLaM", "EDM", "MomentumTracking"])
def test_on_a_complete_graph_it_is_momentum_sgd_also_under_a_schedule(name: str) -> None:
    rates = (0.0, 0.01, 0.05, 0.1, 0.1, 0.03, 0.01)
    method = getattr(offbeat, name)("complete")
    seen, _ = _models(method, _quadratic, 8, 7, lr=lambda step: rates[step], momentum=0.9)
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        x.grad = sum(_quadratic(rank, x.detach()) for rank in range(8)) / 8
        if rate or name == "DmSGD":  # the others learn nothing from a step of length 0
            optimizer.step()
        assert (seen[step, :, 0] - x.detach()).abs().max() < 1e-12


# --- noise ------------------------------------------------------------------------------------


def _noise(method: str, eigenvalue: float, beta: float) -> float:
    """Of a disagreement, per unit of gradient noise and squared learning rate."""
    a, b = eigenvalue, beta
    if method == "DPSGD":
        return a**2 / (1 - a**2)
    if method == "DecentLaM":
        return a**2 * (1 + b) / ((1 - b) * ((1 + b) ** 2 - (a + b) ** 2))
    return a**2 * (1 + a * b) / ((1 - a * b) * (1 - a**2) * (1 - b**2))


@pytest.mark.parametrize(
    ("name", "factor"), [("DPSGD", 4.26), ("DecentLaM", 41.6), ("DmSGD", 213.7)]
)
def test_gradient_noise_becomes_disagreement_as_the_formulas_say(name: str, factor: float) -> None:
    assert _noise(name, 0.9, 0.9) == pytest.approx(factor, rel=2e-3)
    method = getattr(offbeat, name)([[0.95, 0.05], [0.05, 0.95]])
    momentum = 0.0 if name == "DPSGD" else 0.9
    seen, _ = _models(
        method,
        lambda rank, x: torch.randn(len(x), dtype=torch.float64),
        *(2, 150),
        lr=1.0,
        momentum=momentum,
        start=torch.zeros(10_000, dtype=torch.float64),
    )
    apart = (seen[-1, 0] - seen[-1, 1]) / 2**0.5
    assert float(apart.var()) == pytest.approx(factor, rel=0.06)


# --- what the optimizer's momentum is ---------------------------------------------------------


def _attach(algorithm: offbeat.Algorithm, **settings: Any) -> None:
    model = net()
    offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, **settings), algorithm)


def test_a_momentum_beside_the_methods_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"momentum is 0.5, and DecentLaM's is 0.9.*beta=0.5\)"):
        _attach(offbeat.DecentLaM(), momentum=0.5)
    with pytest.raises(ValueError, match="nesterov=True, but the momentum is EDM's"):
        _attach(offbeat.EDM(), momentum=0.9, nesterov=True)
    with pytest.raises(ValueError, match=r"SGD has none: give it momentum=0\.9, or take DPSGD"):
        _attach(offbeat.DmSGD())


def test_a_scheduler_that_cycles_the_momentum_is_told_how_not_to() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(ValueError, match=r"0\.95, and EDM's is 0\.9.*cycle_momentum=False"):
        offbeat.attach(model, optimizer, offbeat.EDM())


def test_the_optimizers_momentum_is_put_aside_and_found_again() -> None:
    def worker() -> tuple[float, bool]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with offbeat.attach(model, optimizer, offbeat.DecentLaM()) as dp:
            for step in range(3):
                loss(model, dp.rank, step).backward()
                optimizer.step()
        return optimizer.param_groups[0]["momentum"], bool(optimizer.state)

    assert offbeat.run(worker, Cluster.uniform(3)).results == [(0.9, False)] * 3


@pytest.mark.filterwarnings("ignore:Adam:offbeat.errors.PortingWarning")
@pytest.mark.parametrize("name", ["DPSGD", "DmSGD", "DecentLaM", "EDM", "MomentumTracking"])
def test_any_optimizer_makes_the_step(name: str) -> None:
    def worker() -> list[Tensor]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with offbeat.attach(model, optimizer, getattr(offbeat, name)(), bucket_bytes=64) as dp:
            for step in range(6 - dp.rank):
                optimizer.zero_grad()
                loss(model, dp.rank, step).backward()
                optimizer.step()
        return parameters(model)

    results = offbeat.run(worker, "two-slow-of-eight", workers=4).results
    assert all(same(each, results[0]) for each in results)
    assert all(each.isfinite().all() for each in results[0])
