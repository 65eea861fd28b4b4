"""Large parameters: the same bits without copies, and nobody sees that memory is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from nets import same, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Layout, Round, layout, shared
from offbeat.testing import processes

TWO = Cluster.parse("workers = 2\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 0.1")
# More messages take no longer there, so rounds hold the same however many buckets there are.
INSTANT = Cluster.parse("workers = 4\nspeed = [1.0, 0.9, 0.5, 0.4]\n[compute]\nstep_s = 1.0")
WIDE = 12  # numbers in a row of a weight that is large here
LARGE = 4 * WIDE * WIDE

ALGORITHMS = [
    "SyncSGD()",
    "SyncSGD(overlap=False)",
    "SyncSGD(3)",
    "EagerSGD('all')",
    "EagerSGD('all', delay=1)",
    "EagerSGD()",
    "NonblockingSGD(2)",
    "DropCompute(1)",
    "LBBSP(1)",
    "MSyncSGD(4)",
]


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LARGE_BYTES", LARGE)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    wide = [nn.Linear(WIDE, WIDE) for _ in range(3)]
    return nn.Sequential(wide[0], nn.Tanh(), wide[1], nn.Tanh(), wide[2], nn.Linear(WIDE, 2))


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + offbeat.rank())
    model(torch.randn(4, WIDE, generator=generator)).square().mean().backward()


def address(tensor: Tensor) -> int:
    """Where its numbers lie; `data_ptr` would copy them first, if they were shared."""
    return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]


def test_a_large_parameter_has_a_bucket_of_its_own_before_the_small_ones_around_it() -> None:
    plan = Layout([str(n) for n in range(8)], list(net().parameters()))
    assert [each.parameters for each in plan.buckets] == [(4,), (2,), (0,), (7, 6, 5, 3, 1)]
    assert [slot.offset for slot in plan.slots] == [0, 50, 0, 38, 0, 26, 2, 0]


def _trained(algorithm: str, how: str) -> list[Any]:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        clip = 0.01 if how == "clipped" else None
        kept = []
        with offbeat.attach(model, opt, eval(algorithm, vars(offbeat)), clip_norm=clip) as dp:
            for step in range(9):
                opt.zero_grad(set_to_none=how != "zeroed")
                dp.samples(1 + offbeat.rank())
                backward(model, step)
                if how == "clipped by hand":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                if how == "on a worker" and (offbeat.rank(), step) == (1, 5):
                    model[2].weight.grad.mul_(0.5)
                opt.step()
                kept.append([None if p.grad is None else p.grad.clone() for p in opt_of(opt)])
        return [p.detach() for p in opt_of(opt)], kept

    return offbeat.run(worker, INSTANT).results


def opt_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in opt.param_groups for each in group["params"]]


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
@pytest.mark.parametrize("how", ["plain", "zeroed", "clipped", "clipped by hand", "on a worker"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_large_parameter_gets_the_bits_of_a_small_one(
    algorithm: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _trained(algorithm, how)
    monkeypatch.setattr(layout, "LARGE_BYTES", 2**40)
    for (mine, grads), (other, others) in zip(ours, _trained(algorithm, how), strict=True):
        assert same(mine, other)
        for a, b in zip(grads, others, strict=True):
            assert [x is None for x in a] == [x is None for x in b]
            assert same([x for x in a if x is not None], [x for x in b if x is not None])


def test_a_worker_that_has_launched_nothing_brings_its_large_gradients_again_if_others_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def worker() -> list[Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(3):
                opt.zero_grad()
                if step == 1 and offbeat.rank():  # the first bucket is never complete there
                    model[:3](torch.ones(2, WIDE)).square().mean().backward()
                    assert not dp._replica.overlap.launched
                else:
                    backward(model, step)
                    assert dp._replica.overlap.launched == (step < 2)
                if step == 1 and not offbeat.rank():
                    model[2].weight.grad.mul_(0.5)
                opt.step()
        return [p.detach() for p in model.parameters()]

    ours = offbeat.run(worker, TWO).results
    monkeypatch.setattr(shared, "fills_storage", lambda tensor: False)
    monkeypatch.setattr(layout, "fills_storage", lambda tensor: False)
    theirs = offbeat.run(worker, TWO).results
    assert all(same(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("algorithm", ["SyncSGD(overlap=False)", "EagerSGD('all')", "LBBSP(1)"])
def test_a_large_gradient_becomes_the_mean_where_it_lies(algorithm: str) -> None:
    def worker() -> list[tuple[int, int]]:
        model = net()
        opt = sgd(model)
        places = []
        with offbeat.attach(model, opt, eval(algorithm, vars(offbeat))):
            for step in range(4):
                opt.zero_grad()
                backward(model, step)
                before = address(model[2].weight.grad)
                opt.step()
                places.append((before, address(model[2].weight.grad)))
        return places

    for places in offbeat.run(worker, TWO).results:
        assert all(before == after for before, after in places)


def test_the_first_micro_batch_of_several_is_not_copied() -> None:
    def worker() -> list[bool]:
        model = net()
        opt = sgd(model)
        same_place = []
        with offbeat.attach(model, opt, offbeat.SyncSGD(3)) as dp:
            for step in range(6):
                opt.zero_grad()
                backward(model, step)
                before = address(model[2].weight.grad)
                opt.step()
                pile = dp._replica.engine.piles
                if step % 3 == 0:
                    same_place.append(address(pile.growing.flats.views[2]) == before)
        return same_place

    assert offbeat.run(worker, TWO).results == [[True, True]] * 2


@pytest.mark.parametrize("algorithm", ["SyncSGD()", "EagerSGD('all')", "EagerSGD('solo')"])
def test_what_the_program_keeps_of_gradients_stays_as_it_was(algorithm: str) -> None:
    """Its own, from before a step, and the mean, from after it: later rounds write elsewhere."""

    def worker() -> bool:
        model = net()
        opt = sgd(model)
        kept = []
        with offbeat.attach(model, opt, eval(algorithm, vars(offbeat))):
            for step in range(6):
                opt.zero_grad()
                backward(model, step)
                own = model[2].weight.grad.view(-1)[3:]  # a view of it, too
                kept.append((own, own.clone()))
                opt.step()
                if algorithm != "SyncSGD()":  # that has always written the mean into it
                    assert torch.equal(*kept[-1])
                if (mean := model[2].weight.grad) is not None:
                    kept.append((mean.view(-1)[3:], mean.view(-1)[3:].clone()))
        if algorithm == "SyncSGD()":
            kept = kept[1::2]
        return all(torch.equal(now, then) for now, then in kept)

    assert all(offbeat.run(worker, TWO).results)


def test_a_follower_reads_the_mean_of_a_round_of_large_gradients() -> None:
    def worker() -> list[bool]:
        model = net()
        opt = sgd(model)
        read = []

        def follow(model: nn.Module, round: Round) -> None:
            grads = [p.grad for p in model.parameters()]
            read.append(same(round.mean(), [each for each in grads if each is not None]))

        with offbeat.attach(model, opt) as dp:
            dp.on_round(follow)
            for step in range(4):
                opt.zero_grad()
                backward(model, step)
                opt.step()
        return read

    assert offbeat.run(worker, TWO).results == [[True] * 4] * 2


def test_what_is_shared_gets_memory_of_its_own_before_it_is_written_past_torch() -> None:
    one = torch.arange(6.0)
    other = shared.shared(one).view(2, 3)
    assert address(one) == address(other)
    assert shared.own(other) is other
    assert address(one) != address(other)
    assert torch.equal(one, other.view(-1))


def _beside_ddp(steps: int) -> list[bool]:
    """Whether parameters and gradients are those of DDP, in the same process, step by step."""
    dist.init_process_group("gloo")
    rank, alike = dist.get_rank(), []

    def make() -> nn.Module:
        torch.manual_seed(0)
        wide = nn.Linear(1100, 1000)
        return nn.Sequential(nn.Linear(64, 1100), nn.ReLU(), wide, nn.Linear(1000, 2))

    for algorithm in (offbeat.SyncSGD(), offbeat.SyncSGD(overlap=False), offbeat.EagerSGD("all")):
        model, wrapped = make(), DistributedDataParallel(make())
        opt, opt_ddp = sgd(model), sgd(wrapped)
        with offbeat.attach(model, opt, algorithm) as dp:
            assert len(dp._replica.layout.buckets) == 2
            for step in range(steps):
                torch.manual_seed(100 * step + rank)
                x = torch.randn(8, 64)
                kept: list[tuple[Tensor, Tensor]] = []
                for net_, opt_ in ((model, opt), (wrapped, opt_ddp)):
                    opt_.zero_grad()
                    net_(x).square().mean().backward()
                    if net_ is model:
                        own = model[2].weight.grad
                        kept.append((own, own.clone()))
                    opt_.step()
                if algorithm != offbeat.SyncSGD():  # that has always written the mean into it
                    assert all(torch.equal(now, then) for now, then in kept)
                pairs = list(zip(model.parameters(), wrapped.parameters(), strict=True))
                alike.append(same([a for a, _ in pairs], [b for _, b in pairs]))
                alike.append(same([a.grad for a, _ in pairs], [b.grad for _, b in pairs]))
    dist.destroy_process_group()
    return alike


@pytest.mark.real
def test_large_parameters_get_the_same_bits_as_with_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # to what counts as large by default
    for ended in processes(_beside_ddp, 2, 4):
        assert ended.result == [True] * 24


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
@pytest.mark.parametrize("how", ["assigned", "accumulated"])
@pytest.mark.parametrize("algorithm", ["SyncSGD()", "SyncSGD(3)", "EagerSGD('all')"])
def test_a_large_gradient_may_lie_in_memory_that_is_not_torchs_own(
    algorithm: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker() -> list[Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, eval(algorithm, vars(offbeat))):
            for step in range(6):
                opt.zero_grad()
                if how == "assigned":
                    backward(model, step)
                for each in model.parameters():
                    grad = each.grad
                    each.grad = torch.from_numpy(np.zeros(each.shape, np.float32))
                    if grad is not None:
                        each.grad.copy_(grad)
                if how == "accumulated":
                    backward(model, step)
                opt.step()
        return [each.detach() for each in model.parameters()]

    ours = offbeat.run(worker, TWO).results
    monkeypatch.setattr(layout, "LARGE_BYTES", 2**40)
    theirs = offbeat.run(worker, TWO).results
    assert all(same(mine, other) for mine, other in zip(ours, theirs, strict=True))
