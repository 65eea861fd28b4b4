"""A worker that is away holds up nobody, loses nothing, and costs a constant amount of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd
from test_contract import ALGORITHMS, BUCKETS
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds.log import MOST
from offbeat.worlds import enter_world

EIGHT = Cluster.parse("workers = 4\nspeed = [1.0, 1.0, 0.7, 0.5]\n[compute]\nstep_s = 1.0")
NAMES = [name for name in ALGORITHMS if not name.startswith("eager-first")]


def _sleep(seconds: float) -> None:
    world = enter_world()
    world.sleep_until(world.now() + seconds)


@pytest.mark.parametrize("name", NAMES)
def test_the_others_train_on_while_one_is_away(name: str) -> None:
    def worker() -> tuple[float, list[torch.Tensor], offbeat.Stats]:
        torch.manual_seed(0)
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, ALGORITHMS[name].make(4), bucket_bytes=BUCKETS) as dp:
            for step in range(24):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if (offbeat.rank(), step) == (0, 5):
                    with dp.away():
                        _sleep(1000.0)
            ended = dp.seconds
        return ended, parameters(model), dp.stats()

    results = offbeat.run(worker, EIGHT).results
    assert all(ended < 500 for ended, _, _ in results[1:])
    for _, last, stats in results:
        assert same(last, results[0][1])
        assert stats.replicas_identical
        assert stats.pending_samples == 0
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples


@pytest.mark.parametrize("name", NAMES)
def test_collectives_of_the_programs_own_meet_after_any_number_of_steps(name: str) -> None:
    def worker() -> tuple[list[float], list[torch.Tensor]]:
        model, world, sums = net(), enter_world(), []
        opt, metrics = sgd(model), world.channel("metrics")
        with offbeat.attach(model, opt, ALGORITHMS[name].make(4), bucket_bytes=BUCKETS):
            for epoch in range(3):
                for step in range(2 + 3 * offbeat.rank() - 2 * epoch * (offbeat.rank() > 1)):
                    opt.zero_grad()
                    loss(model, offbeat.rank(), step).backward()
                    opt.step()
                metric = torch.ones(1)
                with world.elsewhere("the end of an epoch"):
                    metrics.all_reduce(metric).wait()
                sums.append(metric.item())
        return sums, parameters(model)

    results = offbeat.run(worker, EIGHT).results
    assert all(sums == [4.0] * 3 for sums, _ in results)
    assert all(same(last, results[0][1]) for _, last in results)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize(
    "algorithm",
    [offbeat.SyncSGD(), offbeat.EagerSGD("solo"), offbeat.ABSSGD(), offbeat.WAGMASGD()],
    ids=str,
)
def test_the_log_stays_short_while_one_is_away(algorithm: Any, nonfinite: Any) -> None:
    def worker() -> tuple[int, list[torch.Tensor]]:
        model, longest = net(), 0
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        with offbeat.attach(model, opt, algorithm, nonfinite=nonfinite) as dp:
            for step in range(40):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                if (offbeat.rank(), step) == (1, 20) and nonfinite == "skip":
                    next(model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
                opt.step()
                if (offbeat.rank(), step) == (0, 3):
                    with dp.away():
                        while dp.seconds < 80:
                            _sleep(0.25)
                            longest = max(longest, len(dp._replica.engine.log))
        return longest, parameters(model)

    results = offbeat.run(worker, EIGHT).results
    assert results[0][0] <= MOST + 1
    assert all(same(last, results[0][1]) for _, last in results)


@pytest.mark.parametrize("overflows", [1, 0])
@pytest.mark.parametrize("algorithm", [offbeat.LocalSGD(2), offbeat.WaitFreeLocalSGD()], ids=str)
def test_the_log_stays_short_though_a_round_of_moves_is_left_out(
    algorithm: Any, overflows: int
) -> None:
    """Worker 1's parameters overflow while worker 0 is away; or worker 0's own, before."""

    def worker() -> tuple[int, list[torch.Tensor], offbeat.Stats]:
        model, longest = net(), 0
        opt = torch.optim.SGD(model.parameters(), lr=10.0)
        with offbeat.attach(model, opt, algorithm, nonfinite="skip") as dp:
            for step in range(40):
                opt.zero_grad()
                (loss(model, offbeat.rank(), step) / 1000).backward()
                if (offbeat.rank(), step) == ((1, 20) if overflows else (0, 3)):
                    next(model.parameters()).grad.fill_(1e38)  # type: ignore[union-attr]
                opt.step()
                if (offbeat.rank(), step) == (0, 3):
                    with dp.away():
                        while dp.seconds < 80:
                            _sleep(0.25)
                            longest = max(longest, len(dp._replica.engine.log))
        return longest, parameters(model), dp.stats()

    results = offbeat.run(worker, EIGHT).results
    assert results[0][0] <= MOST + 1
    for _, last, stats in results:
        assert same(last, results[0][1])
        assert all(each.isfinite().all() for each in last)
        assert stats.skipped_rounds >= 1
        assert stats.pending_samples == 0
        assert sum(0 in one.ranks for one in stats.history) >= 3  # it takes part again


def test_nothing_is_folded_while_the_program_adopts_what_was() -> None:
    """On processes, the others may make many rounds just then: replicas would differ."""

    def worker() -> list[bool]:
        model, adopted = net(), []
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")) as dp:
            engine = dp._replica.engine
            merge: Any = engine.merge
            adopt = merge.adopt

            def noted() -> None:
                adopted.append(engine._may_fold_now())
                adopt()

            merge.adopt = noted
            for step in range(40):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if offbeat.rank() == 0 and step == 3:
                    while dp.seconds < 20 or engine.log:  # computes, and all is folded then
                        _sleep(0.01)
                    with dp.agreed():
                        pass
        return adopted

    adopted = offbeat.run(worker, EIGHT).results[0]
    assert adopted
    assert not any(adopted)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_rounds_that_were_folded_leave_the_bits_of_rounds_that_were_applied(optimizer: str) -> None:
    def worker() -> tuple[list[torch.Tensor], dict[str, Any]]:
        model = net()
        opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        with offbeat.attach(model, opt, offbeat.EagerSGD(1), scheduler=scheduler, clip_norm=0.5):
            for step in range(30 if offbeat.rank() else 3):  # worker 0 computes for long
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return parameters(model), opt.state_dict()

    cluster = Cluster.parse("workers = 3\nspeed = [0.05, 1.0, 1.0]\n[compute]\nstep_s = 1.0")
    results = offbeat.run(worker, cluster).results
    for last, state in results:
        assert same(last, results[0][0])
        assert state["param_groups"] == results[0][1]["param_groups"]
        for number, mine in state["state"].items():
            for name, value in mine.items():
                assert torch.equal(torch.as_tensor(value), results[0][1]["state"][number][name])


def test_away_is_refused_where_it_cannot_be() -> None:
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt) as dp:
        hook = next(model.parameters()).register_hook(lambda _: dp.away().__enter__())
        with pytest.raises(RuntimeError, match=r"dp.away\(\) inside backward\(\)"):
            loss(model, 0, 0).backward()
        hook.remove()
        opt.zero_grad()
        loss(model, 0, 0).backward()
        with dp.away(), pytest.raises(RuntimeError, match=r"optimizer.step\(\) inside dp.away"):
            opt.step()
        opt.step()


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_that_only_some_workers_change_are_averaged_as_they_are(
    who: tuple[int, ...], micro_batches: int
) -> None:
    def worker(overlap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = offbeat.SyncSGD(micro_batches=micro_batches, overlap=overlap)
        with offbeat.attach(model, opt, algorithm, bucket_bytes=64):
            for step in range(7 - 3 * (offbeat.rank() == 2)):
                opt.zero_grad()
                x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
                model(x + offbeat.rank()).square().mean().backward()
                if offbeat.rank() in who and step % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                opt.step()
        return parameters(model)

    early = offbeat.run(lambda: worker(True), Cluster.uniform(3)).results
    late = offbeat.run(lambda: worker(False), Cluster.uniform(3)).results
    for mine, theirs in zip(early, late, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_a_pending_gradient_keeps_its_learning_rate_in_a_checkpoint() -> None:
    saved: dict[int, Any] = {}

    def worker(resumes: bool) -> list[torch.Tensor]:
        rank, model = offbeat.rank(), net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if resumes:
            model.load_state_dict(saved[rank][1])
        with offbeat.attach(model, opt, offbeat.SyncSGD(2)) as dp:
            if resumes:
                dp.load_state_dict(saved[rank][0])
            for step in () if resumes else range(3):  # a micro-batch is left
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
            if not resumes:
                saved[rank] = copy.deepcopy((dp.state_dict(), model.state_dict()))
            for step in range(3, 5 if rank == 0 else 3):  # worker 1 brings only what is left
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
        return parameters(model)

    whole = offbeat.run(lambda: worker(False), Cluster.uniform(2)).results
    resumed = offbeat.run(lambda: worker(True), Cluster.uniform(2)).results
    assert same(whole[0], resumed[0])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launches", [True, False], ids=["launched", "not launched"])
def test_what_is_not_finite_on_the_pile_is_found_though_its_worker_is_away(
    rank: int, launches: bool
) -> None:
    """Nobody looks at a pile before a round takes it; here its launched buckets go again, too."""

    def worker() -> tuple[offbeat.Stats, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = offbeat.SyncSGD(micro_batches=2)
        with offbeat.attach(model, opt, algorithm, nonfinite="skip", bucket_bytes=64) as dp:
            for step in range(6):
                opt.zero_grad()
                bad = (offbeat.rank(), step) == (rank, 2)
                (model(torch.ones(2, 4)).sum() * (float("nan") if bad else 1.0)).backward()
                opt.step()
                if bad:
                    if launches:
                        opt.zero_grad()
                        model(torch.ones(2, 4)).sum().backward()
                    with dp.away():
                        _sleep(100.0)
        return dp.stats(), parameters(model)

    results = offbeat.run(worker, Cluster.uniform(2, step_s=1.0)).results
    for stats, last in results:
        assert stats.skipped_rounds == 1
        assert all(tensor.isfinite().all() for tensor in last)
        assert same(last, results[0][1])
