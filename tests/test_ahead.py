"""Learning rates where workers step by themselves between rounds: as DDP's, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from nets import loss, net, sgd
from test_dasgd import cluster
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import offbeat
from offbeat.clusters import Cluster
from offbeat.schedule import Schedule

METHODS: dict[str, offbeat.Algorithm] = {
    "LocalSGD(8)": offbeat.LocalSGD(8),
    "LocalSGD(4, speed)": offbeat.LocalSGD(4, shares="speed"),
    "DiLoCo(20)": offbeat.DiLoCo(20),
    "DiLoCo, overlapping": offbeat.DiLoCo(8, overlap=3),
    "DiLoCo in fragments": offbeat.DiLoCo(8, fragments=2),
    "DaSGD(8)": offbeat.DaSGD(8),
    "DaSGD(8, 3)": offbeat.DaSGD(8, 3),
    "DaSGD, a quorum": offbeat.DaSGD(4, quorum=2),
    "WaitFreeLocalSGD": offbeat.WaitFreeLocalSGD(),
    "WAGMASGD": offbeat.WAGMASGD(),
    "DPSGD": offbeat.DPSGD("ring"),
}
SLOW = (1.0, 1.0, 1.0, 0.2)


def rates(
    algorithm: offbeat.Algorithm,
    steps: int = 43,
    speeds: Sequence[float] = (),
    latency_s: float = 0.01,
    **settings: Any,
) -> list[tuple[list[float], list[int], float, int]]:
    """Of every worker: the rate of each step, the ticks before it; rate and ticks at the end.

    The n-th rate of the schedule is n + 1.
    """

    def worker() -> tuple[list[float], list[int], float, int]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = LambdaLR(opt, lambda n: n + 1.0)
        used, ticks = [], []
        with offbeat.attach(
            model, opt, algorithm, scheduler=scheduler, bucket_bytes=64, **settings
        ) as dp:
            for step in range(steps):
                opt.zero_grad()
                (1e-9 * loss(model, dp.rank, step)).backward()
                used.append(opt.param_groups[0]["lr"])
                ticks.append(dp.ticks)
                opt.step()
        return used, ticks, opt.param_groups[0]["lr"], dp.ticks

    return offbeat.run(worker, cluster(4, latency_s, tuple(speeds))).results


@pytest.mark.parametrize("latency_s", [0.01, 2.5])
@pytest.mark.parametrize("name", METHODS)
def test_own_steps_have_the_rates_that_they_have_with_ddp(name: str, latency_s: float) -> None:
    for used, ticks, rate, last in rates(METHODS[name], latency_s=latency_s):
        assert used == [step + 1.0 for step in range(43)]
        assert ticks == list(range(43))
        assert (rate, last) == (44.0, 43)


@pytest.mark.parametrize("name", ["LocalSGD(8)", "DiLoCo(20)"])
def test_where_all_make_as_many_steps_a_slow_worker_has_the_same_rates(name: str) -> None:
    for used, ticks, *_ in rates(METHODS[name], speeds=SLOW):
        assert (used, ticks) == ([step + 1.0 for step in range(43)], list(range(43)))


@pytest.mark.parametrize("name", METHODS)
def test_at_unequal_speeds_ticks_go_on_with_own_steps_and_end_with_the_data(name: str) -> None:
    for used, ticks, rate, last in rates(METHODS[name], 60, speeds=SLOW, latency_s=0.3):
        assert used == [tick + 1.0 for tick in ticks]
        assert ticks == sorted(ticks)
        assert (rate, last) == (61.0, 60)  # no estimate was ahead of what all have made in the end


@pytest.mark.parametrize("dealt", [False, True], ids=["even", "dealt"])
@pytest.mark.parametrize("name", METHODS)
def test_ticks_do_not_leap_past_what_all_have_made(name: str, dealt: bool) -> None:
    """Unlike and uneven workers beside a network that takes as long as many steps."""
    for seed in range(4):
        logs, ends = drawn(METHODS[name], seed, dealt)
        assert ends == [(40, 40)] * 4
        for log in logs:
            for (before, *_), (ticks, last, made) in pairwise([(0, 0, 0.0), *log]):
                assert before <= ticks <= max(before, made) + 2
                assert last == ticks <= 40


def drawn(
    algorithm: offbeat.Algorithm, seed: int, dealt: bool
) -> tuple[list[list[tuple[int, int, float]]], list[tuple[int, int]]]:
    """After each step of each worker: ticks, the scheduler's, what all have made; at the end."""
    draw = Random(seed)
    speeds = [draw.choice([1.0, 1.0, 0.3, 0.1]) for _ in range(4)]
    text = f"workers = 4\nspeed = {speeds}\n[compute]\nstep_s = 1.0\n[network]\n"
    noise = f'[[noise]]\nkind = "lognormal"\nsigma = {draw.choice([0.1, 0.5, 1.0])}'
    where = Cluster.parse(f"{text}latency_s = {draw.choice([0.3, 5.0, 30.0])}\n{noise}")
    deal = offbeat.Deal(range(160))
    made = [0]

    def worker() -> tuple[list[tuple[int, int, float]], tuple[int, int]]:
        model, log = net(), []
        opt = sgd(model)
        scheduler = LambdaLR(opt, lambda n: 1.0 - n / 40)
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler, bucket_bytes=64) as dp:
            for step, _ in enumerate(deal if dealt else range(40)):
                opt.zero_grad()
                (1e-9 * loss(model, dp.rank, step)).backward()
                made[0] += 1
                opt.step()
                log.append((dp.ticks, scheduler.last_epoch, made[0] / 4))
        return log, (dp.ticks, scheduler.last_epoch)

    logs, ends = zip(*offbeat.run(worker, where, seed=seed).results, strict=True)
    return list(logs), list(ends)


