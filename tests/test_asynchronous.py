"""Asynchronous methods over an optimizer: every gradient comes by itself, and nobody waits."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, plain, same, sgd, train
from test_abs import resumes_bit_for_bit
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import NonFiniteGradientError
from offbeat.testing import processes

THREE = Cluster.parse("workers = 3\nspeed = [1.0, 0.73, 0.31]\n[compute]\nstep_s = 1.0")
METHODS: list[offbeat.Algorithm] = [
    offbeat.ASGD(),
    offbeat.ASGD(delay_adaptive=True, micro_batches=2),
    offbeat.RingmasterASGD(2, stop="never"),
    offbeat.RingmasterASGD(2, stop="expired"),
    offbeat.RingmasterASGD(3, micro_batches=2),
    offbeat.RennalaSGD(4),
    offbeat.RennalaSGD(5, stop=False),
    offbeat.RingleaderASGD(),
    offbeat.RescaledASGD(),
    offbeat.RescaledASGD(max_delay=2),
    offbeat.MSyncSGD(2, top_up=True),
]


def _cluster(*seconds: float) -> Cluster:
    """Workers that take so long for a micro-batch; messages take no time."""
    speeds = [1.0 / each for each in seconds]
    return Cluster.parse(f"workers = {len(seconds)}\nspeed = {speeds}\n[compute]\nstep_s = 1.0")


def _descent(
    algorithm: offbeat.Algorithm,
    targets: list[float],
    seconds: list[float],
    steps: list[int],
    start: float = 4.0,
    lr: float = 0.25,
) -> list[Any]:
    """Workers that minimise (x - target)^2 / 2, each its own: moments and values of x, stats."""

    def worker() -> Any:
        x = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        opt = torch.optim.SGD([x], lr=lr)
        model = nn.Module()
        model.x = x
        seen: list[tuple[float, float]] = []
        with offbeat.attach(model, opt, algorithm) as dp:
            dp.on_round(lambda model, each: seen.append((each.ended_s, model.x.item())))
            for _ in range(steps[dp.rank]):
                opt.zero_grad()
                ((x - targets[dp.rank]) ** 2 / 2).backward()
                opt.step()
        return seen, dp.stats()

    return offbeat.run(worker, _cluster(*seconds)).results


# --- by hand ---------------------------------------------------------------------------------


def test_asgd_applies_each_gradient_when_it_comes_to_the_newest_parameters() -> None:
    [(seen, stats), (other, _)] = _descent(
        offbeat.ASGD(), [0.0, 0.0], [1.0, 2.5], steps=[4, 1], lr=0.5
    )
    # x: 4 -> 2 -> 1, then worker 1 subtracts half of the 4 that it began with, then 2 more steps:
    # worker 0's third was computed at 1, its fourth at what its third has made of it.
    assert seen == [(1.0, 2.0), (2.0, 1.0), (2.5, -1.0), (3.0, -1.5), (4.0, -0.75)]
    assert other == seen
    assert stats.staleness == {0: 3, 1: 1, 2: 1}


def test_delay_adaptive_takes_a_smaller_step_with_what_is_later_than_there_are_workers() -> None:
    [(seen, _), _] = _descent(
        offbeat.ASGD(delay_adaptive=True), [0.0, 0.0], [1.0, 4.5], steps=[4, 1], lr=0.5
    )
    assert [x for _, x in seen] == [2.0, 1.0, 0.5, 0.25, 0.25 - 0.5 * 2 / 4 * 4.0]


def test_ringmaster_leaves_out_what_has_missed_as_many_updates() -> None:
    never = offbeat.RingmasterASGD(2, stop="never")
    [(seen, _), (_, slow)] = _descent(never, [0.0, 0.0], [1.0, 1.6], steps=[4, 2], lr=0.5)
    # Worker 1's first has missed one update, its second two.
    assert [moment for moment, _ in seen] == [1.0, 1.6, 2.0, 3.0, 4.0]
    assert slow.dropped_samples == 1
    assert slow.applied_samples == 1


def test_ringmaster_stops_whoever_has_computed_for_as_many_updates() -> None:
    expired = offbeat.RingmasterASGD(2, stop="expired")
    [(_, fast), (_, slow)] = _descent(expired, [0.0, 0.0], [1.0, 3.5], steps=[7, 3], lr=0.5)
    assert fast.staleness == {0: 7}
    # Stopped at 2 s, 4 s and 6 s, when it had missed two updates.
    assert slow.abandoned_s == 6.0
    assert slow.abandoned_samples == slow.dropped_samples == 3
    assert slow.compute_s == 6.0


def test_ringmaster_stops_only_those_for_whom_it_saves_time() -> None:
    stalls = """
    workers = 2
    [compute]
    step_s = 1.0
    [[event]]
    kind = "slow"
    workers = [1]
    factor = 30
    from_s = 3.5
    to_s = 4.5
    """

    def abandoned(stop: Any) -> tuple[float, float]:
        algorithm = offbeat.RingmasterASGD(3, stop=stop)
        run = offbeat.run(lambda: train(20, algorithm), Cluster.parse(stalls))
        return run.results[1][1].abandoned_s, run.seconds

    assert abandoned("never") == (0.0, 49.0)  # 19 steps of 1 s, and one of 30
    left_s, seconds = abandoned("longer")
    assert 0 < left_s <= 3.0
    assert seconds == 19 + left_s


def test_rennala_adds_up_gradients_of_the_same_parameters_until_there_are_enough() -> None:
    results = _descent(
        offbeat.RennalaSGD(5), [1.0, 2.0, 3.0], [1.0, 2.1, 4.5], steps=[8, 4, 2], start=0.0, lr=1.0
    )
    (seen, _), _, (_, slow) = results
    # Four of worker 0 and one of worker 1, in four seconds.
    assert [moment for moment, _ in seen] == [4.0, 8.0]
    assert seen[0][1] == pytest.approx(6 / 5)
    assert slow.abandoned_s == 8.0


def test_rennala_applies_what_is_left_when_all_have_left() -> None:
    [(seen, stats), _] = _descent(
        offbeat.RennalaSGD(3), [1.0, 3.0], [1.0, 9.0], steps=[2, 0], start=0.0, lr=1.0
    )
    assert [x for _, x in seen] == [1.0]
    assert stats.applied_samples == 2


def test_m_synchronous_with_top_up_takes_more_of_the_fast_while_it_waits_for_m() -> None:
    top_up = offbeat.MSyncSGD(2, top_up=True)
    [(seen, _), (_, second), (_, third)] = _descent(
        top_up, [1.0, 5.0, 0.0], [1.0, 2.5, 9.0], steps=[4, 1, 0], start=0.0, lr=1.0
    )
    # Two of worker 0 and one of worker 1 by 2.5 s; nobody was idle.
    assert seen[0] == (2.5, pytest.approx(7 / 3))
    assert second.wait_s == second.join_wait_s
    assert third.dropped_samples == 0


def test_ringleader_is_the_published_fixture() -> None:
    results = _descent(offbeat.RingleaderASGD(), [1.0, -1.0], [1.0, 2.4], steps=[6, 2])
    (seen, stats), (_, other) = results
    assert seen[:4] == [(2.4, 3.0), (3.0, 2.0), (4.8, 1.375), (5.0, 0.75)]
    assert stats.dropped_samples == other.dropped_samples == 0


@pytest.mark.parametrize(
    ("algorithm", "limit"), [(offbeat.RingleaderASGD(), 0.0), (offbeat.RescaledASGD(), 0.0)]
)
def test_every_worker_counts_the_same_however_fast(
    algorithm: offbeat.Algorithm, limit: float
) -> None:
    args = ([1.0, -1.0], [1.0, 2.5], [400, 160])
    last = _descent(algorithm, *args, lr=0.02)[0][0][-1][1]
    assert last == pytest.approx(limit, abs=0.05)
    biased = _descent(offbeat.ASGD(), *args, lr=0.02)[0][0][-1][1]
    assert biased == pytest.approx(3 / 7, abs=0.05)


def test_a_gradient_of_several_micro_batches_is_their_mean_at_one_point() -> None:
    [(seen, stats), _] = _descent(
        offbeat.ASGD(micro_batches=2), [0.0, 0.0], [1.0, 1.25], steps=[4, 3], lr=0.5
    )
    # The last one of worker 1 is alone: it goes when its worker leaves.
    assert [moment for moment, _ in seen] == [2.0, 2.5, 3.75, 4.0]
    assert [x for _, x in seen] == [2.0, 0.0, 0.0 - 0.5 * 0.0, -1.0]
    assert stats.applied_samples == 4


# --- equalities ------------------------------------------------------------------------------


def _ends(algorithm: offbeat.Algorithm, cluster: Cluster = THREE) -> Any:
    return offbeat.run(lambda: train(9, algorithm)[0][-1], cluster).results


def test_a_limit_that_nothing_reaches_is_asgd_bit_for_bit() -> None:
    assert same(_ends(offbeat.RingmasterASGD(math.inf))[0], _ends(offbeat.ASGD())[0])
    assert same(_ends(offbeat.RescaledASGD(1000))[0], _ends(offbeat.RescaledASGD())[0])


def test_a_limit_of_one_with_stops_is_m_synchronous_with_m_of_one_bit_for_bit() -> None:
    """Where gradients that are not needed are stopped, and no two come at the same moment."""
    ours = _ends(offbeat.RingmasterASGD(1, stop="expired"))
    assert same(ours[0], _ends(offbeat.MSyncSGD(1, top_up=True))[0])
    assert same(ours[0], _ends(offbeat.RennalaSGD(1))[0])


def test_a_limit_of_one_without_stops_is_m_synchronous_with_m_of_one_bit_for_bit() -> None:
    """Where late gradients are computed to their end, messages take no time, and none comes in the
    same moment as another."""
    cluster = _cluster(1.0, 1.37, 2.91)
    ours = _ends(offbeat.RingmasterASGD(1, stop="never"), cluster)
    assert same(ours[0], _ends(offbeat.MSyncSGD(1), cluster)[0])


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
def test_alone_it_is_sgd_bit_for_bit_whatever_batches_are_declared(
    algorithm: offbeat.Algorithm,
) -> None:
    several = getattr(algorithm, "micro_batches", 1) > 1 or isinstance(
        algorithm, offbeat.RennalaSGD
    )
    trajectory, stats = train(6, offbeat.ASGD() if several else _alone(algorithm), size=lambda _: 3)
    for mine, expected in zip(trajectory, plain(1, 6, size=lambda _: 3), strict=True):
        assert same(mine, expected)
    assert stats.pending_samples == 0


def _alone(algorithm: offbeat.Algorithm) -> offbeat.Algorithm:
    return (
        offbeat.MSyncSGD(1, top_up=True) if isinstance(algorithm, offbeat.MSyncSGD) else algorithm
    )


# --- checkpoints, being away, ends -----------------------------------------------------------


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
def test_a_checkpoint_resumes_bit_for_bit(algorithm: offbeat.Algorithm) -> None:
    resumes_bit_for_bit(algorithm, THREE)


def test_nobody_goes_on_before_all_have_loaded_their_checkpoint() -> None:
    """A gradient would meet judges that know nothing of what was added up before."""
    from offbeat.worlds import enter_world

    saved: dict[int, Any] = {}

    def worker() -> Any:
        world, model = enter_world(), net()
        opt = sgd(model)
        resumes = offbeat.rank() in saved
        with offbeat.attach(model, opt, offbeat.RennalaSGD(5)) as dp:
            if resumes:
                if dp.rank == 1:
                    world.sleep_until(world.now() + 30.0)
                dp.load_state_dict(saved[dp.rank])
            for step in range(7):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
            if not resumes:
                saved[dp.rank] = dp.state_dict()
        return parameters(model), dp.stats()

    offbeat.run(worker, THREE)
    results = offbeat.run(worker, THREE).results
    for last, stats in results:
        assert same(last, results[0][0])
        assert stats.steps == 7


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
def test_who_is_away_holds_up_nobody(algorithm: offbeat.Algorithm) -> None:
    def worker() -> Any:
        from offbeat.worlds import enter_world

        world, model = enter_world(), net()
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(6 if dp.rank else 12):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if (dp.rank, step) == (1, 2):
                    with dp.away():
                        world.sleep_until(world.now() + 100.0)
            left_s = dp.seconds
        return left_s, parameters(model), dp.stats()

    results = offbeat.run(worker, THREE).results
    if not isinstance(algorithm, offbeat.RingleaderASGD | offbeat.MSyncSGD):
        assert results[0][0] < 20
    for _, last, stats in results:
        assert same(last, results[0][1])
        assert stats.pending_samples == 0


@pytest.mark.parametrize("goal", [{"samples": 24}, {"rounds": 10}, {"seconds": 12.0}], ids=str)
def test_all_end_their_loops_with_the_goal(goal: dict[str, Any]) -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.ASGD()) as dp:
            for step in dp.until(**goal):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
        return dp.stats(), parameters(model)

    results = offbeat.run(worker, THREE).results
    assert all(same(last, results[0][1]) for _, last in results)
    assert sum(stats.steps for stats, _ in results) < 40


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
def test_the_others_go_on_when_one_has_left_early(algorithm: offbeat.Algorithm) -> None:
    def steps(rank: int) -> int:
        return (9, 2, 5)[rank]

    results = offbeat.run(lambda: train(steps, algorithm), THREE).results
    for rank, (trajectory, stats) in enumerate(results):
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples
        assert stats.steps == steps(rank)
        assert stats.rounds >= 2


def test_two_attachments_of_a_program_hold_up_neither() -> None:
    def worker() -> Any:
        models = [net(seed) for seed in (0, 1)]
        opts = [sgd(model) for model in models]
        methods = (offbeat.ASGD(), offbeat.SyncSGD())
        with (
            offbeat.attach(models[0], opts[0], methods[0]),
            offbeat.attach(models[1], opts[1], methods[1]),
        ):
            for step in range(5):
                for model, opt in zip(models, opts, strict=True):
                    opt.zero_grad()
                    loss(model, offbeat.rank(), step).backward()
                    opt.step()
        return [parameters(model) for model in models]

    results = offbeat.run(worker, THREE).results
    for mine in results:
        assert all(same(a, b) for a, b in zip(mine, results[0], strict=True))


# --- learning rates, bad gradients -----------------------------------------------------------


def test_a_scheduler_of_ours_and_a_scaled_step_leave_the_learning_rate_as_it_is() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        rates = []
        algorithm = offbeat.ASGD(delay_adaptive=True)
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler) as dp:
            for step in range(9):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                rates.append((dp.ticks, opt.param_groups[0]["lr"]))
        return rates

    for rates in offbeat.run(worker, _cluster(1.0, 1.1, 9.3)).results:
        for ticks, rate in rates:
            assert rate == pytest.approx(0.1 * 0.9**ticks)


def test_a_learning_rate_that_is_a_tensor_is_scaled_and_put_back() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

    def plain_rate(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    cluster, algorithm = _cluster(1.0, 9.3), offbeat.ASGD(delay_adaptive=True)
    ours, theirs = (
        offbeat.run(lambda make=make: train(10, algorithm, make)[0][-1], cluster).results
        for make in (optimizer, plain_rate)
    )
    assert all(torch.allclose(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_spoils_nothing(
    algorithm: offbeat.Algorithm, nonfinite: Any
) -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm, nonfinite=nonfinite) as dp:
            for step in range(8):
                opt.zero_grad()
                bad = dp.rank == 0 and step in (2, 3)  # one of which may be stopped before its end
                factor = math.nan if bad else 1.0
                (factor * loss(model, dp.rank, step)).backward()
                opt.step()
        return parameters(model), dp.stats()

    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match="on worker 0 is NaN or infinite"):
            offbeat.run(worker, THREE)
        return
    results = offbeat.run(worker, THREE).results
    for last, stats in results:
        assert same(last, results[0][0])
        assert all(each.isfinite().all() for each in last)
        assert 1 <= stats.skipped_rounds <= 2
        assert stats.pending_samples == 0


# --- stopping --------------------------------------------------------------------------------


def test_the_records_show_abandoned_work() -> None:
    lines: list[dict[str, Any]] = []
    offbeat.run(
        lambda: train(lambda rank: 4 - 2 * rank, offbeat.RingmasterASGD(1, stop="expired")),
        _cluster(1.0, 2.5),
        records=lines.append,
    )
    left = [line for line in lines if line.get("arrival") == "abandoned"]
    assert [(line["rank"], line["from_s"], line["to_s"]) for line in left] == [
        (1, 0.0, 1.0),
        (1, 1.0, 2.0),
    ]


class Counting(nn.Module):
    """A layer that takes time, and counts how often it was begun."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seconds = seconds
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        self.calls += 1
        time.sleep(self.seconds)
        return self.layer(x)


