"""A worker is stopped, the others go on without it, and it joins them again: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest
import torch
from test_joining_real import generator_and_judge
from torch.utils.data import DataLoader

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import NobodyToJoinError
from offbeat.testing import processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

FROZEN = 1
LIMIT_S = 2.0
FREEZES_S = 2.0  # all are attached by then, on a busy machine too
PACE = Cluster.parse("workers = 3\n[compute]\nstep_s = 0.02\n")


def _freeze(for_s: float) -> None:
    """Have this process stopped now, and continued by another one."""
    pid = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {pid}"]):
        os.kill(pid, signal.SIGSTOP)


def _paced(at_s: float, for_s: float) -> Cluster:
    return Cluster.parse(
        f"workers = 3\n[compute]\nstep_s = 0.02\n[[event]]\nkind = 'freeze'\nworker = {FROZEN}\n"
        f"at_s = {at_s!r}\nfor_s = {for_s!r}\n"
    )


def _train(algorithm: offbeat.Algorithm, for_s: float, ends_s: float | None) -> dict[str, Any]:
    """Train until the frozen one is back and has made some steps, or for so long.

    It is frozen when all are attached, however slow the machine; or else after some seconds.
    """
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pace = _paced(FREEZES_S, for_s) if ends_s else PACE
    settings: dict[str, Any] = {"survive": True, "freeze_s": LIMIT_S, "pace": pace}
    returned = 0
    with offbeat.attach(model, optimizer, algorithm, **settings) as dp:
        for step in dp.until(seconds=ends_s or 60.0):
            if step == 10 and dp.rank == FROZEN and ends_s is None:
                _freeze(for_s)
            returned += dp._world.returns
            if returned == 20 and ends_s is None:
                dp.stop()
            dp.samples(4)
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
    stats = dp.stats()
    return {
        "returned": returned,
        "identical": stats.replicas_identical,
        "pending": stats.pending_samples,
        "rounds": dp.round,
        "lost": stats.lost_samples,
        "momentum": sum(float(each["exp_avg_sq"].sum()) for each in optimizer.state.values()),
    }


@pytest.mark.parametrize(
    "algorithm",
    [offbeat.SyncSGD(), offbeat.EagerSGD("solo"), offbeat.RingleaderASGD(), offbeat.DPSGD()],
    ids=str,
)
def test_a_worker_that_was_stopped_is_back_and_like_the_others(
    algorithm: offbeat.Algorithm,
) -> None:
    told = [each.result for each in processes(_train, 3, algorithm, 2 * LIMIT_S, None)]
    assert [each["returned"] > 0 for each in told] == [False, True, False]  # the fault has happened
    for each in told:
        assert each["identical"]
        assert each["pending"] == pytest.approx(0.0)
        own = ("rounds", "momentum") if isinstance(algorithm, offbeat.DPSGD) else ()
        for what in {"rounds", "lost", "momentum"}.difference(own):
            assert each[what] == told[0][what]


def test_who_wakes_while_the_others_end_holds_up_nobody() -> None:
    """They end when it wakes, or a little later; it was expelled before that."""
    for_s = 1.1 * LIMIT_S
    zero, one, two = processes(_train, 3, offbeat.SyncSGD(), for_s, FREEZES_S + for_s, check=False)
    for each in (zero, two):
        assert each.error is None, each.error
        assert each.result["identical"]
    assert one.error is None or isinstance(one.error, NobodyToJoinError), one.error


def _deals(for_s: float) -> list[float]:
    """Train over dealt data; how often every sample was applied, as this worker has seen it."""
    model = torch.nn.ParameterList([torch.zeros(1200)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    deal = offbeat.Deal(range(1200), 2, shuffle=False)
    loader = DataLoader(range(1200), batch_sampler=deal, num_workers=1)  # type: ignore[arg-type]
    applied = torch.zeros(1200)
    settings: dict[str, Any] = {"survive": True, "freeze_s": LIMIT_S, "pace": PACE}
    with offbeat.attach(model, optimizer, offbeat.EagerSGD("solo"), **settings) as dp:
        dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
        for number, batch in enumerate(loader):
            if number == 20 and dp.rank == FROZEN:
                _freeze(for_s)
            optimizer.zero_grad()
            model[0][batch].sum().backward()
            optimizer.step()
    assert dp.stats().replicas_identical
    return [*applied.tolist(), float(dp._world.returns)]


def test_batches_that_a_loader_has_fetched_before_do_not_count_twice() -> None:
    zero, one, two = (each.result for each in processes(_deals, 3, 1.4 * LIMIT_S, check=True))
    assert [zero[-1], one[-1], two[-1]] == [0.0, 1.0, 0.0]
    assert zero[:-1] == two[:-1] == [1.0] * 1200


def _trains_two() -> dict[str, Any]:
    """A generator and its judge, by one method each, until the frozen one is back."""
    makes, judges, opt_g, opt_d = generator_and_judge()
    settings: dict[str, Any] = {"survive": True, "freeze_s": LIMIT_S, "pace": PACE}
    returned = 0
    with (
        offbeat.attach(makes, opt_g, offbeat.EagerSGD(), **settings) as g,
        offbeat.attach(judges, opt_d, offbeat.EagerSGD("solo"), **settings) as d,
    ):
        for step, _ in enumerate(g.until(seconds=90.0)):
            if step == 20 and g.rank == FROZEN:
                _freeze(5.0)
            returned += g._world.returns
            if returned == 20:
                g.stop()
            opt_d.zero_grad()
            judges(makes(torch.randn(8, 4)).detach()).square().mean().backward()
            opt_d.step()
            opt_g.zero_grad()
            judges(makes(torch.randn(8, 4))).square().mean().backward()
            opt_g.step()
    both = g.stats(), d.stats()
    return {
        "returned": returned,
        "identical": [each.replicas_identical for each in both],
        "pending": [each.pending_samples for each in both],
        "rounds": (g.round, d.round),
    }


def test_who_was_stopped_is_back_where_two_models_are_trained() -> None:
    told = [each.result for each in processes(_trains_two, 3, time_out_s=110)]
    assert [each["returned"] > 0 for each in told] == [False, True, False]
    for each in told:
        assert each["identical"] == [True, True]
        assert each["pending"] == pytest.approx([0.0, 0.0])
        assert each["rounds"] == told[0]["rounds"]
