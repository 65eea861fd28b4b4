"""A worker is killed, started again, and joins the others: real processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launched
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat
from offbeat import launched
from offbeat.errors import NobodyToJoinError
from offbeat.records import files, read
from offbeat.rounds.joining import Joining
from offbeat.rounds.stripes import STRIPED_BYTES
from offbeat.testing import processes
from offbeat.worlds import sockets

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
        model, optimizer, algorithm, scheduler=scheduler, survive=True, bucket_bytes=2**9
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
        "alike": _alike(algorithm, dp.drifts),
        "steps": stats.steps,
        "identical": stats.replicas_identical,
        "lost": stats.computed_samples - stats.applied_samples - stats.dropped_samples,
        "rate": optimizer.param_groups[0]["lr"],
        "momentum": sum(float(each["exp_avg_sq"].sum()) for each in optimizer.state.values()),
        "group": torch.distributed.get_world_size(),
    }


def _alike(algorithm: offbeat.Algorithm, drifts: bool) -> list[str]:
    """What all workers have alike beside their models."""
    if hasattr(algorithm, "graph"):  # the rounds that it has made, too, are a worker's own
        return ["group"]
    return ["group", "rounds", *([] if drifts else ["rate", "momentum"])]


@pytest.mark.parametrize(
    "algorithm",
    [
        offbeat.SyncSGD(),
        offbeat.EagerSGD("solo"),
        offbeat.ABSSGD(),
        offbeat.WAGMASGD(),
        offbeat.RennalaSGD(),
        offbeat.DPSGD(),
    ],
    ids=str,
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
        for what in each["alike"]:
            assert each[what] == told[0][what]


def _large(killed: bool) -> dict[str, Any]:
    """Train a model that is given in stripes; one of the givers dies while it gives, or not."""
    joins, rank = launched.joins(), int(os.environ["RANK"])
    gave: list[tuple[int, ...]] = []
    give = Joining._give_to

    def noted(self: Joining, donation: Any, gift: Any) -> None:
        gave.append(donation.givers)
        give(self, donation, gift)
        if killed and rank == 2 and donation.epoch == 2:  # after one loss and one join
            os.kill(os.getpid(), signal.SIGKILL)

    Joining._give_to = noted  # type: ignore[method-assign]
    torch.manual_seed(rank)
    model = torch.nn.Linear(2048, 2080)
    assert sum(each.nbytes for each in model.parameters()) > STRIPED_BYTES
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    with offbeat.attach(model, optimizer, survive=True) as dp:
        began = dp.round
        if rank == VICTIM and not joins:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        for step in dp.until(seconds=60.0):
            if joins and step == 10 and (rank == 2 or not killed):
                dp.stop()
            optimizer.zero_grad()
            model(torch.randn(1, 2048)).square().mean().backward()
            optimizer.step()
    momentum = sum(float(each["momentum_buffer"].sum()) for each in optimizer.state.values())
    return {
        "began": began,
        "gave": gave,
        "identical": dp.stats().replicas_identical,
        "momentum": momentum,
    }


@pytest.mark.parametrize("killed", [False, True])
def test_a_large_state_comes_in_stripes_also_if_a_giver_is_killed(killed: bool) -> None:
    ended = processes(_large, 3, killed, restarts=1)
    assert [each.restarts for each in ended] == [0, 1, int(killed)]
    told = [each.result for each in ended]
    assert told[VICTIM]["began"] > 0
    for each in told:
        assert each["identical"]
        assert each["momentum"] == told[0]["momentum"]
    assert told[0]["gave"][0] == (0, 2)
    if not killed:
        assert told[2]["gave"] == [(0, 2)]
    else:
        assert len(told[0]["gave"]) > 1


def generator_and_judge() -> tuple[Any, ...]:
    """Two small nets, each worker's own to begin with, and their optimizers."""
    torch.manual_seed(int(os.environ["RANK"]))
    makes, judges = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)
    opt_g = torch.optim.Adam(makes.parameters(), lr=1e-3)
    opt_d = torch.optim.Adam(judges.parameters(), lr=1e-3)
    return makes, judges, opt_g, opt_d


