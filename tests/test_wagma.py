"""WAGMA-SGD, from attach to the end of the block, in virtual time; a few on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nets import FOUR, close, loss, net, parameters, same, sgd, train
from test_abs import resumes_bit_for_bit
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import NonFiniteGradientError
from offbeat.rounds import Flats
from offbeat.testing import processes

PROMPT = Cluster.parse("workers = 4\nspeed = [1.0, 0.83, 0.47, 0.37]\n[compute]\nstep_s = 1.0")


@pytest.mark.parametrize(
    ("workers", "size"),
    [(1, 1), (2, 2), (4, 2), (6, 3), (7, 7), (8, 4), (16, 4), (60, 10), (64, 8)],
)
def test_a_group_is_about_the_square_root_of_the_workers(workers: int, size: int) -> None:
    assert offbeat.WAGMASGD().groups(workers).size == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": 3}, r"group must divide the number of workers, 4, .*: 1, 2, 4; got 3"),
        ({"group": 8}, r"group must divide the number of workers, 4, .*got 8"),
        ({"group": 0}, "group must be a whole number above 0, got 0"),
        ({"period": 0}, "period must be a whole number above 0, got 0"),
        ({"period": 2.5}, "period must be a whole number above 0, got 2.5"),
        ({"quorum": 5}, "quorum must be between 1 and the 4 workers, got 5"),
        ({"period_quorum": 5}, "period_quorum must be between 1 and the 4 workers, got 5"),
        ({"late": "drop"}, "late must be one of 'delta', 'paper', got 'drop'"),
        ({"momentum": "none"}, "momentum must be one of 'local', 'averaged', got 'none'"),
        ({"period": True}, "period must be a whole number above 0, got True"),
        ({"quorum": 1.5}, "quorum: a fraction of workers must be above 0 and at most 1, got 1.5"),
        ({"delay": 2}, "delay must be one of 0, 1, got 2"),
        ({"delay": True}, "delay must be one of 0, 1, got True"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anybody_waits(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        offbeat.run(lambda: train(algorithm=offbeat.WAGMASGD(**settings)), Cluster.uniform(4))


def _trajectories(
    algorithm: offbeat.Algorithm, cluster: Cluster, steps: int = 9
) -> list[list[list[Tensor]]]:
    results = offbeat.run(lambda: train(steps, algorithm), cluster).results
    return [trajectory for trajectory, _ in results]


def test_groups_of_one_are_local_sgd() -> None:
    cluster = Cluster.uniform(4)
    mine = _trajectories(offbeat.WAGMASGD(group=1, period=3, quorum="all"), cluster)
    expected = _trajectories(offbeat.LocalSGD(3), cluster)
    for one, other in zip(mine, expected, strict=True):
        assert all(close(left, right) for left, right in zip(one, other, strict=True))
    assert not close(mine[0][0], mine[1][0]), "models drift between"


def test_groups_of_all_are_synchronous_averaging_of_models() -> None:
    cluster = Cluster.uniform(4)
    mine = _trajectories(offbeat.WAGMASGD(group=4), cluster)
    expected = _trajectories(offbeat.LocalSGD(1), cluster)
    for one, other in zip(mine, expected, strict=True):
        assert all(close(left, right) for left, right in zip(one, other, strict=True))


def test_after_a_round_of_all_replicas_are_the_same_bits() -> None:
    mine = _trajectories(offbeat.WAGMASGD(group=2, period=4), Cluster.uniform(8))
    for step in range(8):
        alike = all(same(each[step], mine[0][step]) for each in mine)
        assert alike == (step in (3, 7))


# --- by hand -----------------------------------------------------------------------------------


def _by_hand(algorithm: offbeat.Algorithm, steps: tuple[int, int]) -> list[float]:
    """One number, steps of 1 (worker 0) and of 10 (worker 1): where it is after each."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model = nn.ParameterList([weight])
    opt = torch.optim.SGD([weight], lr=1.0)
    seen = []
    with offbeat.attach(model, opt, algorithm) as dp:
        for _ in range(steps[dp.rank]):
            opt.zero_grad()
            (-(10.0**dp.rank) * weight).sum().backward()
            opt.step()
            seen.append(weight.item())
    return [*seen, weight.item()]


TWO = Cluster.parse("workers = 2\nspeed = [1.0, 0.4]\n[compute]\nstep_s = 1.0")


