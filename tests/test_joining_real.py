"""A worker is killed, started again, and joins the others: real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launched

import offbeat
from offbeat import launched
from offbeat.testing import processes

pytestmark = pytest.mark.real

VICTIM = 1


def _train(algorithm: offbeat.Algorithm, other: bool = False) -> dict[str, Any]:
    """Train until the joiner has made some steps, and says so; the victim dies before."""
    joins = launched.joins()
    torch.manual_seed(int(os.environ["RANK"]))
    width = 50 if joins and other else 60
    model = torch.nn.Sequential(
        torch.nn.Linear(40, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    with offbeat.attach(
        model, optimizer, algorithm, scheduler=scheduler, survive=True, bucket_bytes=2**12
    ) as dp:
        began = dp.round
        if dp.rank == VICTIM and not joins:
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        for step in dp.until(seconds=3.0 if other else 40.0):
            if joins and step == 30:
                dp.stop()
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            time.sleep(0.002 * (1 + dp.rank % 2))
            optimizer.step()
    stats = dp.stats()
    return {
        "began": began,
        "rounds": dp.round,
        "steps": stats.steps,
        "identical": stats.replicas_identical,
        "lost": stats.computed_samples - stats.applied_samples - stats.dropped_samples,
        "rate": optimizer.param_groups[0]["lr"],
        "momentum": sum(float(each["exp_avg_sq"].sum()) for each in optimizer.state.values()),
        "group": torch.distributed.get_world_size(),
    }


@pytest.mark.parametrize(
    "algorithm", [offbeat.SyncSGD(), offbeat.EagerSGD("solo"), offbeat.ABSSGD()], ids=str
)
def test_a_worker_that_was_killed_is_back_and_like_the_others(
    algorithm: offbeat.Algorithm,
) -> None:
    ended = processes(_train, 3, algorithm, restarts=1)
    assert [each.restarts for each in ended] == [0, 1, 0]  # the fault has happened
    told = [each.result for each in ended]
    assert told[VICTIM]["began"] > 0
    assert told[VICTIM]["steps"] >= 30
    for each in told:
        assert each["identical"]
        assert each["lost"] == pytest.approx(0.0)
        for what in ("rounds", "rate", "momentum", "group"):
            assert each[what] == told[0][what]


def test_a_joiner_with_another_model_is_refused_and_the_others_go_on() -> None:
    ended = processes(_train, 3, offbeat.SyncSGD(), True, restarts=1, check=False)
    assert [each.restarts for each in ended] == [0, 1, 0]
    assert "cannot join: the others have" in str(ended[VICTIM].error)
    for rank in (0, 2):
        assert ended[rank].error is None
        assert ended[rank].result["identical"]


SCRIPT = """
import os, signal, time
import torch
import torch.distributed as dist
import offbeat

dist.init_process_group("gloo")  # as many scripts do themselves
joins = os.environ.get("OFFBEAT_JOIN") == "1"
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
with offbeat.attach(model, optimizer) as dp:
    for step in dp.until(seconds=60):
        if joins and step == 5:
            dp.stop()
        if dp.rank == 0 and not joins and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        time.sleep(0.02)  # another one is importing torch
        optimizer.step()
assert dp.stats().replicas_identical
os.write(1, f"{dp.rank} {joins}\\n".encode())
"""


def test_the_launcher_starts_a_worker_again_and_it_joins(tmp_path: Path) -> None:
    """Rank 0, in a script that makes its own process group, and says nothing of survival."""
    (tmp_path / "train.py").write_text(SCRIPT)
    job = Launched(tmp_path, "--nproc-per-node", 2, "--restart", 1, "train.py")
    assert job.wait(150.0) == 0, job.err  # workers import torch twice, one after the other
    assert sorted(job.out.split("\n")[:-1]) == ["0 True", "1 False"], job.err
    assert "it is started again as worker 2" in job.err
