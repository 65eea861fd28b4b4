"""The baselines LB-BSP and local SGD over an optimizer, in virtual time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from nets import close, loss, net, parameters, plain, same, sgd, train
from test_abs import quadratic, resumes_bit_for_bit

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import NonFiniteGradientError
from offbeat.records import Line
from offbeat.shares import shares

LB, Local = offbeat.LBBSP, offbeat.LocalSGD
TWO_SPEEDS = Cluster.parse(
    """
    workers = 4
    speed = [1.0, 1.0, 0.5, 0.5]
    [compute]
    step_s = 1.0
    [network]
    latency_s = 1e-3
    """
)


# --- LB-BSP --------------------------------------------------------------------------------


def test_shares_are_in_proportion_to_speed_and_nobody_has_none() -> None:
    assert shares(12, [2.0, 2.0, 1.0, 1.0]) == [4, 4, 2, 2]
    assert shares(7, [1.0, 1.0, 1.0], slack=0) == [3, 2, 2]
    assert shares(3, [1000.0, 1.0, 1.0], slack=0) == [1, 1, 1]
    for speeds in ([3.0, 1.0, 0.7], [1e-9, 1.0, 1e9], [1.0] * 3):
        for total in range(3, 40):
            parts = shares(total, speeds, slack=0)
            assert sum(parts) == total
            assert min(parts) >= 1
            assert sorted(parts) == [part for _, part in sorted(zip(speeds, parts, strict=True))]
            assert abs(sum(shares(total, speeds)) - total) <= total / 4


def _per_second(parts: list[int], speeds: list[float]) -> float:
    return sum(parts) / max(part / speed for part, speed in zip(parts, speeds, strict=True))


def _as_in_0_1(total: int, speeds: list[float]) -> list[int]:
    """In proportion, rounded down; what is left to the neediest."""
    exact = [total * speed / sum(speeds) for speed in speeds]
    parts = [max(int(share), 1) for share in exact]
    while sum(parts) < total:
        parts[max(range(len(parts)), key=lambda n: exact[n] - parts[n])] += 1
    while sum(parts) > total and max(parts) > 1:
        rich = [n for n in range(len(parts)) if parts[n] > 1]
        parts[max(rich, key=lambda n: parts[n] - exact[n])] -= 1
    return parts


def test_whole_micro_batches_fit_the_speeds_as_well_as_they_can() -> None:
    speeds = [2.0, 2.0, 1.0, 1.0]
    assert shares(8, speeds) == [2, 2, 1, 1]
    assert _per_second(_as_in_0_1(8, speeds), speeds) < 0.9 * sum(speeds)
    assert _per_second(shares(8, speeds), speeds) >= 0.98 * sum(speeds)


def test_shares_are_never_slower_than_in_proportion() -> None:
    draw = Random(3)
    gains = []
    for _ in range(500):
        workers = draw.randint(1, 16)
        speeds = [draw.choice((0.25, 0.5, 1.0, 1.0, draw.uniform(0.2, 3))) for _ in range(workers)]
        total = workers * draw.randint(1, 8)
        parts = shares(total, speeds)
        before = _per_second(_as_in_0_1(total, speeds), speeds)
        gains.append(_per_second(parts, speeds) / before)
        assert 0.75 * total <= sum(parts) <= 1.25 * total
    assert min(gains) >= 1 - 1e-12
    assert max(gains) > 1.3


def test_at_two_to_one_a_round_of_two_each_keeps_everyone_busy() -> None:
    lines: list[Line] = []
    steps = lambda: 40 if offbeat.rank() < 2 else 20  # noqa: E731 - a round is 2, 2, 1, 1
    offbeat.run(lambda: quadratic(LB(2), steps()), TWO_SPEEDS, records=lines.append)
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0][2:14]
    assert {line["samples"] for line in rounds} == {6}
    samples = sum(line["samples"] for line in rounds[1:])
    assert samples / (rounds[-1]["at_s"] - rounds[0]["at_s"]) >= 0.98 * 3.0


def test_shares_converge_to_the_speeds_and_rounds_take_equally_long_everywhere() -> None:
    lines: list[Line] = []
    steps = lambda: 40 if offbeat.rank() < 2 else 20  # noqa: E731 - a round is 4, 4, 2, 2
    run = offbeat.run(lambda: quadratic(LB(3), steps()), TWO_SPEEDS, records=lines.append)
    for seen in run.results:
        assert seen.conserved
        assert seen.stats.staleness == {0: seen.stats.rounds}
        assert seen.stats.utilization > 0.85
    waits = [
        line["to_s"] - line["from_s"]
        for line in lines
        if line["kind"] == "wait" and line["round"] is not None and 2 <= line["round"] < 8
    ]
    assert waits
    assert max(waits) < 0.1  # the first round has 3 each: three seconds of waiting
    rounds = [line["samples"] for line in lines if line["kind"] == "round" and line["rank"] == 0]
    assert rounds[:8] == [12] * 8
    for rank, share in ((0, 4), (2, 2)):
        own = [line for line in lines if line["rank"] == rank]
        ends = [line["to_s"] for line in own if line["kind"] == "compute"]
        begins = [line["from_s"] for line in own if line["kind"] == "round"]
        counts = [
            sum(before < end <= after for end in ends)
            for before, after in zip([0.0, *begins[:7]], begins[:8], strict=True)
        ]
        assert counts == [3, *[share] * 7]


@pytest.mark.slow
def test_shares_follow_a_change_of_speeds() -> None:
    cluster = Cluster.parse(
        """
        workers = 2
        [compute]
        step_s = 1.0
        [[event]]
        kind = "slow"
        workers = [1]
        factor = 3
        from_s = 40
        """
    )

    def worker() -> Any:
        model = net()
        opt = sgd(model)
        seen = []
        with offbeat.attach(model, opt, LB(4, memory=0.5)) as dp:
            for step in range(100 if offbeat.rank() == 0 else 60):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                seen.append(dp._replica.own["share"])
        return seen

    fast, slow = offbeat.run(worker, cluster).results
    assert (fast[20], slow[20]) == (4, 4)
    assert (fast[90], slow[50]) == (6, 2)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_micro_batch_each_is_synchronous_sgd(workers: int) -> None:
    run = offbeat.run(lambda: train(6, LB(1)), Cluster.uniform(workers))
    for trajectory, _ in run.results:
        for mine, expected in zip(trajectory, plain(workers, 6), strict=True):
            assert same(mine, expected) if workers < 3 else close(mine, expected)


def test_lbbsp_resumes_bit_for_bit() -> None:
    resumes_bit_for_bit(LB(3), TWO_SPEEDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number above 0, got 0"),
        ({"micro_batches": "4"}, "micro_batches must be a whole number above 0, got '4'"),
        ({"memory": 1.0}, "memory must be at least 0 and below 1, got 1.0"),
        ({"memory": -0.1}, "memory must be at least 0 and below 1, got -0.1"),
        ({"memory": None}, "memory must be at least 0 and below 1, got None"),
    ],
)
def test_lbbsp_settings_that_cannot_be_meant_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LB(**settings)


# --- local SGD -----------------------------------------------------------------------------


def _alone(rank: int, start: list[torch.Tensor], steps: range) -> list[torch.Tensor]:
    """What plain SGD makes of a model on one worker's data."""
    model = net()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.copy_(value)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        opt.zero_grad()
        loss(model, rank, step).backward()
        opt.step()
    return parameters(model)