def test_two_workers_by_hand() -> None:
    """Worker 1 is late for rounds 0 and 1, at 1 and 2 s, and comes at 2.5 s.

    Round 0: given 1 and 0, the mean is 0.5. Round 1: worker 0 gives 1.5, worker 1's background 0.5:
    1. Worker 1 comes with its 10: 11. Round 2, at 3 s: 2 and 11, 6.5, and worker 0 leaves. Worker 1
    is late for it, and comes at 5 s: 16.5. It leaves, too: the last round is the mean of both.
    """
    algorithm = offbeat.WAGMASGD(period_quorum="solo")
    mine, other = offbeat.run(lambda: _by_hand(algorithm, (3, 2)), TWO).results
    assert mine == [0.5, 1.0, 6.5, 11.5]
    assert other == [11.0, 16.5, 11.5]


def test_two_workers_by_hand_with_the_rule_of_the_paper() -> None:
    """Worker 1 comes with 0 + 10 at 2.5 s; round 1's sum was 1.5 + 0: (1.5 + 10) / 3."""
    algorithm = offbeat.WAGMASGD(period_quorum="solo", late="paper")
    mine, other = offbeat.run(lambda: _by_hand(algorithm, (3, 1)), TWO).results
    assert mine[:2] == [0.5, 0.75]
    assert other[0] == pytest.approx((1.5 + 10) / 3)
    assert mine[2] == pytest.approx((1.75 + 10) / 2)
    assert mine[-1] == other[-1]


# --- who waits ----------------------------------------------------------------------------------


def _waits(algorithm: offbeat.Algorithm) -> tuple[float, dict[int, tuple[int, ...]]]:
    """The seconds that a worker has waited in its loop, and who has brought steps to each round."""
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm) as dp:
        for step in range(20):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
        waited_s = dp.stats().wait_s
    return waited_s, {each.round: each.ranks for each in dp.stats().history}


def test_nobody_waits_for_the_late_but_in_a_round_of_all() -> None:
    cluster = Cluster.parse("workers = 4\nspeed = [1.0, 1.0, 1.0, 0.1]\n[compute]\nstep_s = 1.0")
    free = offbeat.run(
        lambda: _waits(offbeat.WAGMASGD(period=5, period_quorum="solo")), cluster
    ).results
    assert all(waited_s < 1e-6 for waited_s, _ in free)
    assert all(rounds[4] == (0, 1, 2) for _, rounds in free)
    held = offbeat.run(
        lambda: _waits(offbeat.WAGMASGD(period=5, period_quorum="all")), cluster
    ).results
    assert [waited_s for waited_s, _ in held] == pytest.approx([180, 180, 180, 0])
    for number in range(20):
        expected = (0, 1, 2, 3) if number in (4, 9, 14, 19) else (0, 1, 2)
        assert all(rounds[number] == expected for _, rounds in held)


def test_with_a_delay_nobody_waits_for_its_exchange() -> None:
    """Messages take 0.4 s of a step of 1 s; who waits for its own round waits for them."""
    cluster = Cluster.uniform(4, step_s=1.0, latency_s=0.1)
    waits = [
        offbeat.run(
            lambda delay=delay: _waits(offbeat.WAGMASGD(period=50, delay=delay)), cluster
        ).results
        for delay in (0, 1)
    ]
    assert all(waited_s > 2.0 for waited_s, _ in waits[0])
    assert all(waited_s < 0.2 for waited_s, _ in waits[1])


# --- what all have together ---------------------------------------------------------------------


def _looks(algorithm: offbeat.Algorithm) -> Any:
    """Every worker looks after its own 6th step; nobody makes another before all have looked."""
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm) as dp:
        for step in range(6):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
        with dp.away():
            dp._world.sleep_until(100.0)
        mine = Flats(dp._replica.layout)
        dp._replica.shift.read(mine)  # type: ignore[union-attr]
        before = parameters(model)
        with dp.agreed():
            agreed = parameters(model)
        assert not same(before, agreed)
    return [each.clone() for each in mine.views], agreed, parameters(model)


@pytest.mark.parametrize("late", ["delta", "paper"])
def test_the_agreed_model_is_the_mean_of_all(late: Any) -> None:
    results = offbeat.run(lambda: _looks(offbeat.WAGMASGD(period=50, late=late)), FOUR).results
    means = [
        torch.stack(each).mean(0) for each in zip(*(mine for mine, _, _ in results), strict=True)
    ]
    for _, agreed, end in results:
        assert close(agreed, means)
        assert close(end, means), "and what all have at the end"


def test_records_say_which_group() -> None:
    lines: list[dict[str, Any]] = []
    algorithm = offbeat.WAGMASGD(group=2, period=3)
    offbeat.run(lambda: train(3, algorithm), Cluster.uniform(4), records=lines.append)
    groups = {(each["rank"], each["round"]): each["group"] for each in lines if "group" in each}
    assert groups[0, 0] == [0, 1]
    assert groups[3, 0] == [2, 3]
    assert groups[0, 1] == [0, 2]
    assert groups[3, 1] == [1, 3]
    assert groups[2, 2] == [0, 1, 2, 3]


