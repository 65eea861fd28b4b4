"""Checkpoints after somebody was away: all workers' are of one round, and nothing is lost."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd
from torch import Tensor

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import DisagreementError, StuckWarning
from offbeat.worlds import enter_world
from offbeat.worlds.meeting import Meeting

pytestmark = pytest.mark.slow

CLUSTER = Cluster.parse("workers = 3\nspeed = [1.0, 0.7, 0.5]\n[compute]\nstep_s = 1.0")
LOCKSTEP = [
    offbeat.SyncSGD(),
    offbeat.SyncSGD(micro_batches=2),
    offbeat.LocalSGD(4),
    offbeat.DropCompute(2),
    offbeat.LBBSP(2),
    offbeat.DiLoCo(4),
    offbeat.LocalSGD(4, shares="speed"),
    offbeat.DaSGD(4, delay=2),
    offbeat.DiLoCo(4, overlap=2, quorum=2),
]
SAVES_AFTER = 10


def _sleep(seconds: float) -> None:
    world = enter_world()
    world.sleep_until(world.now() + seconds)


class Worker:
    """Trains, is away now and then, saves after some steps; or resumes, and trains the rest."""

    def __init__(self, algorithm: offbeat.Algorithm, saved: dict[int, bytes]) -> None:
        self.algorithm = algorithm
        self.saved = saved

    def __call__(self, away_after: dict[int, int], own: bool = False) -> Any:
        rank, model = offbeat.rank(), net()
        opt = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
        world = enter_world()
        metrics = world.channel("metrics")
        resumes = rank in self.saved
        if resumes:
            state = torch.load(io.BytesIO(self.saved[rank]))
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["optimizer"])
        with offbeat.attach(model, opt, self.algorithm, scheduler=scheduler) as dp:
            if resumes:
                dp.load_state_dict(state["dp"])
            for step in range(SAVES_AFTER if resumes else 0, 18):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                if away_after.get(rank) == step + 1 and not resumes:
                    with dp.away():
                        _sleep(7.0)
                if own and step + 1 == SAVES_AFTER - 3 and not resumes:
                    with world.elsewhere("a metric"):
                        metrics.all_reduce(torch.ones(1)).wait()
                if step + 1 == SAVES_AFTER and not resumes:
                    self.save(dp, model, opt)
        return parameters(model), dp.stats()

    def save(self, dp: Any, model: Any, opt: Any) -> None:
        state = {"dp": dp.state_dict(), "model": model.state_dict(), "optimizer": opt.state_dict()}
        torch.save(state, file := io.BytesIO())
        self.saved[dp.rank] = file.getvalue()


@pytest.mark.parametrize(
    ("away_after", "own"),
    [
        ({}, True),
        ({0: 4}, False),
        ({0: 10}, True),
        ({1: 9}, False),
        ({0: 3, 1: 10, 2: 10}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", LOCKSTEP, ids=str)
def test_checkpoints_at_the_same_place_in_the_loop_are_of_the_same_round(
    algorithm: offbeat.Algorithm, away_after: dict[int, int], own: bool
) -> None:
    saved: dict[int, bytes] = {}
    whole = offbeat.run(lambda: Worker(algorithm, saved)(away_after, own), CLUSTER).results
    states = [torch.load(io.BytesIO(saved[rank])) for rank in range(3)]
    assert len({state["dp"]["replica"]["round"] for state in states}) == 1
    resumed = offbeat.run(lambda: Worker(algorithm, saved)(away_after, own), CLUSTER).results
    for (mine, stats), (other, after) in zip(whole, resumed, strict=True):
        assert same(mine, whole[0][0])
        assert same(other, resumed[0][0])
        assert stats.replicas_identical
        assert after.replicas_identical
        assert stats.pending_samples == 0
    if algorithm in LOCKSTEP[:3]:  # no matter who is how fast
        assert same(whole[0][0], resumed[0][0])


@pytest.mark.parametrize("algorithm", LOCKSTEP[:3], ids=str)
def test_a_checkpoint_changes_nothing_of_the_training(algorithm: offbeat.Algorithm) -> None:
    class Saves(Worker):
        def save(self, *_: Any) -> None:
            pass

    with_it = offbeat.run(lambda: Worker(algorithm, {})({}), CLUSTER).results
    without = offbeat.run(lambda: Saves(algorithm, {})({}), CLUSTER).results
    for (mine, stats), (other, plain) in zip(with_it, without, strict=True):
        assert same(mine, other)
        assert stats.rounds == plain.rounds
        assert stats.staleness == plain.staleness


@pytest.mark.parametrize("algorithm", LOCKSTEP[:3], ids=str)
def test_workers_with_uneven_data_save_at_the_end_of_it(algorithm: offbeat.Algorithm) -> None:
    def worker() -> tuple[int, list[Tensor]]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for epoch in range(2):
                for step in range(4 + 2 * offbeat.rank()):
                    opt.zero_grad()
                    loss(model, offbeat.rank(), 10 * epoch + step).backward()
                    opt.step()
                state = dp.state_dict()
                with dp.agreed():
                    agreed = parameters(model)
        return state["replica"]["round"], agreed

    results = offbeat.run(worker, CLUSTER).results
    assert all(round == results[0][0] for round, _ in results)
    assert all(same(agreed, results[0][1]) for _, agreed in results)


@pytest.mark.parametrize("algorithm", LOCKSTEP, ids=str)
def test_the_others_save_though_one_has_left(algorithm: offbeat.Algorithm) -> None:
    def worker() -> tuple[int, list[Tensor]]:
        rank, model = offbeat.rank(), net()
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(3 if rank == 1 else 9):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                if step in (5, 7):
                    dp.state_dict()
        return dp.round, parameters(model)

    results = offbeat.run(worker, CLUSTER).results
    assert all(round == results[0][0] for round, _ in results)
    assert all(same(last, results[0][1]) for _, last in results)


def test_the_optimizer_may_be_saved_before_the_rounds_that_were_missed_come_in() -> None:
    """`optimizer.state_dict()` refers to its state, as a model's does: it must stay the same."""

    def worker() -> tuple[Tensor, Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(8):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if (offbeat.rank(), step) == (0, 1):
                    with dp.away():
                        _sleep(30.0)
                    early = opt.state_dict()
            dp.state_dict()
            late = opt.state_dict()
            if offbeat.rank():
                return torch.zeros(1), torch.zeros(1)
            return tuple(
                copy.deepcopy(each["state"][0]["momentum_buffer"]) for each in (early, late)
            )  # type: ignore[return-value]

    for early, late in offbeat.run(worker, CLUSTER).results:
        assert torch.equal(early, late)


def test_states_of_different_rounds_are_refused_together() -> None:
    def worker() -> None:
        rank, model = offbeat.rank(), net()
        opt = sgd(model)
        states = []
        with offbeat.attach(model, opt) as dp:
            for step in range(2):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                states.append(dp.state_dict())
        with offbeat.attach(model, opt) as dp:
            dp.load_state_dict(states[rank == 1])

    with pytest.raises(DisagreementError, match=r"round \d.*each worker.*one and the same moment"):
        offbeat.run(worker, CLUSTER)


def test_a_state_inside_away_is_refused() -> None:
    model = net()
    with offbeat.attach(model, sgd(model)) as dp, dp.away():
        with pytest.raises(RuntimeError, match=r"state_dict\(\) inside dp.away\(\)"):
            dp.state_dict()


def test_who_saves_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_STUCK_S", "0.5")

    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            for step in range(300):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if (offbeat.rank(), step) == (0, 10):
                    dp.state_dict()

    with pytest.warns(StuckWarning, match=r"worker 0 .* in dp.state_dict\(\).* every worker"):
        offbeat.run(worker, CLUSTER)


def test_learning_rates_are_agreed_after_the_optimizer_has_loaded_a_state() -> None:
    """Loading replaces its param groups: what was noted of the old ones is nobody's any more."""

    def train() -> list[float]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.SyncSGD()) as dp:
            opt.load_state_dict(opt.state_dict())
            for step in range(3):
                opt.param_groups[0]["lr"] = 0.01 * (1 + dp.rank)
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
        return [each.sum().item() for each in model.parameters()]

    first, *others = offbeat.run(train, CLUSTER).results
    assert others == [first, first]