def _leave_in_the_middle(stoppable: bool) -> tuple[int, int, offbeat.Stats]:
    from contextlib import nullcontext

    slow = offbeat.rank() == 1
    layers = [Counting(0.05 if slow else 0.002) for _ in range(10)]
    model = nn.Sequential(*layers)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with offbeat.attach(model, opt, offbeat.RingmasterASGD(1, stop="expired")) as dp:
        for _ in range(3 if slow else 100):
            opt.zero_grad()
            with dp.stoppable() if stoppable else nullcontext():
                model(torch.ones(2, 3)).square().mean().backward()
            opt.step()
    return sum(layer.calls for layer in layers), dp.stats().steps * len(layers), dp.stats()


@pytest.mark.real
@pytest.mark.parametrize("stoppable", [True, False])
def test_a_real_process_leaves_a_gradient_in_the_middle(stoppable: bool) -> None:
    _, slow = processes(_leave_in_the_middle, 2, stoppable)
    calls, whole, stats = slow.result
    assert calls < whole if stoppable else calls == whole
    assert stats.abandoned_samples >= 1
    assert stats.replicas_identical
    assert stats.computed_samples == stats.applied_samples + stats.dropped_samples


def test_a_block_that_nobody_stops_changes_nothing() -> None:
    def worker(stoppable: bool) -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.SyncSGD()) as dp:
            for step in range(3):
                opt.zero_grad()
                with dp.stoppable():
                    loss(model, 0, step).backward()
                opt.step()
        return parameters(model)

    assert same(worker(True), plain(1, 3)[-1])


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: offbeat.RingmasterASGD(0), 'max_delay must be "auto", a whole number above 0'),
        (lambda: offbeat.RingmasterASGD(1.5), "max_delay must be .*, got 1.5"),
        (lambda: offbeat.RingmasterASGD(True), "max_delay must be .*, got True"),
        (lambda: offbeat.RescaledASGD(0), "max_delay must be a whole number above 0, got 0"),
        (lambda: offbeat.RennalaSGD(0), "batch must be a whole number above 0, got 0"),
        (lambda: offbeat.RennalaSGD(True), "batch must be a whole number above 0, got True"),
        (lambda: offbeat.ASGD(micro_batches=0), "micro_batches must be a whole number above 0"),
        (lambda: offbeat.ASGD(delay_adaptive=1), "delay_adaptive must be True or False"),
        (lambda: offbeat.MSyncSGD("auto", top_up=True), 'top_up=True needs m as a number .*"auto"'),
    ],
)
def test_settings_that_mean_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("momentum", "says"), [(0.9, True), (0.3, False), (0.0, False)])
def test_momentum_that_late_gradients_make_unstable_is_named_once(
    momentum: float, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

    with caplog.at_level(logging.WARNING, logger="offbeat"):
        offbeat.run(lambda: train(1, offbeat.ASGD(), optimizer), Cluster.uniform(8))
    said = [each.getMessage() for each in caplog.records if "momentum" in each.getMessage()]
    assert len(said) == says
    if says:
        assert "7 updates late" in said[0]
        assert "0.0158 / curvature; without momentum up to 0.209" in said[0]


# --- choosing by the noise -------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [offbeat.RingmasterASGD(stop="never"), offbeat.RennalaSGD()], ids=str
)
@pytest.mark.parametrize("noise", [0.0, 30.0])
def test_the_limit_and_the_batch_follow_the_noise_of_gradients(
    algorithm: Any, noise: float
) -> None:
    """All workers judge alike meanwhile, or they would hang."""

    def worker() -> Any:
        x = nn.Parameter(torch.ones(200))
        opt = torch.optim.SGD([x], lr=1e-5)
        model = nn.Module()
        model.x = x
        draw = torch.Generator().manual_seed(offbeat.rank())
        with offbeat.attach(model, opt, algorithm) as dp:
            judge = dp._replica.engine._judge
            for _ in range(60):
                opt.zero_grad()
                (x @ (1.0 + noise * torch.randn(200, generator=draw))).backward()
                opt.step()
        return judge.limit if isinstance(algorithm, offbeat.RingmasterASGD) else judge.gradients

    chosen = offbeat.run(worker, THREE).results
    assert len(set(chosen)) == 1
    if noise == 0.0:
        assert chosen[0] == 1
    else:
        assert chosen[0] >= (2 if isinstance(algorithm, offbeat.RingmasterASGD) else 3)


@pytest.mark.parametrize("algorithm", [offbeat.RingmasterASGD(), offbeat.RennalaSGD()], ids=str)
def test_what_was_measured_resumes_bit_for_bit(algorithm: offbeat.Algorithm) -> None:
    resumes_bit_for_bit(algorithm, THREE, half=20)
