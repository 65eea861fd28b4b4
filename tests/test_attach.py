"""attach(): an ordinary loop, with nothing wrapped."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nets import batch, close, loss, net, parameters, plain, same, sgd, train
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import (
    DetachedError,
    DisagreementError,
    GradientError,
    NonFiniteGradientError,
)
from offbeat.replica.devices import Devices
from offbeat.worlds import enter_world

TWO, THREE, FOUR = (Cluster.uniform(n) for n in (2, 3, 4))


# --- one worker ----------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "sgd-foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True),
    "sgd-fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "adamw-foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "adam-fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.05}, {"params": m[2].parameters()}],  # type: ignore[index]
        lr=0.1,
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("samples", [None, 7])
def test_one_worker_alone_equals_plain_pytorch_bit_for_bit(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], samples: int | None
) -> None:
    size = None if samples is None else (lambda _: samples)
    trajectory, stats = train(optimizer=optimizer, size=size)
    expected = plain(1, optimizer=optimizer, size=size)
    assert all(same(a, b) for a, b in zip(trajectory, expected, strict=True))
    assert stats.rounds == 5
    assert stats.computed_samples == stats.applied_samples == 5 * (samples or 1)


def test_one_virtual_worker_equals_plain_pytorch_bit_for_bit() -> None:
    trajectory, _ = offbeat.run(train, Cluster.uniform(1)).results[0]
    assert all(same(a, b) for a, b in zip(trajectory, plain(1), strict=True))


def test_types_and_state_dict_keys_stay_as_they_are() -> None:
    model = net()
    optimizer = sgd(model)
    keys = list(model.state_dict())
    with offbeat.attach(model, optimizer):
        assert type(model) is nn.Sequential
        assert type(optimizer) is torch.optim.SGD
        assert list(model.state_dict()) == keys


# --- several workers -----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_several_workers_equal_one_with_the_union_of_their_data(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    results = offbeat.run(lambda: train(optimizer=optimizer), FOUR).results
    for trajectory, _ in results:
        for mine, expected in zip(trajectory, plain(4, optimizer=optimizer), strict=True):
            assert close(mine, expected)
        assert same(trajectory[-1], results[0][0][-1])


def test_parameters_and_buffers_start_from_worker_0() -> None:
    def worker() -> Any:
        torch.manual_seed(offbeat.rank())
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model[1].running_mean += offbeat.rank()  # type: ignore[operator]
        model[1].num_batches_tracked += offbeat.rank()  # type: ignore[operator]
        with offbeat.attach(model, sgd(model)):
            return copy.deepcopy(model.state_dict())

    states = offbeat.run(worker, THREE).results
    for state in states:
        for key, value in state.items():
            assert torch.equal(value, states[0][key]), key


def test_unequal_batches_give_the_mean_over_samples_not_over_workers() -> None:
    def size(rank: int) -> int:
        return (3, 1, 7)[rank]

    for trajectory, stats in offbeat.run(lambda: train(size=size), THREE).results:
        for mine, expected in zip(trajectory, plain(3, size=size), strict=True):
            assert close(mine, expected)
        assert stats.history[0].samples == 11


def test_samples_may_be_declared_after_backward_too() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(3):
                opt.zero_grad()
                size = 1 + offbeat.rank()
                loss(model, offbeat.rank(), step, size).backward()
                dp.samples(size)
                opt.step()
        return parameters(model)

    for mine in offbeat.run(worker, TWO).results:
        assert close(mine, plain(2, steps=3, size=lambda rank: 1 + rank)[-1])


def test_a_worker_that_runs_out_of_data_serves_the_others() -> None:
    def steps(rank: int) -> int:
        return (2, 5, 0)[rank]

    results = offbeat.run(lambda: train(steps=steps), THREE).results
    expected = plain(3, steps=steps)[-1]
    for rank, (trajectory, stats) in enumerate(results):
        assert close(trajectory[-1], expected)
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.rounds == 5
        assert stats.applied_samples == steps(rank)
    assert [round.ranks for round in results[2][1].history] == [(0, 1), (0, 1), (1,), (1,), (1,)]


def test_workers_may_break_out_of_the_loop() -> None:
    def worker() -> int:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(100):
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if step == offbeat.rank():
                    break
        return dp.round

    assert offbeat.run(worker, THREE).results == [3, 3, 3]


def test_close_serves_where_a_block_does_not_fit() -> None:
    def worker() -> int:
        model = net()
        opt = sgd(model)
        dp = offbeat.attach(model, opt)
        loss(model, 0, 0).backward()
        opt.step()
        dp.close()
        dp.close()
        return dp.round

    assert offbeat.run(worker, TWO).results == [1, 1]


def test_a_script_that_never_closes_is_joined_at_its_end() -> None:
    def worker() -> offbeat.Attachment:
        model = net()
        opt = sgd(model)
        dp = offbeat.attach(model, opt)
        for step in range(1 + offbeat.rank()):
            loss(model, 0, step).backward()
            opt.step()
        return dp

    assert [dp.round for dp in offbeat.run(worker, TWO).results] == [2, 2]


# --- accumulation --------------------------------------------------------------------------


def test_micro_batches_are_accumulated_over_steps() -> None:
    def worker() -> Any:
        trajectory, stats = train(steps=6, algorithm=offbeat.SyncSGD(micro_batches=3))
        return trajectory, stats

    model = net()
    opt = sgd(model)
    for round in range(2):
        opt.zero_grad()
        for rank in range(2):
            for step in range(3 * round, 3 * round + 3):
                (loss(model, rank, step) / 6).backward()
        opt.step()
    for trajectory, stats in offbeat.run(worker, TWO).results:
        assert same(trajectory[0], trajectory[1])
        assert not same(trajectory[1], trajectory[2])
        assert close(trajectory[-1], parameters(model))
        assert (stats.steps, stats.rounds) == (6, 2)


def test_what_is_pending_when_all_leave_is_still_applied() -> None:
    def worker() -> offbeat.Stats:
        return train(steps=4, algorithm=offbeat.SyncSGD(micro_batches=3))[1]

    for stats in offbeat.run(worker, TWO).results:
        assert stats.rounds == 2
        assert stats.applied_samples == stats.computed_samples == 4
        assert stats.pending_samples == 0


def test_no_sync_adds_up_gradients_as_ddp_does() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        rank = offbeat.rank()
        with offbeat.attach(model, opt) as dp:
            for round in range(2):
                opt.zero_grad()
                for step in range(2):
                    with dp.no_sync():
                        (loss(model, rank, 3 * round + step) / 3).backward()
                (loss(model, rank, 3 * round + 2) / 3).backward()
                opt.step()
        return parameters(model), dp.stats()

    model = net()
    opt = sgd(model)
    for round in range(2):
        opt.zero_grad()
        for rank in range(2):
            for step in range(3 * round, 3 * round + 3):
                (loss(model, rank, step) / 6).backward()
        opt.step()
    for mine, stats in offbeat.run(worker, TWO).results:
        assert close(mine, parameters(model))
        assert stats.compute_s == pytest.approx(2 * 3 * 0.1)  # six micro-batches were charged


def test_a_step_inside_no_sync_is_refused() -> None:
    model = net()
    opt = sgd(model)
    dp = offbeat.attach(model, opt)
    loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"inside dp\.no_sync"), dp.no_sync():
        opt.step()
    dp.close()


def test_gradients_kept_by_zero_grad_in_place_are_not_counted_twice() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt):
            for step in range(4):
                opt.zero_grad(set_to_none=False)
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return parameters(model)

    for mine in offbeat.run(worker, TWO).results:
        assert close(mine, plain(2, steps=4)[-1])


# --- clipping, schedules, precision --------------------------------------------------------


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
def test_clipping_between_backward_and_step_clips_each_workers_own_gradient() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt):
            for step in range(3):
                opt.zero_grad()
                (100 * loss(model, offbeat.rank(), step)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
        return parameters(model)

    model = net()
    opt = sgd(model)
    for step in range(3):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(2):
            opt.zero_grad()
            (100 * loss(model, rank, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for sum_, p in zip(total, model.parameters(), strict=True):
                assert p.grad is not None
                sum_ += p.grad / 2
        for sum_, p in zip(total, model.parameters(), strict=True):
            p.grad = sum_
        opt.step()
    for mine in offbeat.run(worker, TWO).results:
        assert close(mine, parameters(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(0.5),
        lambda p: p.grad.data.mul_(0.5),
        lambda p: setattr(p, "grad", p.grad * 0.5),
        lambda p: p.grad[:].mul_(0.5),
    ],
    ids=["in place", "by .data", "replaced", "by a view"],
)
def test_however_a_gradient_is_changed_before_the_step_the_change_counts(
    change: Callable[[nn.Parameter], Any],
) -> None:
    def worker(factor: float, changed: bool) -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt):
            for step in range(3):
                opt.zero_grad()
                (factor * loss(model, offbeat.rank(), step)).backward()
                if changed:
                    for parameter in model.parameters():
                        change(parameter)
                opt.step()
        return parameters(model)

    assert same(
        offbeat.run(lambda: worker(1.0, changed=True), TWO).results[1],
        offbeat.run(lambda: worker(0.5, changed=False), TWO).results[1],
    )


def test_a_change_on_one_worker_only_counts_too() -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        start = parameters(model)
        with offbeat.attach(model, opt):
            loss(model, 0, 0).backward()
            if offbeat.rank() == 1:
                for parameter in model.parameters():
                    parameter.grad.data.zero_()  # type: ignore[union-attr]
            opt.step()
        return start, parameters(model)

    model = net()
    (loss(model, 0, 0) / 2).backward()
    for start, mine in offbeat.run(worker, TWO).results:
        for before, after, parameter in zip(start, mine, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert torch.allclose(after, before - 0.1 * parameter.grad)


def test_a_backward_without_a_step_is_not_counted() -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(4):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                if step != 1 or offbeat.rank() == 0:
                    opt.step()
            opt.zero_grad()
            loss(model, offbeat.rank(), 99).backward()
        return parameters(model), dp.stats()

    (mine, stats_0), (other, stats_1) = offbeat.run(worker, TWO).results
    assert same(mine, other)
    assert (stats_0.applied_samples, stats_1.applied_samples) == (4, 3)
    model = net()
    opt = sgd(model)
    for parts in (((0, 0), (1, 0)), ((0, 1), (1, 2)), ((0, 2), (1, 3)), ((0, 3),)):
        opt.zero_grad()
        for rank, step in parts:
            (loss(model, rank, step) / len(parts)).backward()
        opt.step()
    assert close(mine, parameters(model))


def test_clip_norm_clips_the_averaged_gradient() -> None:
    def worker() -> float:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, opt, clip_norm=0.25):
            before = parameters(model)
            (100 * loss(model, offbeat.rank(), 0)).backward()
            opt.step()
            moved = torch.cat(
                [(a - b).flatten() for a, b in zip(before, parameters(model), strict=True)]
            )
        return moved.norm().item()

    assert offbeat.run(worker, TWO).results == pytest.approx([0.25, 0.25], rel=1e-4)


def test_a_scheduler_is_stepped_once_per_applied_round() -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        seen = []
        algorithm = offbeat.SyncSGD(micro_batches=2)
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler):
            for step in range(4):
                opt.zero_grad()
                loss(model, 0, step).backward()
                opt.step()
                seen.append(opt.param_groups[0]["lr"])
        return seen

    assert offbeat.run(worker, TWO).results == [[1.0, 0.5, 0.5, 0.25]] * 2


def test_a_round_is_applied_with_the_mean_of_learning_rates_that_differ() -> None:
    def worker() -> Any:
        model = nn.Linear(1, 1, bias=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt) as dp:
            model.weight.data.fill_(0)
            opt.param_groups[0]["lr"] = 0.3 if offbeat.rank() else 0.1
            dp.samples(1 if offbeat.rank() else 3)
            model(torch.ones(1, 1)).sum().backward()
            opt.step()
        return model.weight.item(), opt.param_groups[0]["lr"]

    (mine, my_rate), (other, other_rate) = offbeat.run(worker, TWO).results
    assert mine == other
    assert mine == pytest.approx(-(3 * 0.1 + 1 * 0.3) / 4)
    assert (my_rate, other_rate) == (0.1, 0.3)  # each scheduler finds what it has left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_summed_without_loss(dtype: torch.dtype) -> None:
    def worker() -> Any:
        model = nn.Linear(2, 1, bias=False).to(dtype)
        model.weight.data.fill_(0)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, opt) as dp:
            dp.samples(1000 if offbeat.rank() else 1001)
            model(torch.full((1, 2), 100.0 + offbeat.rank(), dtype=dtype)).sum().backward()
            opt.step()
        return model.weight.detach()

    for weight in offbeat.run(worker, TWO).results:
        assert weight.dtype == dtype
        assert torch.allclose(-weight.double(), torch.tensor(100.5).double(), rtol=5e-3)


def test_mixed_precisions_in_one_model_work() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 4, dtype=torch.bfloat16)
            self.high = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x.bfloat16()).float())

    def worker() -> Any:
        torch.manual_seed(0)
        model = Mixed()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(3):
                opt.zero_grad()
                torch.manual_seed(step + 10 * offbeat.rank())
                model(torch.randn(3, 4)).pow(2).mean().backward()
                opt.step()
            assert dp.replicas_identical()
        return parameters(model)

    results = offbeat.run(worker, TWO).results
    assert same(*results)
    assert results[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_scales_unscales_and_skips(fused: bool) -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        rank = offbeat.rank()
        with offbeat.attach(model, opt) as dp:
            for step in range(4):
                opt.zero_grad()
                value = loss(model, rank, step)
                if step == 2 and rank == 1:
                    value = value * float("inf")
                scaler.scale(value).backward()
                scaler.step(opt)
                scaler.update()
        assert dp.stats().replicas_identical
        return parameters(model), scaler.get_scale(), dp.stats().applied_samples

    (mine, scale_0, applied_0), (other, scale_1, applied_1) = offbeat.run(worker, TWO).results
    assert same(mine, other)
    assert (scale_0, scale_1) == (8.0, 4.0)
    assert (applied_0, applied_1) == (4, 3)
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    # Worker 1's third micro-batch overflowed, so its fourth went into the third round.
    for parts in (((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2), (1, 3)), ((0, 3),)):
        opt.zero_grad()
        for rank, step in parts:
            (loss(model, rank, step) / len(parts)).backward()
        opt.step()
    assert close(mine, parameters(model))


# --- which parameters ----------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


def test_parameters_used_by_some_workers_only_are_averaged_over_all() -> None:
    def worker() -> Any:
        torch.manual_seed(0)
        model = Branches()
        opt = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        start = parameters(model)
        with offbeat.attach(model, opt):
            model(torch.ones(1, 2), left=offbeat.rank() == 0).sum().backward()
            opt.step()
        return start, parameters(model)

    (start, mine), (_, other) = offbeat.run(worker, TWO).results
    assert same(mine, other)
    assert torch.allclose(mine[1], start[1] - 0.5 - 0.1 * start[1])  # half of the bias' gradient
    assert torch.equal(mine[4], start[4])  # nobody used it: not even weight decay


def test_a_parameter_frozen_later_stays_where_it_is() -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt):
            for step in range(4):
                if step == 2:
                    model[0].requires_grad_(False)
                    frozen = parameters(model)
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return frozen, parameters(model)

    (frozen, mine), (_, other) = offbeat.run(worker, TWO).results
    assert same(mine, other)
    assert torch.equal(mine[0], frozen[0])
    assert not torch.equal(mine[2], frozen[2])


def test_a_parameter_unfrozen_later_is_trained() -> None:
    def worker() -> Any:
        model = net()
        model[0].requires_grad_(False)
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            start = parameters(model)
            for step in range(4):
                model[0].requires_grad_(step >= 2)
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
            assert dp.replicas_identical()
        return start, parameters(model)

    start, end = offbeat.run(worker, TWO).results[0]
    assert not torch.equal(start[0], end[0])


def test_many_small_buckets_give_the_same_bits_as_one() -> None:
    whole, small = (
        offbeat.run(lambda cap=cap: train(bucket_bytes=cap), TWO).results[0][0][-1]
        for cap in (25 * 2**20, 16)
    )
    assert same(whole, small)


def test_channels_last_parameters_keep_their_strides() -> None:
    def worker() -> Any:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        opt = torch.optim.Adam(model.parameters(), fused=True)
        with offbeat.attach(model, opt):
            model(torch.randn(2, 3, 5, 5)).mean().backward()
            opt.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        return parameters(model)

    assert same(*offbeat.run(worker, TWO).results)


def test_buffers_are_averaged_at_the_end() -> None:
    def worker() -> Any:
        model = nn.BatchNorm1d(2, momentum=1.0)
        with offbeat.attach(model, sgd(model)):
            model(torch.tensor([[0.0, 0.0], [2.0, 2.0]]) + 10 * offbeat.rank())
        return model.running_mean, model.num_batches_tracked

    for mean, tracked in offbeat.run(worker, TWO).results:
        assert mean.tolist() == [6.0, 6.0]
        assert tracked == 1


def test_two_models_can_be_attached_at_a_time() -> None:
    def worker() -> Any:
        one, two = net(1), net(2)
        opt_1, opt_2 = sgd(one), sgd(two)
        with offbeat.attach(one, opt_1) as dp_1, offbeat.attach(two, opt_2) as dp_2:
            for step in range(2):
                for model, opt in ((one, opt_1), (two, opt_2)):
                    opt.zero_grad()
                    loss(model, offbeat.rank(), step).backward()
                    opt.step()
            assert dp_1.replicas_identical()
            assert dp_2.replicas_identical()
        return dp_1.round, dp_2.round

    assert offbeat.run(worker, TWO).results == [(2, 2)] * 2


# --- accelerators --------------------------------------------------------------------------


def test_a_worker_has_computed_when_its_device_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for an accelerator whose queued work takes 3 seconds more."""

    def finish(_: Devices) -> None:
        world = enter_world()
        world.sleep_until(world.now() + 3.0)

    monkeypatch.setattr(Devices, "finish", finish)
    results = offbeat.run(lambda: train(2)[1], Cluster.uniform(2)).results
    assert [stats.compute_s for stats in results] == [6.0, 6.0]


