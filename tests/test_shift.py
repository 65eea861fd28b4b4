"""Own steps at once, the others' a round later: WaitFreeLocalSGD(), in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from greenlet import getcurrent
from nets import close, loss, net, parameters, plain, same, sgd, train
from test_abs import TWO_SPEEDS, resumes_bit_for_bit
from torch import Tensor

import offbeat
from offbeat.clusters import Cluster
from offbeat.merges import Shift
from offbeat.rounds import Flats, Layout, Round

SLOW_NETWORK = Cluster.parse(
    """
    workers = 4
    speed = [1.0, 0.9, 0.5, 0.4]
    [compute]
    step_s = 1.0
    [network]
    latency_s = 0.1
    """
)


def local(**settings: Any) -> offbeat.WaitFreeLocalSGD:
    return offbeat.WaitFreeLocalSGD(**settings)


def watched(
    algorithm: offbeat.Algorithm, look: Callable[[offbeat.Attachment, torch.nn.Module], Any]
) -> Any:
    """Train this worker for a while; what `look` saw after every step."""
    model, seen = net(), []
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm) as dp:
        for step in range(24):
            opt.zero_grad()
            loss(model, offbeat.rank(), step).backward()
            opt.step()
            seen.append(look(dp, model))
    return seen, parameters(model)


def test_workers_that_would_do_the_same_lose_nothing_by_the_delay() -> None:
    """Everyone's moves are the mean: plain SGD on one worker, though each round is one late."""

    def worker() -> list[list[Tensor]]:
        model, seen = net(), []
        opt = sgd(model)
        with offbeat.attach(model, opt, local()):
            for step in range(12):
                opt.zero_grad()
                loss(model, 0, step).backward()  # everyone has worker 0's data
                opt.step()
                seen.append(parameters(model))
        return seen

    for seen in offbeat.run(worker, Cluster.uniform(3, step_s=1.0)).results:
        assert all(close(mine, other) for mine, other in zip(seen, plain(1, 12), strict=False))


@pytest.mark.parametrize("settings", [{}, {"fixed_point": "workers"}, {"delay": 0}])
def test_at_equal_rounds_all_agree_on_the_same_bits(settings: dict[str, Any]) -> None:
    def look(dp: offbeat.Attachment, model: torch.nn.Module) -> tuple[int, list[Tensor]]:
        with dp.agreed():
            return dp.round, parameters(model)

    results = offbeat.run(lambda: watched(local(**settings), look), SLOW_NETWORK).results
    agreed = [dict(seen) for seen, _ in results]
    common = set.intersection(*(set(each) for each in agreed))
    assert len(common) >= 5
    for round_ in common:
        assert all(same(each[round_], agreed[0][round_]) for each in agreed)
    assert all(same(last, results[0][1]) for _, last in results)


