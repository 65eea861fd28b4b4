"""What a user may do wrong, or a cluster may make of it: every algorithm says so, or copes.

A step without a backward, a round without any data, samples that are none, batches of different
sizes. Settings that cannot be meant are in each algorithm's own test file.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any, Literal, get_origin, get_type_hints

import pytest
import torch
from nets import close, loss, net, parameters, plain, same, sgd, train
from test_contract import ALGORITHMS, BUCKETS

import offbeat
from offbeat.clusters import Cluster
from offbeat.decentralised import Decentralised

UNEVEN = Cluster.parse(
    "workers = 3\nspeed = [1.0, 0.8, 0.3]\n[compute]\nstep_s = 0.1\n[network]\nlatency_s = 1e-3"
)
FIRST = ("sync", "eager-solo", "msync", "abs-ready", "nonblocking-finish-reset", "dropcompute")

WITHOUT_BASE = [
    name
    for name, contract in ALGORITHMS.items()
    if isinstance(contract.make(4), Decentralised | offbeat.WAGMASGD)
]
"""Where every worker's model counts the same, whatever its batches are."""


def _algorithms(*without: str) -> pytest.MarkDecorator:
    """One of each family in the fast tests; all in the full ones."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in (*FIRST, "lbbsp", "local") else pytest.mark.slow)
            for name in ALGORITHMS
            if name not in without
        ],
    )


every_algorithm = _algorithms()


def _train(name: str, brings: Callable[[int, int], bool], steps: int = 8) -> list[Any]:
    """By rank: parameters before and after, stats, and whether nothing got lost at any moment."""

    def worker() -> Any:
        rank = offbeat.rank()
        model = net()
        opt = sgd(model)
        start, conserved = parameters(model), True
        with offbeat.attach(model, opt, ALGORITHMS[name].make(3), bucket_bytes=BUCKETS) as dp:
            for step in range(steps):
                opt.zero_grad()
                if brings(rank, step):
                    dp.samples(1 + rank)
                    loss(model, rank, step).backward()
                opt.step()
                now = dp.stats()
                conserved &= now.pending_samples >= 0
        return start, parameters(model), dp.stats(), conserved

    results: list[Any] = offbeat.run(worker, UNEVEN).results
    return results


@every_algorithm
@pytest.mark.parametrize("without", [0, 2])
def test_a_step_without_a_backward_brings_nothing(name: str, without: int) -> None:
    results = _train(name, lambda rank, step: rank != without or step % 3 == 1)
    for rank, (start, end, stats, conserved) in enumerate(results):
        assert stats.steps == 8
        assert stats.computed_samples == (1 + rank) * (8 if rank != without else 3)
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples
        assert conserved
        assert same(end, results[0][1])
        assert not same(start, end)


@pytest.mark.slow
@every_algorithm
def test_a_worker_that_never_has_data_holds_nobody_up(name: str) -> None:
    results = _train(name, lambda rank, step: rank != 1)
    assert results[1][2].computed_samples == 0
    assert results[1][2].applied_samples == 0
    assert results[0][2].rounds > 0
    for _, end, stats, _ in results:
        assert stats.pending_samples == 0
        assert same(end, results[0][1])


@every_algorithm
def test_where_nobody_has_data_nothing_is_applied_and_nobody_hangs(name: str) -> None:
    for start, end, stats, _ in _train(name, lambda rank, step: False):
        if name in WITHOUT_BASE:  # models are averaged all the same: three equal ones, rounded
            assert close(start, end)
        else:
            assert same(start, end)
            assert stats.rounds == 0
        assert stats.computed_samples == stats.applied_samples == 0
        assert stats.steps == 8


@pytest.mark.slow
@every_algorithm
def test_rounds_without_data_do_not_disturb_those_after_them(name: str) -> None:
    results = _train(name, lambda rank, step: step >= 4, steps=12)
    for rank, (start, end, stats, _) in enumerate(results):
        assert stats.computed_samples == (1 + rank) * 8
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples
        assert same(end, results[0][1])
        assert not same(start, end)


@pytest.mark.parametrize(
    ("algorithm", "samples"),
    [
        (offbeat.DropCompute(3, threshold_s=100.0), 6),
        (offbeat.NonblockingSGD(3), 6),
        (offbeat.NonblockingSGD(3, in_flight="bank"), 6),
        (offbeat.LBBSP(3), 6),
    ],
)
def test_after_a_round_without_data_batches_are_as_long_as_before(
    algorithm: offbeat.Algorithm, samples: int
) -> None:
    def worker() -> offbeat.Stats:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(9):
                opt.zero_grad()
                if step >= 3:
                    loss(model, offbeat.rank(), step).backward()
                opt.step()
        return dp.stats()

    cluster = Cluster.parse("workers = 2\n[compute]\nstep_s = 1.0")
    for stats in offbeat.run(worker, cluster).results:
        assert [round.samples for round in stats.history] == [samples] * 2


@pytest.mark.parametrize("samples", [0, -1, -0.5, nan, inf, "4", None])
def test_a_number_of_samples_that_is_none_is_refused_before_anything_is_stored(
    samples: Any,
) -> None:
    def worker() -> offbeat.Stats:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.ABSSGD()) as dp:
            for step in range(3):
                opt.zero_grad()
                with pytest.raises(ValueError, match="samples must be a number above 0, got"):
                    dp.samples(samples)
                dp.samples(4)
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return dp.stats()

    for stats in offbeat.run(worker, Cluster.uniform(2)).results:
        assert stats.applied_samples == 12


@_algorithms(
    *("eager-workers", "waitfree-workers", *WITHOUT_BASE),
    *(name for name, contract in ALGORITHMS.items() if contract.delayed or contract.alone),
)
def test_a_mean_loss_over_batches_of_different_sizes_is_weighed_by_samples(name: str) -> None:
    sizes = (6, 1)
    algorithm = ALGORITHMS[name].synchronous(2)
    run = offbeat.run(
        lambda: train(4, algorithm, size=lambda rank: sizes[rank]), Cluster.uniform(2)
    )
    expected = plain(2, 4, size=lambda rank: sizes[rank])
    for trajectory, _ in run.results:
        assert close(trajectory[-1], expected[-1])


def test_a_mean_where_adaptive_batches_differ_is_over_all_samples() -> None:
    """Micro-batches of 1 to 4 samples, as many of them as each worker's speed allows."""

    def worker() -> Any:
        rank = offbeat.rank()
        model = net()
        start = parameters(model)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        used = []
        with offbeat.attach(model, opt, offbeat.ABSSGD("finish", patience=inf)) as dp:
            step = 0
            while not dp.round:
                used.append(step)
                opt.zero_grad()
                dp.samples(1 + step % 4)
                loss(model, rank, step, size=1 + step % 4).backward()
                opt.step()
                step += 1
            after = parameters(model)
        return used, [before - now for before, now in zip(start, after, strict=True)]

    results = offbeat.run(worker, UNEVEN).results
    assert len({len(used) for used, _ in results}) > 1
    each = [(rank, step) for rank, (used, _) in enumerate(results) for step in used]
    total = sum(1 + step % 4 for _, step in each)
    model = net()
    for rank, step in each:
        size = 1 + step % 4
        (loss(model, rank, step, size=size) * size / total).backward()
    for mine, parameter in zip(results[0][1], model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-6)


def test_looking_for_wrappers_costs_nothing_where_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass over all objects for every worker would make large virtual clusters slow."""

    def refuses(*_: object) -> list[object]:
        raise AssertionError("a pass over all objects")

    monkeypatch.setattr("gc.get_referrers", refuses)
    train(1)
    offbeat.run(lambda: train(1), Cluster.uniform(2))


CHOICES = [
    (kind, name)
    for kind in vars(offbeat.algorithms).values()
    if isinstance(kind, type) and issubclass(kind, offbeat.Algorithm)
    for name, declared in get_type_hints(kind).items()
    if get_origin(declared) is Literal
]


@pytest.mark.parametrize(("kind", "name"), CHOICES)
def test_a_setting_that_is_none_of_the_known_ones_is_refused_alike(
    kind: type[offbeat.Algorithm], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be one of .*, got 'another'"):
        kind(**{name: "another"})


def test_every_algorithm_with_such_settings_is_among_them() -> None:
    assert {kind.__name__ for kind, _ in CHOICES} >= {"EagerSGD", "ABSSGD", "DropCompute"}
