"""A worker is killed while all attach, and the others attach without it: real processes.

In virtual time, after every event: tests/test_every_crash.py.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import offbeat
from offbeat import launched
from offbeat.alike import FirstModel
from offbeat.errors import WorkerLostError
from offbeat.records import read
from offbeat.testing import processes
from offbeat.worlds import enter_world, gloo, leave_world, mesh, store
from offbeat.worlds.pool import _copy

pytestmark = pytest.mark.real

MOMENTS = ("connects", 4, 8, 14, 20)
"""What a victim dies of: when it calls the others, or by so many uses of a verb after that."""


def _dies(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _dies_at(moment: str | int) -> None:
    if moment == "connects":
        mesh.connected = _dies
        return
    left = int(moment)

    def counted(verb: Callable[..., Any]) -> Callable[..., Any]:
        def use(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                _dies()
            return verb(*arguments)

        return use

    connected = mesh.connected

    def count_from_here(*arguments: Any) -> Any:
        peers = connected(*arguments)
        for kind, name in [
            *((store.Control, name) for name in ("add", "get", "set", "set_once")),
            (gloo.Channel, "_begin"),
        ]:
            setattr(kind, name, counted(getattr(kind, name)))
        return peers

    mesh.connected = count_from_here


def _train(algorithm: offbeat.Algorithm, dies: bool) -> tuple[int, bool | None]:
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(model, optimizer, algorithm, survive=True, bucket_bytes=2**11) as dp:
        if dies:
            _dies()
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
    return len(dp._world.members), dp.stats().replicas_identical


def _attach_again_and_again() -> list[tuple[int, bool | None]]:
    """In every block another worker is lost, at another moment of it."""
    rank, last, told = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1, []
    for number, moment in enumerate(MOMENTS):
        if rank == last - number:
            _dies_at(moment)
        algorithm = offbeat.EagerSGD("solo") if number % 2 else offbeat.SyncSGD()
        told.append(_train(algorithm, rank == last - number))
    return told


def test_the_others_attach_and_train_without_one_that_is_killed_meanwhile() -> None:
    ended = processes(_attach_again_and_again, 2 + len(MOMENTS), check=False, time_out_s=90)
    assert [one.exit_code for one in ended[2:]] == [-signal.SIGKILL] * len(MOMENTS)
    for one in ended[:2]:
        assert one.error is None, one.error
        assert one.result == [(6 - number, True) for number in range(len(MOMENTS))]


def _loses_the_model() -> None:
    if os.environ["RANK"] == "0":
        FirstModel.hand_round = _dies  # type: ignore[method-assign]
    _train(offbeat.SyncSGD(), dies=False)


def test_if_nobody_has_the_model_yet_everybody_says_so() -> None:
    ended = processes(_loses_the_model, 3, check=False)
    assert ended[0].exit_code == -signal.SIGKILL
    for one in ended[1:]:
        assert isinstance(one.error, WorkerLostError), one.error
        assert "before anybody else had its model" in str(one.error)


def _is_in_a_hurry() -> float:
    """Worker 1 takes long to make torch's group; how long others with a mistake wait for it."""
    init = dist.init_process_group

    def slowly(*arguments: Any) -> None:
        init(*arguments)
        time.sleep(1.0)

    if os.environ["RANK"] == "1":
        dist.init_process_group = slowly
    began = time.monotonic()
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="has 8 workers"):
        offbeat.attach(model, torch.optim.SGD(model.parameters()), pace="uniform-8")
    return time.monotonic() - began


def test_nobody_ends_before_all_have_made_the_process_group() -> None:
    """Gloo raises where it still connects to a worker that ends."""
    assert min(one.result for one in processes(_is_in_a_hurry, 3)) > 0.9


def _attaches_between_losses() -> list[tuple[int, bool | None]]:
    """Worker 3 is killed when it has left a block; worker 2 later, while others wait for it."""
    rank, told = int(os.environ["RANK"]), []
    for number in range(3):
        told.append(_train(offbeat.SyncSGD(), dies=False))
        if (rank, number) == (3, 0):
            _dies()
        if (rank, number) == (2, 1):
            time.sleep(0.5)
            _dies()
    return told


def test_the_others_attach_again_without_one_that_is_killed_between_two_blocks() -> None:
    ended = processes(_attaches_between_losses, 4, check=False, time_out_s=30)
    assert [one.exit_code for one in ended[2:]] == [-signal.SIGKILL] * 2
    for one in ended[:2]:
        assert one.error is None, one.error
        assert one.result == [(4, True), (3, True), (2, True)]


def _store_of_own(serves: bool) -> TCPStore:
    """A store that one worker serves, and the others find."""
    launcher = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    if not serves:
        return TCPStore("127.0.0.1", int(launcher.get("port")))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher.set("port", str(store.port))
    return store


def _trains_with_another_rank(dies: bool) -> tuple[int, bool | None] | None:
    """Worker 0 is killed in the first block, or ends after it; 1 and 2 become 0 and 1."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    _train(offbeat.SyncSGD(), dies and rank == 0)
    dist.destroy_process_group()
    if rank == 0:
        return None
    store = _store_of_own(serves=rank == 1)
    dist.init_process_group("gloo", store=store, rank=rank - 1, world_size=2)
    if rank == 1:
        time.sleep(1.0)  # the other one waits for it, and must not take it for the one before
    return _train(offbeat.SyncSGD(), dies=False)


@pytest.mark.parametrize("dies", [False, True])
def test_in_another_process_group_a_rank_is_another_worker(dies: bool) -> None:
    ended = processes(_trains_with_another_rank, 3, dies, check=False, time_out_s=30)
    assert ended[0].exit_code == (-signal.SIGKILL if dies else 0)
    for one in ended[1:]:
        assert one.error is None, one.error
        assert one.result == (2, True)


def _attaches_without_store(survive: bool) -> str:
    """Worker 0 has the job's store, and is killed before anybody attaches."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store_of_own(serves=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        _dies()
    store.set_timeout(timedelta(days=1))
    with suppress(RuntimeError):
        store.wait(["never"])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    try:
        offbeat.attach(model, optimizer, survive=survive)
    except WorkerLostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("survive", [True, False])