@pytest.mark.parametrize("name", ["WaitFreeLocalSGD", "DaSGD(8, 3)", "DaSGD, a quorum"])
def test_a_block_for_each_epoch_goes_on_where_the_schedule_was(name: str) -> None:
    """The schedule is exactly long enough."""
    deal = offbeat.Deal(range(80))

    def worker() -> list[tuple[int, int]]:
        model, seen = net(), []
        opt = sgd(model)
        scheduler = OneCycleLR(opt, max_lr=0.01, total_steps=80, cycle_momentum=False)
        for _ in range(4):
            with offbeat.attach(model, opt, METHODS[name], scheduler=scheduler) as dp:
                for step, _ in enumerate(deal):
                    opt.zero_grad()
                    loss(model, dp.rank, step).backward()
                    opt.step()
            seen.append((dp.ticks, scheduler.last_epoch))
        return seen

    results = offbeat.run(worker, cluster(4, 2.5, SLOW)).results
    assert results == [[(20, 20), (20, 40), (20, 60), (20, 80)]] * 4


def test_what_a_block_has_left_a_schedule_ahead_by_the_next_one_makes_up_for() -> None:
    opt = sgd(net())
    scheduler = LambdaLR(opt, lambda n: 1.0)
    opt.step()
    first = Schedule(scheduler, "samples", 4)
    first.go_on(5, None, 0)  # as many of each other worker, which have made none
    first.end()
    second = Schedule(scheduler, "samples", 4)
    for made, last in ((4, 5), (5, 5), (6, 6)):
        second.go_on(made, None, 0)
        assert (second.ticks, scheduler.last_epoch) == (made, last)