def _train_two() -> dict[str, Any]:
    """Two models at a time, in lockstep, until the joiner has made some steps, and says so."""
    joins = launched.joins()
    makes, judges, opt_g, opt_d = generator_and_judge()
    with (
        offbeat.attach(makes, opt_g, offbeat.SyncSGD(), survive=True) as g,
        offbeat.attach(judges, opt_d, offbeat.EagerSGD(), survive=True) as d,
    ):
        began = g.round, d.round
        if g.rank == VICTIM and not joins:
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        for step in g.until(seconds=40.0):
            if joins and step == 20:
                g.stop()
            opt_d.zero_grad()
            judges(makes(torch.randn(8, 4)).detach()).square().mean().backward()
            opt_d.step()
            opt_g.zero_grad()
            judges(makes(torch.randn(8, 4))).square().mean().backward()
            time.sleep(0.002)
            opt_g.step()
    both = g.stats(), d.stats()
    return {
        "began": began,
        "steps": both[0].steps,
        "identical": [each.replicas_identical for each in both],
        "rounds": (g.round, d.round),
    }


def test_a_worker_that_was_killed_is_back_where_two_models_are_trained() -> None:
    ended = processes(_train_two, 3, restarts=1)
    assert [each.restarts for each in ended] == [0, 1, 0]  # the fault has happened
    told = [each.result for each in ended]
    assert min(told[VICTIM]["began"]) > 0
    assert told[VICTIM]["steps"] >= 20
    for each in told:
        assert each["identical"] == [True, True]
        assert each["rounds"] == told[0]["rounds"]


def _by_shares() -> list[list[int]]:
    """Epochs over fixed shares, as ever; what was drawn in each."""
    joins, rank = launched.joins(), int(os.environ["RANK"])
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(24.0)[:, None])
    sampler = offbeat.Survivors(DistributedSampler(data, num_replicas=3, rank=rank))
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    drawn: list[list[int]] = []
    with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True) as dp:
        for epoch in range(80):
            sampler.set_epoch(epoch)
            drawn.append([])
            for (x,) in loader:
                if rank == VICTIM and not joins and epoch == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                drawn[-1] += x[:, 0].int().tolist()
                time.sleep(0.01)
                optimizer.zero_grad()
                model(x / 24).square().mean().backward()
                optimizer.step()
    assert dp.stats().replicas_identical
    return drawn


def test_a_joiner_has_a_share_from_the_next_epoch_on() -> None:
    ended = processes(_by_shares, 3, restarts=1)
    assert [each.restarts for each in ended] == [0, 1, 0]
    zero, one, two = (each.result for each in ended)
    first = next(epoch for epoch, share in enumerate(one) if share)
    assert first > 3
    drawn = [sorted(zero[epoch] + one[epoch] + two[epoch]) for epoch in range(80)]
    whole = [epoch for epoch in range(4, 80) if drawn[epoch] == list(range(24))]
    assert whole == list(range(whole[0], 80))
    assert whole[0] <= first
    # What the others had begun before the loss lacks the lost one's share, and no more.
    assert all(len(set(drawn[epoch])) == 16 for epoch in range(4, whole[0]))
    assert [bool(share) for share in one[4:]] == [epoch >= first for epoch in range(4, 80)]