def test_every_kind_of_accelerator_is_waited_for_and_the_cpu_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []

    class Stream:
        def __init__(self, device: object) -> None:
            self.device = str(device)

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    devices = Devices([torch.zeros(1), torch.zeros(1)])
    assert not devices._accelerators
    devices._accelerators = [torch.device("cuda:1"), torch.device("mps")]
    devices.finish()
    assert waited == ["cuda:1", "mps"]


# --- schedulers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["StepLR", "SequentialLR", "ChainedScheduler"])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.EagerSGD("solo")], ids=str)
def test_a_scheduler_that_is_handed_over_and_stepped_by_hand_is_refused(
    algorithm: offbeat.Algorithm, steps: int, kind: str
) -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        rates = torch.optim.lr_scheduler
        parts: list[Any] = [rates.StepLR(opt, 3), rates.ExponentialLR(opt, 0.9)]
        scheduler = {
            "StepLR": lambda: parts[0],
            "SequentialLR": lambda: rates.SequentialLR(opt, parts, milestones=[2]),
            "ChainedScheduler": lambda: rates.ChainedScheduler(parts),
        }[kind]()
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler):
            for step in range(steps):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                scheduler.step()

    with pytest.raises(RuntimeError, match=r"scheduler.step\(\) was called by hand"):
        offbeat.run(worker, TWO)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.EagerSGD("solo")], ids=str)