def test_between_rounds_each_worker_is_ahead_by_its_own_steps() -> None:
    def look(dp: offbeat.Attachment, model: torch.nn.Module) -> tuple[bool, bool]:
        with dp.agreed():
            pass  # now this worker is at the newest round
        before = parameters(model)
        with dp.agreed():
            moved = not same(parameters(model), before)
        return moved, close(parameters(model), before)

    for seen, _ in offbeat.run(lambda: watched(local(), look), SLOW_NETWORK).results:
        assert all(moved for moved, _ in seen)
        assert all(back for _, back in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_end_all_have_the_base_whatever_was_rounded(dtype: torch.dtype) -> None:
    """Two rounds are under way when the first arrives: a race that real workers may run into."""
    torch.manual_seed(0)
    parameters = [torch.randn(20).to(dtype)]
    layout = Layout(["weight"], parameters)
    ahead = Shift(layout, alone=False)
    records = []
    for round in (1, 2):
        parameters[0] += torch.randn(20).to(dtype)
        sum = Flats(layout)
        list(ahead.give(round, sum, 1.0, waits=False))
        sum.views[0].add_(torch.randn(20))  # another worker's
        records.append(Round(round, sum, (1.0, 1.0), 2.0, (True,)))
    for record in records:
        ahead.begin(record)
    ahead.show()
    agreed = parameters[0].clone()
    ahead.hide()
    ahead.settled()
    assert torch.equal(parameters[0], agreed)


@pytest.mark.parametrize("seed", range(20))
def test_parameters_are_the_base_and_ones_own_moves_that_no_round_has_brought(seed: int) -> None:
    """Three workers, by hand: some give nothing, some hear of rounds late, some rounds are bad."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    places = [[torch.zeros(5, dtype=torch.float64)] for _ in range(3)]
    layouts = [Layout(["weight"], place) for place in places]
    workers = [Shift(layout, alone=False) for layout in layouts]
    base = torch.zeros(5, dtype=torch.float64)
    bases = [base]  # after each round
    own: list[list[Tensor]] = [[] for _ in workers]  # a worker's moves in the rounds it gave to
    since = [torch.zeros(5, dtype=torch.float64) for _ in workers]
    records: list[list[Round]] = []
    knows = [0, 0, 0]

    def take(rank: int) -> None:
        workers[rank].begin(records[knows[rank]][rank])
        knows[rank] += 1
        moves = sum(own[rank][knows[rank] :], since[rank])
        torch.testing.assert_close(places[rank][0], bases[knows[rank]] + moves)
        workers[rank].show()
        torch.testing.assert_close(places[rank][0], bases[knows[rank]])
        workers[rank].hide()

    for round in range(12):
        total, samples = torch.zeros(5, dtype=torch.float64), [0.0, 0.0, 0.0]
        for rank, worker in enumerate(workers):
            if draw.random() < 0.3:  # gives nothing
                own[rank].append(torch.zeros(5, dtype=torch.float64))
                continue
            move, samples[rank] = torch.randn(5, dtype=torch.float64), float(draw.randint(1, 4))
            worker.moves()
            places[rank][0].add_(move)
            own[rank].append(since[rank] + move)
            since[rank] = torch.zeros(5, dtype=torch.float64)
            flats = Flats(layouts[rank])
            list(worker.give(round, flats, samples[rank], waits=draw.random() < 0.5))
            total += flats.views[0]
            torch.testing.assert_close(flats.views[0], own[rank][-1] * samples[rank])
        bad = (0, 0) if draw.random() < 0.2 else None
        counts = bool(sum(samples)) and bad is None
        base = base + total / sum(samples) if counts else base
        bases.append(base)
        shared = [Flats(layout) for layout in layouts]
        for each in shared:
            each.views[0].copy_(total)
        divisor = sum(samples)
        records.append(
            [Round(round, each, tuple(samples), divisor, (True,), bad=bad) for each in shared]
        )
        for rank in range(3):
            while knows[rank] < len(records) and draw.random() < 0.7:
                take(rank)
            if draw.random() < 0.5:  # goes on before the next round
                move = torch.randn(5, dtype=torch.float64)
                workers[rank].moves()
                places[rank][0].add_(move)
                since[rank] = since[rank] + move
    for rank in range(3):
        while knows[rank] < len(records):
            take(rank)


def test_looking_once_more_at_what_all_agree_on_changes_no_bit() -> None:
    def look(dp: offbeat.Attachment, model: torch.nn.Module) -> None:
        with dp.agreed():
            pass

    def look_often(dp: offbeat.Attachment, model: torch.nn.Module) -> None:
        look(dp, model)
        with dp.agreed(), dp.agreed():
            pass

    looked = offbeat.run(lambda: watched(local(), look_often), SLOW_NETWORK).results
    ahead = offbeat.run(lambda: watched(local(), look), SLOW_NETWORK).results
    assert all(same(mine, other) for (_, mine), (_, other) in zip(looked, ahead, strict=True))


@pytest.mark.parametrize(
    "act",
    [lambda dp, opt: dp.state_dict(), lambda dp, opt: opt.step(), lambda dp, opt: dp.close()],
    ids=["state_dict", "step", "close"],
)
def test_rounds_do_not_go_on_while_the_model_shows_what_all_agree_on(
    act: Callable[[offbeat.Attachment, torch.optim.Optimizer], Any],
) -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, local()) as dp:
            for step in range(4):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
            with dp.agreed():
                act(dp, opt)

    with pytest.raises(RuntimeError, match=r"inside dp.agreed\(\): move it out"):
        offbeat.run(worker, SLOW_NETWORK)


def test_a_model_may_change_the_order_of_its_numbers() -> None:
    def worker(order: torch.memory_format) -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, opt, local()):
            model.to(memory_format=order)  # type: ignore[call-overload]
            for step in range(8):
                opt.zero_grad()
                torch.manual_seed(10 * step + offbeat.rank())
                model(torch.randn(2, 3, 5, 5)).square().mean().backward()
                opt.step()
        return model.weight.detach()

    usual, other = (
        offbeat.run(partial(worker, order), TWO_SPEEDS).results[0]
        for order in (torch.contiguous_format, torch.channels_last)
    )
    torch.testing.assert_close(other.contiguous(), usual)


def test_nobody_waits_and_the_batch_adapts_as_ever() -> None:
    def made(algorithm: offbeat.Algorithm) -> offbeat.Stats:
        run = offbeat.run(lambda: train(24, algorithm), SLOW_NETWORK)
        stats: offbeat.Stats = run.results[3][1]
        return stats

    ahead, plainly = made(local()), made(offbeat.ABSSGD("finish", patience=0.0))
    assert ahead.wait_s == plainly.wait_s
    assert [one.samples for one in ahead.history] == [one.samples for one in plainly.history]
    assert ahead.staleness == plainly.staleness


def test_a_gradient_that_is_not_finite_moves_nobody() -> None:
    def worker() -> list[Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, local(), nonfinite="skip"):
            for step in range(12):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                if offbeat.rank() == 1 and step == 4:
                    opt.param_groups[0]["params"][0].grad.fill_(float("nan"))
                opt.step()
        return parameters(model)

    results = offbeat.run(worker, TWO_SPEEDS).results
    assert all(same(last, results[0]) for last in results)
    assert all(tensor.isfinite().all() for tensor in results[0])


def test_a_gradient_that_is_left_out_weighs_nothing_either() -> None:
    def worker() -> tuple[float, offbeat.Stats]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        algorithm = local(min_batch=4, max_steps=2)
        with offbeat.attach(model, opt, algorithm, nonfinite="skip") as dp:
            for _ in range(2):
                opt.zero_grad()
                model.weight.sum().backward()
                if offbeat.rank() == 0:
                    model.weight.grad.fill_(float("nan"))
                opt.step()
        return model.weight.item(), dp.stats()

    for weight, stats in offbeat.run(worker, Cluster.uniform(2)).results:
        assert weight == -2.0  # worker 1's two steps, not half of them
        assert [one.ranks for one in stats.history] == [(1,)]
        assert stats.pending_samples == 0


def test_a_worker_whose_parameters_overflow_goes_back_to_the_base() -> None:
    def worker() -> tuple[list[Tensor], offbeat.Stats]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=10.0)
        with offbeat.attach(model, opt, local(), nonfinite="skip") as dp:
            for step in range(20):
                opt.zero_grad()
                (loss(model, offbeat.rank(), step) / 1000).backward()
                if offbeat.rank() == 1 and step == 4:
                    opt.param_groups[0]["params"][0].grad.fill_(1e38)
                opt.step()
        return parameters(model), dp.stats()

    results = offbeat.run(worker, SLOW_NETWORK).results
    for last, stats in results:
        assert all(tensor.isfinite().all() for tensor in last)
        assert same(last, results[0][0])
        assert stats.pending_samples == 0
        assert sum(1 in one.ranks for one in stats.history) >= 5  # it takes part again


@pytest.mark.parametrize("settings", [{}, {"min_batch": 9}])
def test_a_run_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    resumes_bit_for_bit(local(**settings), SLOW_NETWORK)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps must be a whole number above 0, got 0"),
        ({"fixed_point": "mean"}, "fixed_point must be one of 'samples', 'workers', got 'mean'"),
        ({"delay": 2}, "delay must be one of 0, 1, got 2"),
        ({"min_batch": -1}, "min_batch must be 0 or more samples, got -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(("fixed_point", "settles"), [("samples", 1 / 3), ("workers", 0.0)])
def test_where_two_workers_with_unlike_data_settle(fixed_point: Any, settles: float) -> None:
    """Speeds 2:1, optima 1 and -1: the fast one has two thirds of the samples."""

    def worker() -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=0.002)
        optimum = -1.0 if offbeat.rank() else 1.0
        with offbeat.attach(model, opt, local(fixed_point=fixed_point)) as dp:
            while dp.seconds < 2000:
                opt.zero_grad()
                (0.5 * (model.weight - optimum).square()).sum().backward()
                opt.step()
        return model.weight.item()

    cluster = Cluster.parse("workers = 2\nspeed = [2.0, 1.0]\n[compute]\nstep_s = 1.0")
    for weight in offbeat.run(worker, cluster).results:
        assert weight == pytest.approx(settles, abs=0.01)


@pytest.mark.parametrize("leave", [True, False], ids=["leave", "pause"])
def test_a_worker_that_leaves_or_pauses_writes_its_moves_itself(
    leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background must not read parameters while the program applies a round to them."""
    gave: list[bool] = []
    give = Shift.give

    def watched_give(*arguments: Any) -> Iterator[None]:
        gave.append(getcurrent() in programs)
        return give(*arguments)

    monkeypatch.setattr(Shift, "give", watched_give)
    programs: set[object] = set()

    def worker() -> None:
        programs.add(getcurrent())
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, local()) as dp:
            for step in range(6 + offbeat.rank()):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
            if not leave:
                dp.state_dict()

    offbeat.run(worker, SLOW_NETWORK)
    assert len(gave) > 12
    assert all(gave)