# --- not finite ---------------------------------------------------------------------------------


def _overflows(nonfinite: Any) -> tuple[list[Tensor], offbeat.Stats]:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=10.0)
    with offbeat.attach(model, opt, offbeat.WAGMASGD(), nonfinite=nonfinite) as dp:
        for step in range(8):
            opt.zero_grad()
            (loss(model, dp.rank, step) / 1000).backward()
            if (dp.rank, step) == (2, 3):
                next(model.parameters()).grad.fill_(1e38)  # type: ignore[union-attr]
            opt.step()
    return parameters(model), dp.stats()


def test_a_model_that_leaves_the_numbers_ends_all_or_costs_its_worker_a_step() -> None:
    with pytest.raises(NonFiniteGradientError, match="on worker 2"):
        offbeat.run(lambda: _overflows("raise"), FOUR)
    for last, stats in offbeat.run(lambda: _overflows("skip"), FOUR).results:
        assert all(each.isfinite().all() for each in last)
        assert stats.replicas_identical
        assert stats.skipped_rounds == 1
        assert stats.dropped_samples == (1 if stats.rank == 2 else 0)
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples == 8


# --- momentum -----------------------------------------------------------------------------------


def _momentum(algorithm: offbeat.Algorithm) -> Any:
    model = net()
    opt = sgd(model)
    seen = []
    with offbeat.attach(model, opt, algorithm) as dp:
        for step in range(5):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
            seen.append([opt.state[each]["momentum_buffer"].clone() for each in model.parameters()])
    return seen


def test_momentum_is_each_workers_own_or_the_mean() -> None:
    cluster = Cluster.uniform(4)
    own = offbeat.run(lambda: _momentum(offbeat.WAGMASGD(group=4)), cluster).results
    mean = offbeat.run(
        lambda: _momentum(offbeat.WAGMASGD(group=4, momentum="averaged")), cluster
    ).results
    for step in range(5):
        expected = [
            torch.stack(each).mean(0) for each in zip(*(one[step] for one in own), strict=True)
        ]
        assert not close(own[0][step], own[1][step])
        for one in mean:
            assert close(one[step], expected)
            assert same(one[step], mean[0][step])


def test_only_the_momentum_of_sgd_is_averaged() -> None:
    algorithm = offbeat.WAGMASGD(momentum="averaged")
    for make in (
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ):
        with pytest.raises(ValueError, match=r"needs torch\.optim\.SGD with a momentum"):
            train(algorithm=algorithm, optimizer=make)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"group": 4, "period": 3},
        {"delay": 1, "period": 3},
        {"period_quorum": "solo", "quorum": 2},
        {"late": "paper"},
        {"momentum": "averaged"},
    ],
    ids=str,
)
def test_a_checkpoint_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    resumes_bit_for_bit(offbeat.WAGMASGD(**settings), PROMPT)


# --- real processes -----------------------------------------------------------------------------


def _real(rank_leaves: int) -> tuple[list[list[Tensor]], offbeat.Stats]:
    torch.set_num_threads(1)
    algorithm = offbeat.WAGMASGD(group=2, period=4)
    return train(lambda rank: 3 if rank == rank_leaves else 12, algorithm)


@pytest.mark.real
@pytest.mark.parametrize("workers", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_on_real_processes_one_that_leaves_early_is_no_matter(workers: int) -> None:
    results = [one.result for one in processes(_real, workers, 1)]
    for trajectory, stats in results:
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.replicas_identical
        assert stats.computed_samples == stats.applied_samples


def _straggles(agrees: bool) -> tuple[list[Tensor], list[Tensor], float]:
    torch.set_num_threads(1)
    model = net()
    opt = sgd(model)
    agreed: list[Tensor] = []
    with offbeat.attach(model, opt, offbeat.WAGMASGD(period_quorum="solo", delay=1)) as dp:
        for step in range(6 if dp.rank == 0 else 60):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            dp._world.sleep_until(dp._world.now() + (0.05 if dp.rank == 0 else 0.002))
            opt.step()
            if agrees and step == 5:
                with dp.agreed():
                    agreed = parameters(model)
        waited_s = dp.stats().wait_s
    return parameters(model), agreed, waited_s


@pytest.mark.real
@pytest.mark.parametrize("agrees", [False, True])
def test_on_real_processes_one_that_is_slow_holds_up_nobody(agrees: bool) -> None:
    results = [one.result for one in processes(_straggles, 4, agrees)]
    for last, agreed, _ in results:
        assert same(last, results[0][0])
        assert bool(agreed) == agrees
        assert all(each.isfinite().all() for each in agreed)