def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(
    algorithm: offbeat.Algorithm, optimizer: str
) -> None:
    """Though workers hold different ones, and rounds are folded while worker 0 is away."""

    def worker() -> tuple[list[Tensor], set[float]]:
        rank, model, seen = offbeat.rank(), net(), set()
        rate = torch.tensor(0.01 * (1 + rank))
        opt = getattr(torch.optim, optimizer)(model.parameters(), lr=rate)
        opt.register_step_post_hook(lambda *_: seen.add(round(float(rate), 4)))
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(12):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                assert opt.param_groups[0]["lr"] is rate
                assert float(rate) == pytest.approx(0.01 * (1 + rank))
                if (rank, step) == (0, 2):
                    with dp.away():
                        while dp.seconds < 9:
                            world = enter_world()
                            world.sleep_until(world.now() + 0.1)
                            assert float(rate) == pytest.approx(0.01)
        assert opt.param_groups[0]["lr"] is rate
        return parameters(model), seen

    results = offbeat.run(worker, Cluster.uniform(2, step_s=1.0)).results
    assert same(results[0][0], results[1][0])
    if algorithm == offbeat.SyncSGD():
        assert 0.015 in results[1][1]  # what a step of both is made with


# --- checkpoints ---------------------------------------------------------------------------


def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_round() -> None:
    algorithm = offbeat.SyncSGD(micro_batches=2)

    def worker(until: int, saved: list[bytes], begin: int = 0) -> Any:
        rank = offbeat.rank()
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.9)
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler) as dp:
            if begin:
                state = torch.load(io.BytesIO(saved[rank]), weights_only=True)
                model.load_state_dict(state["model"])
                opt.load_state_dict(state["optimizer"])
                dp.load_state_dict(state["dp"])
            for step in range(begin, until):
                opt.zero_grad()
                x, y = batch(rank, step)
                nn.functional.mse_loss(nn.functional.dropout(model(x), 0.5), y).backward()
                opt.step()
                if step == 2 and not begin:
                    file = io.BytesIO()
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "optimizer": opt.state_dict(),
                            "dp": dp.state_dict(),
                        },
                        file,
                    )
                    saved[rank] = file.getvalue()
        return parameters(model), dp.round

    saved = [b"", b""]
    whole = offbeat.run(lambda: worker(6, saved), TWO, seed=1).results
    resumed = offbeat.run(lambda: worker(6, saved, begin=3), TWO, seed=2).results
    assert same(whole[0][0], resumed[0][0])
    assert whole[0][1] == resumed[0][1] == 3


