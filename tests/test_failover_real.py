"""The store is lost with its host, freezes, or is cut off: the others train on with its standby."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import LIMIT_S, Launched, until

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

HOSTS = 3
SAMPLES = 600
TRAIN = """
import json, sys, time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import offbeat
from offbeat.worlds.current import present_world

folder, method, samples = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
algorithm = {"sync": offbeat.SyncSGD(), "eager": offbeat.EagerSGD("majority")}[method]
model = torch.nn.ParameterList([torch.zeros(samples, dtype=torch.float64)])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
deal = offbeat.Deal(TensorDataset(torch.arange(samples)), 1)
applied = torch.zeros_like(model[0])
with offbeat.attach(model, optimizer, algorithm) as dp:
    world = present_world()
    dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
    for number, (index,) in enumerate(deal):
        if number == 5:
            (folder / f"trains-{dp.rank}").touch()
        if world.epoch and not number % 5:
            (folder / f"moved-{dp.rank}").touch()
        optimizer.zero_grad()
        model[0][index].sum().backward()  # a parameter for each sample
        time.sleep(0.0 if world.epoch else 0.02)  # there is time for the fault, and none is lost
        optimizer.step()
stats = dp.stats()
print(json.dumps([dp.rank, stats.replicas_identical, applied.unique().tolist()]))
"""


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


Launch = Callable[..., list[Launched]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start a launcher with one worker for each host, and wait until all train."""
    launched: list[Launched] = []

    def launch(method: str, lost_s: float, names: tuple[str, ...] = ("",) * HOSTS) -> list[Any]:
        file = tmp_path / "train.py"
        file.write_text(TRAIN)
        address = "10.67.1.1" if names[0] else "127.0.0.1"
        flags = ["--nproc-per-node", 1, "--nnodes", HOSTS, "--master-addr", address]
        flags += ["--master-port", _port()]
        for node, name in enumerate(names):
            words = *flags, "--node-rank", node, file, tmp_path, method, SAMPLES
            options = {"name": f"node{node}", "namespace": name, "OFFBEAT_LOST_S": str(lost_s)}
            launched.append(Launched(tmp_path, *words, **options))
        # On a crowded machine, importing torch may take each of the workers most of a minute.
        until(all_train, "all train", 2 * LIMIT_S)
        return launched

    def all_train() -> bool:
        for one in launched:
            assert one.runs(), one.err
        return len(list(tmp_path.glob("trains-*"))) == HOSTS

    yield launch
    for one in launched:
        if one.runs():  # frozen, perhaps
            one.send(signal.SIGKILL)


def _check(told: list[Any], ranks: list[int]) -> None:
    """These ended well, with the same model, and every sample has counted once."""
    assert sorted(rank for rank, *_ in told) == ranks
    assert all(identical for _, identical, _ in told)
    assert [counts for *_, counts in told] == [[1.0]] * len(ranks)


def test_the_host_of_the_store_dies_and_the_others_train_on(launch: Launch) -> None:
    launched = launch("eager", lost_s=3)
    launched[0].send(signal.SIGKILL)
    launched[0].wait()
    assert [one.wait() for one in launched[1:]] == [0, 0], [one.err for one in launched]
    _check([line for one in launched[1:] for line in one.lines()], [1, 2])
    # Worker 0 is ended a moment after its launcher: with the store, or just afterwards.
    assert "the job's store was lost" in launched[1].err
    assert "with it worker 0" in launched[1].err or "worker 0 was lost" in launched[1].err
    assert "its standby is in use" in launched[1].err
    assert "2 of 3 workers go on" in launched[1].err
    assert all("lost node 0: the store of node 0 is gone" in one.err for one in launched[1:])


def test_the_launcher_with_the_store_freezes_and_nobody_is_lost(
    launch: Launch, tmp_path: Path
) -> None:
    launched = launch("sync", lost_s=1)
    launched[0].send(signal.SIGSTOP)
    until(lambda: len(list(tmp_path.glob("moved-*"))) == HOSTS, "all go on")
    launched[0].send(signal.SIGCONT)
    assert [one.wait() for one in launched] == [0, 0, 0], [one.err for one in launched]
    _check([line for one in launched for line in one.lines()], [0, 1, 2])
    assert "its standby is in use; 3 of 3 workers go on" in launched[0].err


COMES_HOME_LATE = """
import os, sys, threading, time
from datetime import timedelta

import torch.distributed as dist

import offbeat

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", store.port, is_master=False)


class EndsSlowly:
    def __init__(self):
        self.sleep, self.write = time.sleep, os.write  # the modules go before it does

    def __del__(self):
        self.write(1, b"Python ends")
        self.sleep(1.0)
        self.write(1, b", and has ended")


def wait():
    try:
        client.wait(["never"], timedelta(seconds=0.5))
    except RuntimeError:
        print("too early", flush=True)


threading.Thread(target=wait, name="offbeat-waiter", daemon=True).start()
sys.modules["ends_slowly"] = EndsSlowly()
sys.exit(3)
"""


def test_a_thread_that_comes_home_while_python_ends_does_not_abort_it(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(COMES_HOME_LATE)
    ended = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (3, "Python ends, and has ended"), ended.stderr


# --- a split network -----------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _remove(names: tuple[str, ...]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def switch() -> Iterator[tuple[str, ...]]:
    """Three hosts, 10.67.1.1 to 3, and a switch with the ports port0 to port2: namespaces."""
    names = tuple(f"offbeat-{os.getpid()}-{each}" for each in ("a", "b", "c", "switch"))
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[-1], "link", "add", "bridge", "type", "bridge")
        _ip("-n", names[-1], "link", "set", "bridge", "up")
        for number, name in enumerate(names[:-1]):
            port = f"port{number}"
            ends = ["cable", "type", "veth", "peer", port, "netns", names[-1]]
            _ip("-n", name, "link", "add", *ends)
            _ip("-n", name, "address", "add", f"10.67.1.{number + 1}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
            _ip("-n", names[-1], "link", "set", port, "master", "bridge", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        why = getattr(error, "stderr", None) or str(error).encode()
        pytest.skip(f"no network namespaces can be made here: {why.decode().strip()}")
    yield names
    _remove(names)


def test_the_host_of_the_store_is_cut_off_and_does_not_go_on_alone(
    launch: Launch, switch: tuple[str, ...]
) -> None:
    launched = launch("eager", 2, switch[:HOSTS])
    _ip("-n", switch[-1], "link", "set", "port0", "nomaster")
    alone, *others = launched
    assert alone.wait() == 1
    assert "1 of 3 workers that may be alive can be reached from here" in alone.err
    assert not alone.lines()
    assert [one.wait() for one in others] == [0, 0], [one.err for one in launched]
    _check([line for one in others for line in one.lines()], [1, 2])