@pytest.mark.parametrize("settings", [{}, {"delay": 0}, {"max_steps": 2}])
def test_a_worker_alone_is_plain_training_to_the_bit(settings: dict[str, Any]) -> None:
    def worker() -> tuple[list[list[Tensor]], offbeat.Stats]:
        return train(9, local(**settings), size=lambda rank: 3)

    trajectory, _ = offbeat.run(worker, Cluster.uniform(1)).results[0]
    expected = plain(1, 9, size=lambda rank: 3)
    assert all(same(mine, other) for mine, other in zip(trajectory, expected, strict=False))


def test_a_worker_alone_whose_parameters_overflow_goes_back_to_the_base() -> None:
    def worker() -> list[Tensor]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt, local(), nonfinite="skip"):
            for step in range(8):
                opt.zero_grad()
                loss(model, 0, step).backward()
                opt.step()
                if step == 3:
                    opt.param_groups[0]["params"][0].data.fill_(float("inf"))
                    for parameter in model.parameters():
                        parameter.grad = None
                    opt.step()  # a round takes it, before a gradient of it is computed
        return parameters(model)

    assert all(tensor.isfinite().all() for tensor in offbeat.run(worker, TWO_SPEEDS).results[0])
    assert all(
        tensor.isfinite().all() for tensor in offbeat.run(worker, Cluster.uniform(1)).results[0]
    )