def test_a_state_from_another_set_up_is_refused() -> None:
    model = net()
    dp = offbeat.attach(model, sgd(model))
    state = dp.state_dict()
    for key, value, message in (
        ("algorithm", "SyncSGD(micro_batches=9)", "algorithm"),
        ("world_size", 4, "world_size 4, but here it is 1"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.load_state_dict({**state, key: value})
    dp.close()


def test_a_state_between_backward_and_step_is_refused() -> None:
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, bucket_bytes=64) as dp:
        loss(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match=r"after optimizer\.step"):
            dp.state_dict()
        opt.step()


# --- bad input -----------------------------------------------------------------------------


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"LBFGS.step\(\) needs a closure"):
        offbeat.attach(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("named", [True, False])
def test_a_closure_is_run_once_and_its_loss_returned(named: bool) -> None:
    def steps(attached: bool, closing: bool) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = net()
        opt = sgd(model)
        calls: list[float] = []

        def closure() -> torch.Tensor:
            opt.zero_grad()
            (it := loss(model, 0, len(calls))).backward()
            calls.append(it.item())
            return it

        with offbeat.attach(model, opt) if attached else nullcontext():
            for _ in range(3):
                if closing:
                    returned = opt.step(closure=closure) if named else opt.step(closure)
                    assert returned is not None
                    assert returned.item() == calls[-1]
                else:
                    closure()
                    opt.step(None)
        assert len(calls) == 3
        return [each.detach().clone() for each in model.parameters()], calls

    plain = steps(attached=False, closing=True)
    for closing in (True, False):
        mine = steps(attached=True, closing=closing)
        assert same(plain[0], mine[0])
        assert plain[1] == mine[1]


def test_a_step_after_the_block_is_refused_until_detached() -> None:
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt) as dp:
        pass
    with pytest.raises(DetachedError, match="after the attached block has ended"):
        opt.step()
    dp.detach()
    opt.step()