def _plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_models_are_averaged_after_so_many_steps_and_differ_between() -> None:
    results = offbeat.run(
        lambda: train(6, Local(3), optimizer=_plain_sgd), Cluster.uniform(2)
    ).results
    start = parameters(net(seed=0))
    for begin in (0, 3):
        ends = [_alone(rank, start, range(begin, begin + 3)) for rank in (0, 1)]
        for rank, (trajectory, _) in enumerate(results):
            between = _alone(rank, start, range(begin, begin + 2))
            assert close(trajectory[begin + 1], between)
        start = [(a + b) / 2 for a, b in zip(*ends, strict=True)]
        for trajectory, _ in results:
            assert close(trajectory[begin + 2], start)
            assert same(trajectory[begin + 2], results[0][0][begin + 2])
    assert not same(results[0][0][1], results[1][0][1])
    assert all(stats.rounds == 2 for _, stats in results)


def test_models_weigh_by_the_samples_that_went_into_them() -> None:
    sizes = (6, 2)
    results = offbeat.run(
        lambda: train(1, Local(1), optimizer=_plain_sgd, size=lambda rank: sizes[rank]),
        Cluster.uniform(2),
    ).results
    expected = plain(2, 1, optimizer=_plain_sgd, size=lambda rank: sizes[rank])
    for trajectory, _ in results:
        assert close(trajectory[0], expected[0])


