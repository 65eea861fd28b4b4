"""When is it over? Loops that end with one round for all; schedules that mean the same everywhere;
followers of every round; what a worker sees when it looks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from operator import ge
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd
from test_contract import ALGORITHMS, BUCKETS
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offbeat
from offbeat.clusters import Cluster
from offbeat.decentralised import Decentralised
from offbeat.errors import ReplicasDifferError, ScheduleError
from offbeat.testing import processes
from offbeat.worlds import enter_world

FOUR = Cluster.parse("workers = 4\nspeed = [1.0, 1.0, 0.7, 0.5]\n[compute]\nstep_s = 1.0")
ONE_SLOW = Cluster.parse("workers = 3\nspeed = [1.0, 1.0, 0.1]\n[compute]\nstep_s = 1.0")
NAMES = [name for name in ALGORITHMS if not name.startswith("eager-first")]
FEW = ["sync", "eager-solo", "abs-ready", "waitfree-ready", "local"]


def looped(
    steps: Callable[[offbeat.Attachment], Iterator[int]],
    algorithm: offbeat.Algorithm,
    after: Callable[[offbeat.Attachment, int], None] = lambda dp, step: None,
    **settings: Any,
) -> tuple[int, int, list[torch.Tensor], offbeat.Stats]:
    """Train in such a loop; the steps made, the round then, the parameters at the end, stats."""
    model, made = net(), 0
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm, bucket_bytes=BUCKETS, **settings) as dp:
        for step in steps(dp):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
            after(dp, step)
            made += 1
        ended = dp.round
    return made, ended, parameters(model), dp.stats()


# --- loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_of_rounds_ends_with_that_round_on_every_worker(name: str) -> None:
    algorithm = ALGORITHMS[name].make(4)
    results = offbeat.run(lambda: looped(lambda dp: dp.rounds(12), algorithm), FOUR).results
    for made, ended, last, stats in results:
        assert made > 0
        assert 12 <= ended <= 20  # a late worker learns of several rounds at once
        assert same(last, results[0][2])
        assert stats.pending_samples == 0


def test_fast_workers_make_more_steps_of_a_loop_of_rounds() -> None:
    results = offbeat.run(lambda: looped(lambda dp: dp.rounds(20), offbeat.ABSSGD()), FOUR).results
    made = [steps for steps, *_ in results]
    assert made[0] == made[1] > 1.3 * made[3]


@pytest.mark.parametrize("name", FEW)
def test_a_loop_of_samples_ends_when_all_together_have_applied_them(name: str) -> None:
    def train() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, ALGORITHMS[name].make(4), bucket_bytes=BUCKETS) as dp:
            for step in dp.until(samples=160):
                opt.zero_grad()
                dp.samples(4)
                loss(model, dp.rank, step).backward()
                opt.step()
        return dp.stats()

    stats = offbeat.run(train, FOUR).results
    computed = sum(each.computed_samples for each in stats)
    assert 160 <= computed <= 160 + 4 * 4 * 4  # what is under way when it is reached


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("goal", ["rounds", "samples"])
def test_who_goes_on_from_old_parameters_ends_its_loop_with_the_others(
    goal: str, micro_batches: int
) -> None:
    """They wait for it in a collective, and it would wait for a gradient of theirs."""
    three = "workers = 3\nspeed = [0.3, 1.0, 0.9]\n[compute]\nstep_s = 1.0"

    def worker() -> list[int]:
        model, rounds, world = net(), [], enter_world()
        opt, metrics = sgd(model), world.channel("metrics")
        with offbeat.attach(model, opt, offbeat.RingleaderASGD(micro_batches=micro_batches)) as dp:
            for epoch in (1, 2):
                for step in dp.until(**{goal: 12 * epoch}):
                    assert step < 100, "it goes on for ever"
                    opt.zero_grad()
                    loss(model, offbeat.rank(), step).backward()
                    opt.step()
                rounds.append(dp.round)
                with dp.away():
                    metrics.all_reduce(torch.zeros(1)).wait()
        return rounds

    for rounds in offbeat.run(worker, Cluster.parse(three)).results:
        assert goal == "samples" or all(map(ge, rounds, (12, 24)))


@pytest.mark.parametrize("name", FEW)
def test_whoevers_time_is_up_ends_the_loop_for_all(name: str) -> None:
    def steps(dp: offbeat.Attachment) -> Iterator[int]:
        return dp.until(seconds=10.0 if dp.rank == 0 else 1e6)

    results = offbeat.run(lambda: looped(steps, ALGORITHMS[name].make(4)), FOUR)
    assert 10 < results.seconds < 40
    assert len({ended for _, ended, *_ in results.results}) <= 3
    if name == "sync":
        assert {(made, ended) for made, ended, *_ in results.results} == {(6, 6)}


def test_a_worker_that_stops_early_stops_all_with_the_same_round() -> None:
    def after(dp: offbeat.Attachment, step: int) -> None:
        if dp.rank == 2 and step == 4:
            dp.stop()

    results = offbeat.run(
        lambda: looped(lambda dp: dp.rounds(1000), offbeat.SyncSGD(), after), FOUR
    ).results
    assert {(made, ended) for made, ended, *_ in results} == {(6, 6)}


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ({}, "at least one of"),
        ({"rounds": -1}, "rounds must be 0 or more, got -1"),
        ({"rounds": 2.5}, "rounds must be a whole number, got 2.5"),
        ({"samples": float("nan")}, "samples must be 0 or more, got nan"),
        ({"seconds": 0}, "seconds must be above 0"),
        ({"seconds": "60"}, "seconds must be a number, got '60'"),
        ({"rounds": True}, "rounds must be a number, got True"),
    ],
)
def test_a_goal_that_cannot_be_meant_is_refused_before_the_first_step(
    goal: dict[str, Any], words: str
) -> None:
    model = net()
    with offbeat.attach(model, sgd(model)) as dp, pytest.raises(ValueError, match=words):
        dp.until(**goal)


def test_rounds_before_a_checkpoint_count() -> None:
    def train(state: Any, rounds: int) -> Any:
        model = net()
        opt = sgd(model)
        if state is not None:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["optimizer"])
        made, saved = 0, None
        with offbeat.attach(model, opt) as dp:
            if state is not None:
                dp.load_state_dict(state["dp"])
            for _ in dp.until(rounds=rounds, samples=1e9):
                opt.zero_grad()
                loss(model, dp.rank, made).backward()
                opt.step()
                made += 1
            saved = {"dp": dp.state_dict(), "model": model.state_dict()}
            saved["optimizer"] = opt.state_dict()
            ticks = dp.ticks
        return made, ticks, saved

    first = offbeat.run(lambda: train(None, 5), FOUR).results
    second = offbeat.run(lambda: train(first[offbeat.rank()][2], 8), FOUR).results
    assert [made for made, _, _ in second] == [3] * 4
    assert [ticks for _, ticks, _ in second] == [8] * 4


# --- the end of the block --------------------------------------------------------------------


def _uneven(algorithm: offbeat.Algorithm) -> offbeat.Stats:
    def steps(dp: offbeat.Attachment) -> Iterator[int]:
        return iter(range(20))

    return looped(steps, algorithm)[3]


def test_the_end_says_what_a_fixed_share_of_data_has_cost(caplog: pytest.LogCaptureFixture) -> None:
    two = Cluster.parse("workers = 2\nspeed = [1.0, 0.5]\n[compute]\nstep_s = 1.0")
    with caplog.at_level(logging.WARNING, "offbeat"):
        fast, slow = offbeat.run(lambda: _uneven(offbeat.ABSSGD(patience=0.0)), two).results
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("worker 0 waited 20.0 s at the end for worker 1, which had about 10")
    assert "deal the data (offbeat.Deal), or end by dp.until(...)" in line
    assert (fast.join_wait_s, fast.waited_for) == (20.0, 1)
    assert (slow.join_wait_s, slow.waited_for) == (0.0, None)


def test_an_end_that_all_reach_together_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offbeat"):
        offbeat.run(lambda: looped(lambda dp: dp.rounds(30), offbeat.ABSSGD()), FOUR)
    assert not caplog.records


def test_replicas_that_differ_at_the_end_raise_on_every_worker() -> None:
    caught = []

    def train() -> None:
        model = net()
        with offbeat.attach(model, sgd(model)):
            if offbeat.rank() == 1:
                with torch.no_grad():
                    next(model.parameters()).add_(1.0)

    def worker() -> None:
        try:
            train()
        except ReplicasDifferError as error:
            caught.append((offbeat.rank(), str(error)))

    offbeat.run(worker, FOUR)
    assert sorted(rank for rank, _ in caught) == [0, 1, 2, 3]
    assert all("something other than optimizer.step()" in words for _, words in caught)


# --- looking ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_a_worker_that_looks_sees_the_newest_round(name: str) -> None:
    """And so do all others, at their moments: what is seen of one round is the same everywhere."""

    def train() -> dict[int, list[torch.Tensor]]:
        model, seen = net(), {}
        opt = sgd(model)
        with offbeat.attach(model, opt, ALGORITHMS[name].make(4), bucket_bytes=BUCKETS) as dp:
            for step in dp.rounds(24):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                _sleep(0.5 * dp.rank)
                with dp.agreed():
                    seen[dp.round] = parameters(model)
                    assert not dp._replica.engine.log
        return seen

    results = offbeat.run(train, FOUR).results
    for round_, agreed in results[0].items():
        assert all(same(agreed, seen[round_]) for seen in results if round_ in seen)


def test_looking_between_backward_and_step_keeps_the_gradients() -> None:
    def train() -> bool:
        model, kept = net(), True
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")) as dp:
            for step in range(12):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                before = [parameter.grad.clone() for parameter in model.parameters()]
                _sleep(2.5 * (dp.rank == 1))
                with dp.agreed():
                    pass
                kept &= same(before, [parameter.grad for parameter in model.parameters()])
                opt.step()
        return kept

    assert all(offbeat.run(train, ONE_SLOW).results)


def test_nobody_waits_for_a_worker_that_looks() -> None:
    def train() -> float:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("all")) as dp:
            for step in range(10):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if (dp.rank, step) == (0, 3):
                    with dp.agreed():
                        _sleep(1000.0)
            return dp.seconds

    ended = offbeat.run(train, FOUR).results
    assert max(ended[1:]) < 100


def test_synchronous_workers_wait_for_one_that_looks() -> None:
    """As with DDP: nothing of the training depends on how long an evaluation takes."""

    def train(looks: bool) -> tuple[list[torch.Tensor], int, float]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(10):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if looks and (dp.rank, step) == (0, 3):
                    with dp.agreed():
                        _sleep(1000.0)
        return parameters(model), dp.stats().rounds, dp.seconds

    looked = offbeat.run(lambda: train(True), FOUR).results
    plain = offbeat.run(lambda: train(False), FOUR).results
    assert all(same(mine, other) for (mine, *_), (other, *_) in zip(looked, plain, strict=True))
    assert [rounds for _, rounds, _ in looked] == [10] * 4
    assert min(seconds for *_, seconds in looked) > 1000


def _sleep(seconds: float) -> None:
    world = enter_world()
    world.sleep_until(world.now() + seconds)


# --- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_ends_where_it_does_in_lockstep(name: str) -> None:
    """48 steps of each worker are 48 ticks, or as many as rounds of several micro-batches."""
    algorithm = ALGORITHMS[name].make(4)

    def train() -> tuple[int, int, float]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        ticks = 48 // algorithm.round_steps
        cycles = not isinstance(algorithm, Decentralised)  # their momentum is a setting
        scheduler = OneCycleLR(opt, max_lr=0.02, total_steps=ticks, cycle_momentum=cycles)
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler, bucket_bytes=BUCKETS) as dp:
            for step in range(48):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
        return ticks, dp.ticks, opt.param_groups[0]["lr"]

    results = offbeat.run(train, FOUR).results
    assert len(set(results)) == 1
    planned, ticks, rate = results[0]
    assert ticks == planned
    opt = torch.optim.SGD(net().parameters(), lr=0.01, momentum=0.9)
    alone = OneCycleLR(opt, max_lr=0.02, total_steps=planned)
    for _ in range(planned):
        opt.step()
        alone.step()
    assert rate == opt.param_groups[0]["lr"]


def test_local_steps_do_not_stretch_a_warm_up() -> None:
    def ticks(algorithm: offbeat.Algorithm) -> Any:
        return offbeat.run(lambda: looped(lambda dp: iter(range(16)), algorithm, seen.append), FOUR)

    class Seen(list[int]):
        def append(self, *arguments: Any) -> None:  # type: ignore[override]
            dp, step = arguments
            if dp.rank == 0 and step == 7:
                super().append(dp.ticks)

    seen = Seen()
    ticks(offbeat.LocalSGD(steps=4))
    ticks(offbeat.SyncSGD())
    assert seen == [8, 8]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("by", ["samples", "rounds", "steps"])
def test_a_schedule_that_is_too_short_says_so_on_every_worker(name: str, by: Any) -> None:
    caught = []

    def train() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = OneCycleLR(opt, max_lr=0.02, total_steps=5)
        try:
            with offbeat.attach(
                model,
                opt,
                ALGORITHMS[name].make(4),
                scheduler=scheduler,
                schedule_by=by,
                bucket_bytes=BUCKETS,
            ) as dp:
                for step in range(60):
                    opt.zero_grad()
                    loss(model, dp.rank, step).backward()
                    opt.step()
        except ScheduleError as error:
            caught.append(str(error))

    offbeat.run(train, FOUR)
    assert len(caught) == 4
    assert all(f"schedule_by='{by}'" in words for words in caught)


def test_an_unknown_way_to_step_a_scheduler_is_refused() -> None:
    model = net()
    words = "schedule_by must be one of 'samples', 'rounds', 'steps', got 'epochs'"
    with pytest.raises(ValueError, match=words):
        offbeat.attach(model, sgd(model), schedule_by="epochs")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
def test_a_scheduler_by_steps_is_as_if_stepped_in_the_loop() -> None:
    def train(hand: bool) -> list[torch.Tensor]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        settings: dict[str, Any] = {"scheduler": scheduler, "schedule_by": "steps"}
        algorithm = offbeat.EagerSGD("solo")
        with offbeat.attach(model, opt, algorithm, **({} if hand else settings)) as dp:
            for step in range(12):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if hand:
                    scheduler.step()
        return parameters(model)

    by_hand = offbeat.run(lambda: train(True), FOUR).results
    handed_over = offbeat.run(lambda: train(False), FOUR).results
    assert all(same(each, by_hand[0]) for each in by_hand + handed_over)


# --- followers -------------------------------------------------------------------------------


def followed(
    algorithm: offbeat.Algorithm, between: Callable[[offbeat.Attachment, int], None]
) -> Any:
    """Train with a moving average of the model; its parameters, and the rounds it has seen."""
    model, rounds = net(), []
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm, bucket_bytes=BUCKETS) as dp:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def follow(newest: torch.nn.Module, each: offbeat.Round) -> None:
            rounds.append(each.round)
            ema.update_parameters(newest)

        dp.on_round(follow)
        for step in range(24):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
            between(dp, step)
    return parameters(ema.module), rounds, dp.stats().rounds, dp.seconds


def _nothing(dp: offbeat.Attachment, step: int) -> None: ...


def _evaluates(dp: offbeat.Attachment, step: int) -> None:
    if (dp.rank, step) == (0, 5):
        with dp.away():
            _sleep(40.0)


def _meets(dp: offbeat.Attachment, step: int) -> None:
    """Worker 0 waits for the others, who still have steps to make, in a collective of its own."""
    world = enter_world()
    if step == (3 if dp.rank == 0 else 20):
        with world.elsewhere("the end of an epoch"):
            world.control.add("met", 1)
            while world.control.add("met", 0) < world.size:
                world.sleep_until(world.now() + 0.5)


def _meets_while_away(dp: offbeat.Attachment, step: int) -> None:
    with dp.away():
        _meets(dp, step)


@pytest.mark.parametrize("between", [_nothing, _evaluates, _meets, _meets_while_away])
@pytest.mark.parametrize("name", NAMES)
def test_a_moving_average_is_the_same_on_every_worker(name: str, between: Any) -> None:
    algorithm = ALGORITHMS[name].make(4)
    results = offbeat.run(lambda: followed(algorithm, between), FOUR).results
    for ema, rounds, applied, _ in results:
        # Among neighbours no worker knows what all of them together are.
        own = isinstance(algorithm, Decentralised | offbeat.WAGMASGD)  # each follows its own model
        assert same(ema, results[0][0]) or own
        assert rounds == results[0][1] == sorted(set(rounds))
        assert len(rounds) == applied


def test_who_evaluates_for_long_with_a_follower_holds_up_the_others_not_its_memory() -> None:
    def between(dp: offbeat.Attachment, step: int) -> None:
        if (dp.rank, step) == (0, 5):
            with dp.away():
                for _ in range(100):
                    _sleep(10.0)
                    kept.append(len(dp._replica.engine.log))

    kept: list[int] = []
    results = offbeat.run(lambda: followed(offbeat.EagerSGD("solo"), between), FOUR).results
    assert max(kept) == 8
    assert all(seconds > 1000 for *_, seconds in results)


def test_a_follower_can_be_told_to_follow_no_more() -> None:
    def train() -> list[int]:
        model, seen = net(), []
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            stop = dp.on_round(lambda model, each: seen.append(each.round))
            for step in range(6):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if step == 2:
                    stop()
                    stop()
        return seen

    assert offbeat.run(train, FOUR).results == [[0, 1, 2]] * 4


def test_what_a_follower_raises_ends_the_run() -> None:
    def train() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            dp.on_round(lambda model, each: 1 / 0)
            loss(model, dp.rank, 0).backward()
            opt.step()

    with pytest.raises(ZeroDivisionError):
        offbeat.run(train, FOUR)


# --- on real processes -----------------------------------------------------------------------


def _real(name: str) -> Any:
    rank = offbeat.rank()
    torch.set_num_threads(1)
    model, rounds = net(), []
    opt = sgd(model)
    scheduler = OneCycleLR(opt, max_lr=0.1, total_steps=100_000)
    with offbeat.attach(
        model, opt, ALGORITHMS[name].make(3), bucket_bytes=BUCKETS, scheduler=scheduler
    ) as dp:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def follow(newest: torch.nn.Module, each: offbeat.Round) -> None:
            rounds.append(each.round)
            ema.update_parameters(newest)

        dp.on_round(follow)
        for step in dp.rounds(30):
            opt.zero_grad()
            time.sleep(0.01 * (rank == 2))
            loss(model, rank, step).backward()
            opt.step()
            if step % 5 == rank:
                with dp.agreed():
                    loss(model, rank, step)
        torch.distributed.barrier()
        for _ in dp.until(seconds=0.2):
            opt.zero_grad()
            loss(model, rank, 0).backward()
            opt.step()
    return parameters(ema.module), rounds, dp.stats().rounds, opt.param_groups[0]["lr"], dp.ticks


def _each_real() -> list[Any]:
    return [_real(name) for name in FEW]


@pytest.mark.real
def test_real_processes_end_follow_and_schedule_alike() -> None:
    by_worker = [each.result for each in processes(_each_real, 3)]
    for name, *results in zip(FEW, *by_worker, strict=True):
        for ema, rounds, applied, rate, ticks in results:
            assert same(ema, results[0][0])
            assert rounds == results[0][1] == sorted(set(rounds))
            assert len(rounds) == applied >= 30
            assert ticks == results[0][4]
            if name != "waitfree-ready":  # whose workers have rates of their own
                assert rate == results[0][3]