def _comes_later(algorithm: offbeat.Algorithm, at_s: float, ends_s: float) -> dict[str, Any]:
    """Train until worker 2, which comes later, has made some steps; or for so long."""
    torch.manual_seed(int(os.environ["RANK"]))
    pace = offbeat.Cluster.parse(
        "workers = 3\n[compute]\nstep_s = 0.02\n[[event]]\nkind = 'join'\nworker = 2\n"
        f"at_s = {at_s!r}\n"
    )
    model = torch.nn.Linear(40, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    steps = 0
    try:
        with offbeat.attach(model, optimizer, algorithm, pace=pace, survive=True) as dp:
            began_s = dp.seconds
            for steps, _ in enumerate(dp.until(seconds=ends_s)):
                if dp.rank == 2 and steps == 20:
                    dp.stop()
                optimizer.zero_grad()
                model(torch.randn(4, 40)).square().mean().backward()
                optimizer.step()
    except NobodyToJoinError:
        return {"steps": None}
    identical = dp.stats().replicas_identical
    return {"began_s": began_s, "steps": steps, "identical": identical, "rounds": dp.round}


@pytest.mark.parametrize(
    "algorithm",
    [
        *(offbeat.SyncSGD(), offbeat.EagerSGD("solo"), offbeat.WaitFreeLocalSGD()),
        *(offbeat.RingmasterASGD(4), offbeat.DPSGD("ring")),
    ],
    ids=str,
)
def test_a_paced_worker_comes_when_the_cluster_file_says(algorithm: offbeat.Algorithm) -> None:
    first, second, late = (each.result for each in processes(_comes_later, 3, algorithm, 1.0, 60.0))
    assert first["began_s"] < 1.0 < late["began_s"]
    assert 20 <= late["steps"] < min(first["steps"], second["steps"])
    assert first["identical"] == second["identical"] == late["identical"]
    assert first["identical"] or not algorithm.identical
    assert first["rounds"] == late["rounds"] or not algorithm.identical


def test_a_paced_worker_that_comes_when_all_have_ended_finds_nobody() -> None:
    told = [each.result for each in processes(_comes_later, 3, offbeat.SyncSGD(), 3.0, 0.5)]
    assert [each["steps"] is None for each in told] == [False, False, True]
    assert told[0]["identical"]


def test_a_joiner_with_another_model_is_refused_and_the_others_go_on() -> None:
    ended = processes(_train, 3, offbeat.SyncSGD(), True, restarts=1, check=False)
    assert [each.restarts for each in ended] == [0, 1, 0]
    assert "cannot join: the others have" in str(ended[VICTIM].error)
    for rank in (0, 2):
        assert ended[rank].error is None
        assert ended[rank].result["identical"]


def test_who_calls_while_a_group_is_made_is_not_cut_with_that_group() -> None:
    """Then it was noted as one of the group's, and would have been taken for lost."""
    with sockets.noting() as noted:
        one, other = socket.socketpair()
    sockets.leave_alone(one)
    sockets.cut(noted)
    one.settimeout(5.0)
    other.send(b"A")
    assert one.recv(1) == b"A"
    assert other.recv(1) == b""  # as all others that were noted
    one.close()
    other.close()


def test_what_two_groups_have_noted_does_not_end_with_one_of_them() -> None:
    """Two models, two groups: made at the same time, and each noted the connections of both."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with sockets.noting() as first, sockets.noting() as second:
            one = socket.create_connection(("127.0.0.1", port))
            other, _ = server.accept()
    assert first.keys() == second.keys() >= {one.fileno(), other.fileno()}
    sockets.end(first, {port})
    other.settimeout(5.0)
    one.send(b"A")
    assert other.recv(1) == b"A"
    sockets.cut(second)  # a worker is lost
    assert other.recv(1) == b""
    one.close()
    other.close()


def test_the_jobs_store_is_not_cut_with_a_group() -> None:
    """Another thread may have connected to it while the group was made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets.note_store(server.getsockname()[1])
        with sockets.noting() as noted:
            one = socket.create_connection(server.getsockname())
            other, _ = server.accept()
    assert one.fileno() in noted
    sockets.cut(noted)
    one.settimeout(5.0)
    other.send(b"A")
    assert one.recv(1) == b"A"
    one.close()
    other.close()


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
    assert "it is started again (pid" in job.err


def _divides_in_three_blocks() -> list[list[int]]:
    """The victim joins in the first block: from the second one on it is there from the start."""
    rank, joins, shares = int(os.environ["RANK"]), launched.joins(), []
    data = TensorDataset(torch.arange(12.0))
    sampler = offbeat.Survivors(DistributedSampler(data, 3, rank, shuffle=False))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().mean().backward()
        time.sleep(0.005)
        optimizer.step()

    for block in range(3):
        with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True) as dp:
            for each in dp.until(seconds=40.0) if block == 0 else range(1):
                if rank == VICTIM and each == 10:
                    dp.stop() if joins else os.kill(os.getpid(), signal.SIGKILL)
                step()
            shares.append(list(sampler))
            for _ in shares[-1]:
                step()
    return shares


def test_who_has_joined_has_a_share_of_the_data_in_the_next_blocks() -> None:
    ended = processes(_divides_in_three_blocks, 3, time_out_s=40.0, restarts=1)
    for block in (1, 2):
        assert sorted(each for one in ended for each in one.result[block]) == [*range(12)]


def _trains_with_records() -> int:
    """The victim is killed after 50 steps, and makes 5 more when it has joined."""
    rank, joins = int(os.environ["RANK"]), launched.joins()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True) as dp:
        for step in dp.until(seconds=40.0):
            if rank == VICTIM and step == (5 if joins else 50):
                dp.stop() if joins else os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
    return dp.stats().steps


def test_a_worker_that_is_started_again_leaves_the_records_of_before(tmp_path: Path) -> None:
    there = {"OFFBEAT_RECORDS": str(tmp_path)}
    ended = processes(_trains_with_records, 3, environment=there, restarts=1, time_out_s=60.0)
    made = {
        file.stem: sum(line["kind"] == "compute" for line in read(file)) for file in files(tmp_path)
    }
    assert made.pop("worker-1") == 50
    assert made == {f"worker-{name}": ended[int(name[0])].result for name in ("0", "1-1", "2")}