def test_an_optimizer_can_be_attached_again_after_its_block() -> None:
    model = net()
    opt = sgd(model)
    for _ in range(2):
        with offbeat.attach(model, opt) as dp:
            loss(model, 0, 0).backward()
            opt.step()
        assert dp.round == 1


def test_nothing_is_kept_of_what_was_attached() -> None:
    def worker() -> weakref.ref[torch.nn.Module]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt):
            loss(model, 0, 0).backward()
            opt.step()
        return weakref.ref(model)

    model = offbeat.run(worker, Cluster.uniform(1)).results[0]
    gc.collect()
    assert model() is None


def test_two_attachments_to_one_optimizer_are_refused() -> None:
    model = net()
    opt = sgd(model)
    with (
        offbeat.attach(model, opt),
        pytest.raises(DetachedError, match="attached already"),
    ):
        offbeat.attach(model, opt)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "many"])
def test_a_sample_count_must_be_a_number_above_zero(value: Any) -> None:
    model = net()
    with (
        offbeat.attach(model, sgd(model)) as dp,
        pytest.raises(ValueError, match="samples must be a number above 0, got"),
    ):
        dp.samples(value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a number above 0, got 0.0"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of 'raise', 'skip', got 'ignore'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        offbeat.attach(model, sgd(model), **settings)


def test_wrong_kinds_of_arguments_are_refused() -> None:
    model = net()
    opt = sgd(model)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
    elsewhere = torch.optim.lr_scheduler.StepLR(sgd(net()), 1)
    wrong: Any = "eager"
    for call, kind in (
        (lambda: offbeat.attach(wrong, opt), TypeError),
        (lambda: offbeat.attach(model, wrong), TypeError),
        (lambda: offbeat.attach(model, opt, wrong), TypeError),
        (lambda: offbeat.attach(model, opt, scheduler=plateau), TypeError),
        (lambda: offbeat.attach(model, opt, scheduler=elsewhere), ValueError),
    ):
        with pytest.raises(kind):
            call()
    with offbeat.attach(model, opt):  # nothing was stored
        pass


def test_micro_batches_must_be_positive() -> None:
    with pytest.raises(ValueError, match="micro_batches must be a whole number above 0, got 0"):
        offbeat.SyncSGD(micro_batches=0)


def _disagree(what: str) -> None:
    odd = offbeat.rank() == 2
    model = nn.Linear(4 if odd and what == "shape" else 3, 3)
    if odd and what == "dtype":
        model = model.double()
    opt = (
        torch.optim.Adam(model.parameters())
        if odd and what == "optimizer"
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    algorithm = offbeat.SyncSGD(micro_batches=2 if odd and what == "settings" else 1)
    with offbeat.attach(model, opt, algorithm):
        pass


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"parameters: worker 0 has weight of shape \(3, 3\).*worker 2 .*\(3, 4\)"),
        ("dtype", "torch.float32, worker 2 has weight of shape .* torch.float64"),
        ("settings", r"the algorithm: worker 0 has SyncSGD\(micro_batches=1.*worker 2 .*=2"),
        ("optimizer", "the optimizer: worker 0 has SGD, worker 2 has Adam"),
    ],
)
def test_workers_that_disagree_find_out_at_attach(what: str, message: str) -> None:
    with pytest.raises(DisagreementError, match=message):
        offbeat.run(lambda: _disagree(what), THREE)