def test_who_attaches_when_the_store_is_dead_says_so_at_once(survive: bool) -> None:
    ended = processes(_attaches_without_store, 3, survive, check=False, time_out_s=20)
    assert ended[0].exit_code == -signal.SIGKILL
    for one in ended[1:]:
        assert one.error is None, one.error
        assert "job's store" in one.result
        assert "does not answer" in one.result


def _reads_while_waits_are_ended() -> bytes:
    """As when workers are lost one after the other, and this one reads what they have left."""
    world = enter_world(survivors=1)
    world.control.set("left", b"by a worker")

    def read() -> None:
        with suppress(WorkerLostError):
            while world.control.get("left") != b"":
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for _ in range(300):
        world.control.wake_all()  # type: ignore[attr-defined]
    found = world.control.stands("left")
    world.control.set("left", b"")
    reader.join()
    leave_world(world)
    return found


def test_what_a_lost_worker_has_left_stays_there_when_waits_are_ended() -> None:
    (one,) = processes(_reads_while_waits_are_ended, 1)
    assert one.result == b"by a worker"


def _ends_waits(libuv: bool) -> tuple[bytes, bytes]:
    """This worker's waits are ended just when another one writes what one of them is for."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    dist.init_process_group("gloo", store=server, rank=0, world_size=1)
    world = enter_world(survivors=1)
    compare_set = PrefixStore.compare_set

    def then_another(client: Any, key: str, *words: str) -> Any:
        stands = compare_set(client, key, *words)
        if key == "key/left":
            client.set(key, b"by a worker")
        return stands

    def read(key: str) -> None:
        with suppress(WorkerLostError):
            world.control.get(key)

    PrefixStore.compare_set = then_another
    readers = [threading.Thread(target=read, args=(key,), daemon=True) for key in ("left", "never")]
    for reader in readers:
        reader.start()
    while len(world.waits_for) < 2:  # type: ignore[attr-defined]
        time.sleep(0.01)
    world.control.wake_all()  # type: ignore[attr-defined]
    for reader in readers:
        reader.join()
    found = world.control.stands("left"), world.control.stands("never")
    leave_world(world)
    return found


@pytest.mark.parametrize("libuv", [True, False])
def test_a_value_that_comes_while_waits_are_ended_is_not_lost(libuv: bool) -> None:
    (one,) = processes(_ends_waits, 1, libuv, time_out_s=20)
    assert one.result == (b"by a worker", store._WAKE)


def _attaches_while_it_waits(survive: bool) -> bool:
    """A thread of the script waits in torch's own client, for what comes when all have trained."""
    dist.init_process_group("gloo")
    client = dist.distributed_c10d._get_default_store()
    key = f"trained/{os.environ['RANK']}"
    waiter = threading.Thread(target=client.wait, args=([key], timedelta(hours=1)), daemon=True)
    waiter.start()
    time.sleep(0.3)  # it is in there
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, survive=survive):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    waits = waiter.is_alive()
    _copy(client).set(key, "1")
    waiter.join()
    return waits


@pytest.mark.parametrize("survive", [True, False])
def test_a_script_that_waits_in_torchs_store_can_attach(survive: bool) -> None:
    ended = processes(_attaches_while_it_waits, 2, survive, time_out_s=30)
    assert [one.result for one in ended] == [True, True]


def _makes_another_group_after_one_has_joined() -> tuple[float, tuple[int, bool | None]]:
    """Worker 2 is killed, started again, and joins; then all make another process group."""
    rank, joins = int(os.environ["RANK"]), launched.joins()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True) as dp:
        for step in dp.until(seconds=40.0):
            if rank == 2 and step == 10:
                dp.stop() if joins else _dies()
            optimizer.zero_grad()
            model(torch.randn(4, 2)).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
    dist.destroy_process_group()
    store = PrefixStore("another", TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])))
    patience = timedelta(seconds=10)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=patience)
    dist.all_reduce(total := torch.ones(1))
    return total.item(), _train(offbeat.SyncSGD(), dies=False)


def test_who_has_joined_has_a_part_in_the_next_process_group() -> None:
    ended = processes(_makes_another_group_after_one_has_joined, 3, time_out_s=40, restarts=1)
    assert [one.result for one in ended] == [(3.0, (3, True))] * 3


def test_in_another_process_group_a_worker_writes_on_in_the_file_that_it_has(
    tmp_path: Path,
) -> None:
    """The file of its new rank is another worker's, who may be lost."""
    there = {"OFFBEAT_RECORDS": str(tmp_path)}
    processes(_trains_with_another_rank, 3, False, environment=there, time_out_s=30)
    lines = list(read(tmp_path))
    files = [list(read(tmp_path / f"worker-{rank}.jsonl")) for rank in range(3)]
    assert [{line["rank"] for line in each} for each in files] == [{0}, {1, 0}, {2, 1}]
    steps = sum(line["kind"] == "compute" for line in lines)
    assert steps == sum(line["steps"] for line in lines if line["kind"] == "end")
    assert sum(line["kind"] == "end" for line in lines) == 5