def test_shares_by_speed_say_what_a_round_brings() -> None:
    """At 5:5:5:1, 3 steps on average are 5:5:5:1 after the first round: 4/5 of a tick a step."""
    (_, ticks, *_), *_, (_, slow, *_) = rates(
        offbeat.LocalSGD(4, shares="speed"), 16, speeds=SLOW, latency_s=0.001
    )
    assert ticks[:14] == [0, 1, 2, 3, *(4 + step * 4 // 5 for step in range(10))]
    assert slow[:6] == [0, 1, 2, 3, 4, 8]


@pytest.mark.parametrize(("by", "expected"), [("rounds", 5.0), ("steps", 43.0)])
def test_schedules_by_rounds_and_by_steps_keep_their_meaning(by: Any, expected: float) -> None:
    for used, ticks, *_ in rates(offbeat.LocalSGD(8), schedule_by=by):
        assert ticks == list(range(43))
        assert used[-1] == (expected + 1.0 if by == "rounds" else expected)


def test_gradients_are_applied_with_the_ticks_of_rounds_as_before() -> None:
    for used, ticks, *_ in rates(offbeat.SyncSGD(micro_batches=4), 16):
        assert ticks == [step // 4 for step in range(16)]
        assert used == [step // 4 + 1.0 for step in range(16)]


@pytest.mark.parametrize("name", ["WaitFreeLocalSGD", "DaSGD, a quorum"])
def test_an_estimate_does_not_run_past_the_end_of_a_schedule(name: str) -> None:
    """The fast ones leave early: the slow one takes them to go on, and holds at the last rate."""

    def worker() -> tuple[int, int]:
        model = net()
        opt = sgd(model)
        scheduler = OneCycleLR(opt, max_lr=0.01, total_steps=30, cycle_momentum=False)
        with offbeat.attach(model, opt, METHODS[name], scheduler=scheduler) as dp:
            for step in range(30):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
        return scheduler.last_epoch, dp.ticks

    results = offbeat.run(worker, cluster(4, 0.3, SLOW)).results
    assert [last for last, _ in results] == [30] * 4
    assert [ticks for _, ticks in results] == [30] * 4


@pytest.mark.parametrize("name", ["LocalSGD(8)", "DaSGD(8, 3)", "WaitFreeLocalSGD"])
def test_a_checkpoint_between_rounds_goes_on_with_the_same_rates(name: str) -> None:
    """After 13 steps: with LocalSGD(8), 5 of them are in no round."""
    states: dict[int, Any] = {}

    def worker(steps: range) -> list[tuple[int, float]]:
        model = net()
        opt = sgd(model)
        scheduler = LambdaLR(opt, lambda n: 1 / (n + 1.0))
        seen = []
        with offbeat.attach(model, opt, METHODS[name], scheduler=scheduler) as dp:
            if dp.rank in states:
                own, optimizer = states[dp.rank]
                dp.load_state_dict(own)
                opt.load_state_dict(optimizer)
            for step in steps:
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                seen.append((dp.ticks, opt.param_groups[0]["lr"]))
                opt.step()
            if not states.keys() & {dp.rank}:
                own = dp.state_dict()
                states[dp.rank] = own, opt.state_dict()
        return seen

    offbeat.run(lambda: worker(range(13)), cluster(4))
    for seen in offbeat.run(lambda: worker(range(13, 30)), cluster(4)).results:
        assert [ticks for ticks, _ in seen] == list(range(13, 30))
        assert [rate for _, rate in seen] == pytest.approx([0.1 / (n + 1) for n in range(13, 30)])


@pytest.mark.parametrize("name", ["WaitFreeLocalSGD", "WAGMASGD"])
def test_after_a_checkpoint_all_have_the_same_ticks(name: str) -> None:
    """All steps are in rounds then; before it, each has had an estimate of its own."""

    def worker(steps: int, states: Sequence[Any] = ()) -> Any:
        model = net()
        opt = sgd(model)
        scheduler = LambdaLR(opt, lambda n: 1.0 - n / 40)
        with offbeat.attach(model, opt, METHODS[name], scheduler=scheduler) as dp:
            if states:
                dp.load_state_dict(states[dp.rank])
            begun = dp.ticks
            for step in range(steps):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
            state = None if states else dp.state_dict()
        return state, begun, dp.ticks, scheduler.last_epoch

    where = cluster(4, 2.5, SLOW)
    states = [state for state, *_ in offbeat.run(lambda: worker(13), where).results]
    for _, *seen in offbeat.run(lambda: worker(27, states), where).results:
        assert seen == [13, 40, 40]


def test_samples_before_a_checkpoint_count_for_the_end_of_a_loop() -> None:
    """64 samples are 16 steps of each of four; then 32 more, in rounds of 8."""
    states: dict[int, Any] = {}

    def worker(samples: int) -> tuple[int, int]:
        model = net()
        opt = sgd(model)
        steps = 0
        with offbeat.attach(model, opt, offbeat.LocalSGD(8)) as dp:
            if dp.rank in states:
                dp.load_state_dict(states[dp.rank])
            for step in dp.until(samples=samples):
                opt.zero_grad()
                dp.samples(1)
                loss(model, dp.rank, step).backward()
                opt.step()
                steps += 1
            states[dp.rank] = dp.state_dict()
            return steps, dp.stats().steps

    assert offbeat.run(lambda: worker(64), cluster(4)).results == [(16, 16)] * 4
    assert offbeat.run(lambda: worker(96), cluster(4)).results == [(8, 8)] * 4