def _not_finite(nonfinite: str, accumulate: int = 1) -> Any:
    model = net()
    opt = sgd(model)
    algorithm = offbeat.SyncSGD(micro_batches=accumulate)
    with offbeat.attach(model, opt, algorithm, nonfinite=nonfinite) as dp:  # type: ignore[arg-type]
        for step in range(4 * accumulate):
            opt.zero_grad()
            value = loss(model, offbeat.rank(), step)
            if step == accumulate and offbeat.rank() == 1:
                value = value + model[2].bias.sum() * float("nan")
            value.backward()
            opt.step()
    return parameters(model), dp.stats()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_is_not_finite_names_rank_round_and_parameter(accumulate: int) -> None:
    with pytest.raises(NonFiniteGradientError) as caught:
        offbeat.run(lambda: _not_finite("raise", accumulate), THREE)
    assert (caught.value.rank, caught.value.round, caught.value.parameter) == (1, 1, "2.bias")
    assert str(caught.value).startswith(
        "the gradient of '2.bias' on worker 1 is NaN or infinite in round 1"
    )


def test_a_round_that_is_not_finite_can_be_skipped_and_is_counted() -> None:
    results = offbeat.run(lambda: _not_finite("skip"), THREE).results
    for mine, stats in results:
        assert same(mine, results[0][0])
        assert all(p.isfinite().all() for p in mine)
        assert (stats.rounds, stats.skipped_rounds) == (3, 1)
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples == 4
        assert stats.dropped_samples == 1