def test_with_uneven_data_the_rest_is_averaged_at_the_end_and_nobody_hangs() -> None:
    counts = (7, 2, 0)
    results = offbeat.run(
        lambda: train(lambda rank: counts[rank], Local(3)), Cluster.uniform(3)
    ).results
    for rank, (trajectory, stats) in enumerate(results):
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.replicas_identical
        assert stats.applied_samples == counts[rank]
        assert stats.pending_samples == 0


def _scheduled(bring: Any) -> list[float]:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        with offbeat.attach(model, opt, Local(2), scheduler=scheduler, schedule_by="rounds"):
            for step in range(6):
                opt.zero_grad()
                if bring(offbeat.rank(), step):
                    (0.01 * loss(model, offbeat.rank(), step)).backward()
                opt.step()
        return opt.param_groups[0]["lr"]

    rates: list[float] = offbeat.run(worker, Cluster.uniform(2)).results
    return rates


def test_the_scheduler_is_stepped_once_a_round() -> None:
    assert _scheduled(lambda rank, step: True) == [0.125, 0.125]


def test_the_scheduler_is_stepped_where_a_step_has_no_data_too() -> None:
    assert _scheduled(lambda rank, step: (rank, step) != (1, 3)) == [0.125, 0.125]


@pytest.mark.parametrize("counts", [(6, 2), (6, 5), (7, 2), (1, 4)])
def test_schedulers_agree_after_the_block_though_a_worker_has_left_early(counts: Any) -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for _ in range(2):
            with offbeat.attach(model, opt, Local(2), scheduler=scheduler, schedule_by="rounds"):
                for step in range(counts[offbeat.rank()]):
                    opt.zero_grad()
                    (0.01 * loss(model, offbeat.rank(), step)).backward()
                    opt.step()
        return opt.param_groups[0]["lr"]

    rates = offbeat.run(worker, Cluster.uniform(2)).results
    assert rates == [0.25 ** -(-max(counts) // 2)] * 2  # a rest at the end is a round, too


def test_parameters_that_nobody_trains_stay_as_they_are_to_the_bit() -> None:
    def worker() -> Any:
        model = net()
        model[0].weight.requires_grad_(False)
        opt = sgd(model)
        start = parameters(model)
        with offbeat.attach(model, opt, Local(2)):
            for step in range(8 if offbeat.rank() else 3):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return start, parameters(model)

    for start, end in offbeat.run(worker, Cluster.uniform(3)).results:
        assert torch.equal(start[0], end[0])
        assert not torch.equal(start[1], end[1])


@pytest.mark.slow
@pytest.mark.parametrize("half", [12, 11, 10])
def test_local_sgd_resumes_bit_for_bit_in_the_middle_of_a_round_too(half: int) -> None:
    resumes_bit_for_bit(Local(3), TWO_SPEEDS, half)


def test_local_sgd_leaves_what_only_bad_steps_would_have_moved_as_it_is_to_the_bit() -> None:
    def worker() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.LocalSGD(3), nonfinite="skip"):
            before = parameters(model)
            for step in range(3):
                opt.zero_grad()
                if offbeat.rank() or step:
                    (model[0](torch.ones(1, 6)).sum()).backward()
                else:
                    loss(model, 0, 0).backward()  # the only one that reaches the last layer
                    model[0].weight.grad.fill_(float("nan"))
                opt.step()
        return before[2:], parameters(model)[2:]

    for before, after in offbeat.run(worker, Cluster.uniform(3)).results:
        assert same(before, after)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_is_named_or_skipped(nonfinite: Any) -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, Local(2), nonfinite=nonfinite) as dp:
            for step in range(4):
                opt.zero_grad()
                bad = float("nan") if (offbeat.rank(), step) == (1, 1) else 1.0
                (bad * loss(model, offbeat.rank(), step)).backward()
                opt.step()
        return parameters(model), dp.stats()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError) as caught:
            offbeat.run(worker, Cluster.uniform(2))
        assert (caught.value.rank, caught.value.parameter) == (1, "0.weight")
        return
    results = offbeat.run(worker, Cluster.uniform(2)).results
    assert all(tensor.isfinite().all() for tensor in results[0][0])
    assert same(results[0][0], results[1][0])
    assert [stats.dropped_samples for _, stats in results] == [0, 1]
    assert all(stats.pending_samples == 0 for _, stats in results)


@pytest.mark.parametrize("steps", [0, 2.5])
def test_local_settings_that_cannot_be_meant_are_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"steps must be a whole number above 0, got {steps}"):
        Local(steps)
