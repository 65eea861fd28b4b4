"""Real processes: the same bits as DDP and as the virtual world; nobody hangs, nothing leaks."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import close, loss, net, parameters, same, sgd, threads_left, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import (
    DisagreementError,
    NonFiniteGradientError,
    StillAttachedError,
    WorkerLostError,
)
from offbeat.testing import processes
from offbeat.worlds import enter_world, leave_world

pytestmark = pytest.mark.real


# --- the same as DDP -----------------------------------------------------------------------


def _both(steps: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """Train the same model on the same data with DDP and with SyncSGD, in one process."""
    dist.init_process_group("gloo")  # as a user does; offbeat uses the same job
    rank = dist.get_rank()
    ours, theirs = [], []
    for make in (_mlp, _conv):
        model = make()
        opt = sgd(model)
        wrapped = DistributedDataParallel(make())
        opt_ddp = sgd(wrapped)
        mine, other = [], []
        with offbeat.attach(model, opt):
            for step in range(steps):
                torch.manual_seed(100 * step + rank)
                x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))
                for net_, opt_ in ((model, opt), (wrapped, opt_ddp)):
                    opt_.zero_grad()
                    nn.functional.cross_entropy(net_(x), y).backward()
                    opt_.step()
                mine.append(parameters(model))
                other.append(parameters(wrapped.module))
        ours.append(mine)
        theirs.append(other)
    assert dist.is_initialized()  # the user's group is still the user's
    dist.destroy_process_group()
    return ours, theirs


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 10)
    )


def _conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    )


def test_sync_sgd_gives_the_same_bits_as_ddp() -> None:
    for ended in processes(_both, 2, 6):
        ours, theirs = ended.result
        for mine, other in zip(ours, theirs, strict=True):
            assert all(same(a, b) for a, b in zip(mine, other, strict=True))


# --- the same as the virtual world ---------------------------------------------------------

MIXED = """
workers = {workers}
speed = {speed}
[compute]
step_s = 0.02
[[noise]]
kind = "lognormal"
sigma = 0.3
"""


def _uneven(rank: int) -> int:
    return 6 - rank


@pytest.mark.parametrize(("workers", "bits"), [(2, True), (4, False)])
def test_virtual_and_paced_real_runs_give_the_same_parameters(
    workers: int, bits: bool, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(MIXED.format(workers=workers, speed=[1.0, 0.5, 1.0, 0.25][:workers]))
    virtual = offbeat.run(lambda: train(steps=_uneven), str(file), seed=3)
    pace = {"OFFBEAT_PACE": str(file), "OFFBEAT_SEED": "3"}
    real = processes(_train_uneven, workers, environment=pace)
    for rank in range(workers):
        trajectory, stats = real[rank].result
        expected, virtual_stats = virtual.results[rank]
        for mine, other in zip(trajectory, expected, strict=True):
            # Two numbers have one sum; Gloo's ring adds four in an order of its own.
            assert same(mine, other) if bits else close(mine, other)
        assert [round.ranks for round in stats.history] == [
            round.ranks for round in virtual_stats.history
        ]
        # A paced device takes the modelled time, or longer where the machine is slower than it.
        assert stats.compute_s >= virtual_stats.compute_s * 0.999
        assert same(trajectory[-1], real[0].result[0][-1])


def _train_uneven() -> Any:
    return train(steps=_uneven)


# --- bad input, on every rank, without a hang ----------------------------------------------


def _bad_inputs() -> None:
    rank = offbeat.rank()
    dist.init_process_group("gloo")
    model = nn.Linear(3 + (rank == 1), 2)
    with pytest.raises(DisagreementError, match=r"worker 1 has weight of shape \(2, 4\)"):
        offbeat.attach(model, sgd(model))

    model = net()
    opt = sgd(model)
    with pytest.raises(NonFiniteGradientError) as caught, offbeat.attach(model, opt):
        for step in range(3):
            opt.zero_grad()
            (loss(model, rank, step) * (float("inf") if (rank, step) == (1, 2) else 1)).backward()
            opt.step()
    assert (caught.value.rank, caught.value.round) == (1, 2)

    model = net()
    opt = sgd(model)
    with pytest.raises((StillAttachedError, WorkerLostError), match=r"dp\.close\(\) first"):
        with offbeat.attach(model, opt):
            loss(model, rank, 0).backward()
            dist.barrier()
            dist.destroy_process_group()
            opt.step()
    assert dist.is_initialized()


def test_bad_input_is_an_error_on_every_rank() -> None:
    processes(_bad_inputs, 2)


def test_pacing_by_a_cluster_of_another_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("workers = 3\n[compute]\nstep_s = 1")
    for ended in processes(train, 2, check=False, environment={"OFFBEAT_PACE": str(file)}):
        assert isinstance(ended.error, ValueError)
        assert "has 3 workers, this run has 2" in str(ended.error)


# --- losing a worker -----------------------------------------------------------------------


def _lose(how: str, victim: int) -> tuple[int | None, str, float]:
    """Train until a worker is lost; return who, in which words, and how long it took to learn."""
    model = net()
    opt = sgd(model)
    step, began = 0, time.monotonic()
    try:
        with offbeat.attach(model, opt) as dp:
            while True:
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                began = time.monotonic()
                if step == 5 and dp.rank == victim:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "raise":
                        raise KeyError("a bad batch")
                    os._exit(3)
                opt.step()
                step += 1
    except WorkerLostError as lost:
        told_s = time.monotonic() - began
        leaked = threads_left()
        assert not leaked, leaked
        return lost.rank, str(lost), told_s
    return None, "", 0.0


@pytest.mark.parametrize(("how", "victim"), [("kill", 2), ("exit", 0), ("raise", 1)])
def test_a_lost_worker_ends_the_run_on_every_rank_and_is_named(how: str, victim: int) -> None:
    for ended in processes(_lose, 4, how, victim, check=False):
        if ended.rank == victim:
            assert ended.exit_code == {"kill": -signal.SIGKILL, "exit": 3, "raise": 0}[how]
            assert how != "raise" or isinstance(ended.error, KeyError)
            continue
        assert ended.error is None
        assert ended.exit_code == 0
        rank, message, told_s = ended.result
        assert rank == victim
        assert f"worker {victim} was lost" in message
        assert how != "raise" or "KeyError: 'a bad batch'" in message
        assert ("Worker 1's script has raised that" in message) == (how == "raise")
        assert ("survive=True" in message) == (how != "raise")
        assert told_s < 20  # 0.1 s on a quiet machine; time-outs take minutes


def _stopped() -> int:
    """One worker is stopped for two seconds, then goes on."""
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt) as dp:
        for step in range(10):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            if step == 5 and dp.rank == 1:
                waker = f"import os,time; time.sleep(2); os.kill({os.getpid()}, {signal.SIGCONT})"
                subprocess.Popen([sys.executable, "-c", waker])
                os.kill(os.getpid(), signal.SIGSTOP)
            opt.step()
    stats = dp.stats()
    assert stats.replicas_identical
    assert stats.wait_s > 1.5 or dp.rank == 1
    return stats.rounds


def test_a_stopped_worker_is_slow_not_lost() -> None:
    assert [ended.result for ended in processes(_stopped, 3)] == [10, 10, 10]


# --- beginning and ending ------------------------------------------------------------------


def _again_and_again() -> None:
    """Attach several times; then nothing of it is left."""
    before, sockets = sys.getswitchinterval(), []
    for _ in range(4):
        train(steps=2)
        assert threads_left() == []
        assert sys.getswitchinterval() == before
        sockets.append(_sockets())
    # Those of the job's own group and store: how many clients of the store were needed at once
    # differs by one now and then. They are used again, none is left behind by each block.
    assert sockets[3] < sockets[0] + 3, sockets


def _closed() -> str:
    world = enter_world()
    world.channel("sums").all_reduce(torch.ones(1)).wait()
    leave_world(world)
    return str(vars(world)["_failure"])


def test_a_world_that_was_closed_has_not_failed() -> None:
    assert [ended.result for ended in processes(_closed, 2)] == ["None", "None"]


def _sockets() -> int:
    """How many sockets are open, once Gloo's own thread has closed those that it drops."""
    gc.collect()
    time.sleep(0.5)
    return sum(
        str(file.readlink()).startswith("socket:")
        for file in Path("/proc/self/fd").iterdir()
        if file.is_symlink()
    )