@pytest.mark.parametrize(
    "algorithm",
    [offbeat.SyncSGD(), offbeat.LocalSGD(), offbeat.WaitFreeLocalSGD(), offbeat.WAGMASGD()],
    ids=str,
)
def test_sparse_gradients_are_refused(algorithm: offbeat.Algorithm) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(GradientError, match="'weight' is sparse: use sparse=False"),
        offbeat.attach(model, opt, algorithm),
    ):
        model(torch.tensor([1])).sum().backward()
        opt.step()


def test_complex_parameters_are_refused() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(GradientError, match=r"'bias' is of torch\.complex64"):
        offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_param_groups_added_later_are_refused() -> None:
    model, extra = net(), nn.Linear(2, 2)
    opt = sgd(model)
    with (
        pytest.raises(DetachedError, match="has 6 parameters, but had 4 when it was attached"),
        offbeat.attach(model, opt),
    ):
        opt.add_param_group({"params": extra.parameters()})
        opt.step()


def test_an_error_in_the_block_is_the_one_that_is_raised() -> None:
    model = net()
    with pytest.raises(KeyError, match="oops"), offbeat.attach(model, sgd(model)):
        raise KeyError("oops")


# --- time ----------------------------------------------------------------------------------


def test_stats_tell_compute_from_waiting() -> None:
    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.5]\n[compute]\nstep_s = 1.0")
    fast, slow = (stats for _, stats in offbeat.run(lambda: train(steps=4), cluster).results)
    assert (fast.compute_s, fast.wait_s) == pytest.approx((4.0, 4.0))
    assert (slow.compute_s, slow.wait_s) == pytest.approx((8.0, 0.0))
    assert fast.utilization == pytest.approx(0.5)
    assert [round.waited_s for round in fast.history] == pytest.approx([1.0] * 4)
    assert fast.staleness == {0: 4}