def test_a_place_that_has_left_the_numbers_goes_back_to_the_base_too() -> None:
    mine = [torch.zeros(3)]
    layout = Layout(["weight"], mine)
    ahead = Shift(layout, alone=False)
    sums = [Flats(layout), Flats(layout), Flats(layout)]
    mine[0].fill_(float("inf"))
    list(ahead.give(0, sums[0], 1.0, waits=False))
    list(ahead.give(1, sums[1], 1.0, waits=False))
    bad, good = ((0, 0), None)
    ahead.begin(Round(0, sums[0], (1.0, 1.0), 2.0, (True,), bad=bad))
    assert mine[0].tolist() == [0, 0, 0]
    sums[1].views[0].fill_(2.0)
    ahead.begin(Round(1, sums[1], (1.0, 1.0), 2.0, (True,), bad=good))
    assert mine[0].tolist() == [1, 1, 1]
    list(ahead.give(2, sums[2], 1.0, waits=False))
    assert sums[2].views[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("algorithm", [local(), offbeat.LocalSGD(2)], ids=["abs", "local"])
def test_finite_gradients_are_applied_however_large_their_sum(
    algorithm: offbeat.Algorithm,
) -> None:
    def worker() -> tuple[list[float], offbeat.Stats]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=2.0**-126)
        with offbeat.attach(model, opt, algorithm) as dp:
            for _ in range(2):
                model.weight.grad = torch.full((1, 2), 2.0**127)
                opt.step()
        return model.weight.flatten().tolist(), dp.stats()

    for weights, stats in offbeat.run(worker, Cluster.uniform(2)).results:
        assert weights == [-4.0, -4.0]
        assert stats.pending_samples == 0


def test_state_dict_with_nothing_piled_up_is_refused_inside_agreed() -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, local(max_steps=1)) as dp:
            opt.zero_grad()
            loss(model, offbeat.rank(), 0).backward()
            opt.step()
            with dp.agreed():
                dp.state_dict()

    with pytest.raises(RuntimeError, match=r"inside dp.agreed\(\)"):
        offbeat.run(worker, SLOW_NETWORK)