def test_nothing_is_left_when_the_block_has_ended() -> None:
    processes(_again_and_again, 2)


def _never_closes(folder: str) -> None:
    logging.getLogger("offbeat").addHandler(logging.FileHandler(f"{folder}/{offbeat.rank()}"))
    model = net()
    opt = sgd(model)
    offbeat.attach(model, opt)
    for step in range(2 + offbeat.rank()):
        opt.zero_grad()
        loss(model, offbeat.rank(), step).backward()
        opt.step()


def test_a_script_that_never_closes_is_joined_at_exit_and_told(tmp_path: Path) -> None:
    assert all(ended.exit_code == 0 for ended in processes(_never_closes, 2, str(tmp_path)))
    for rank in range(2):
        assert f"worker {rank} ends without dp.close()" in (tmp_path / str(rank)).read_text()


SCRIPT = """
import torch, offbeat
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dp = offbeat.attach(model, optimizer)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 1 and dp.rank == 1:
        raise RuntimeError("boom")
"""


def test_under_torchrun_an_uncaught_error_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 1
    assert "RuntimeError: boom" in ended.stderr
    assert "terminate called" not in ended.stderr


def test_a_paced_crash_is_a_real_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'workers = 2\n[compute]\nstep_s = 0.2\n[[event]]\nkind = "crash"\nworker = 1\nat_s = 1.0'
    )
    survivor, crashed = processes(
        train, 2, 50, check=False, environment={"OFFBEAT_PACE": str(file)}
    )
    assert crashed.exit_code == -signal.SIGKILL
    assert isinstance(survivor.error, WorkerLostError)
    assert survivor.error.rank == 1
    with pytest.raises(WorkerLostError, match="worker 1 was lost at virtual time 1 s"):
        offbeat.run(lambda: train(50), Cluster.load(str(file)))


# --- the tool itself ---------------------------------------------------------------------------


def _stuck() -> None:
    threading.Event().wait()


def test_a_process_that_is_late_is_killed_and_shows_where_it_was() -> None:
    (late,) = processes(_stuck, 1, time_out_s=2, check=False)
    assert late.exit_code == -signal.SIGKILL
    assert isinstance(late.error, TimeoutError)
    assert "in _stuck" in "".join(late.error.__notes__)