def test_buckets_are_reduced_while_backward_still_runs() -> None:
    # Two buckets of one second each on the network; a step of 3 s: 1 s forward, 2 s backward.
    # The first bucket is ready at 2 s, so only the second one is seen: 4 s instead of 5 s.
    text = """
        workers = 2
        [compute]
        step_s = 3.0
        [network]
        bandwidth_bytes_per_s = 400
        all_reduce = "ring"
    """

    def worker(overlap: bool) -> float:
        model = nn.Sequential(nn.Linear(100, 1, bias=False), nn.Linear(1, 100, bias=False))
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.SyncSGD(overlap=overlap), bucket_bytes=400) as dp:
            model(torch.ones(1, 100)).sum().backward()
            opt.step()
        return dp.stats().history[0].waited_s

    waits = {
        overlap: offbeat.run(lambda overlap=overlap: worker(overlap), Cluster.parse(text)).results
        for overlap in (False, True)
    }
    assert waits[False][0] - waits[True][0] == pytest.approx(1.0)


def test_a_scripted_leave_ends_the_block_quietly() -> None:
    cluster = Cluster.parse(
        """
        workers = 2
        [compute]
        step_s = 1.0
        [[event]]
        kind = "leave"
        worker = 1
        at_s = 2.5
        """
    )
    (mine, stats_0), (other, stats_1) = (
        (trajectory[-1], stats) for trajectory, stats in offbeat.run(train, cluster).results
    )
    assert same(mine, other)
    assert (stats_0.steps, stats_1.steps) == (5, 3)
    assert stats_1.rounds == 5