@pytest.mark.parametrize(
    "algorithm",
    [
        *(offbeat.SyncSGD(), offbeat.EagerSGD("solo"), offbeat.EagerSGD(), offbeat.ABSSGD()),
        *(offbeat.WaitFreeLocalSGD(), offbeat.WAGMASGD(), offbeat.DPSGD("ring"), offbeat.ASGD()),
        *(offbeat.LocalSGD(2), offbeat.DaSGD(2), offbeat.MSyncSGD(2, top_up=True)),
    ],
    ids=repr,
)
def test_who_comes_back_late_from_a_checkpoint_is_not_paused_in_the_next_one(
    algorithm: offbeat.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the system runs a thread only some time after what it has waited for is there."""
    meet = Meeting.meet

    def meet_slowly(world: Any, name: str, *others: Any, **settings: Any) -> Any:
        met = meet(world, name, *others, **settings)
        if world.rank == 1 and "/resume/" in name:
            _sleep(7.0)
        return met

    monkeypatch.setattr(Meeting, "meet", meet_slowly)

    def worker() -> list[float]:
        rank, model, samples = offbeat.rank(), net(), []
        opt = sgd(model)
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(12):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                if step % 2:
                    samples.append(dp.state_dict()["applied"]["samples"])
        return samples

    first, *others = offbeat.run(worker, CLUSTER).results
    assert others == [first] * 2
