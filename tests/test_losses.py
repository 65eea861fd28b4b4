"""Races and exits on real processes: whenever a worker ends, nobody waits for it; see survival."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import threads_left

from offbeat.errors import WorkerLostError
from offbeat.testing import processes
from offbeat.worlds import RealWorld, World, enter_world, leave_world
from offbeat.worlds.sockets import end, listening_ports, noting

pytestmark = pytest.mark.real


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _until_lost(world: World) -> float:
    """Wait for a key that nobody sets; return how long it took to learn of a loss."""
    began = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        world.control.get("never")
    told_s = time.monotonic() - began
    assert caught.value.rank == 1
    leave_world(world, caught.value)
    return told_s


# --- forked children -----------------------------------------------------------------------


def _square(number: int) -> int:
    return number * number


def _forks(child_s: float) -> tuple[float, int]:
    """Worker 1 forks, as a DataLoader does, and ends; its child lives on for a while."""
    world = enter_world()
    channel = world.channel("before")
    channel.all_reduce(torch.ones(1)).wait()
    with get_context("fork").Pool(1) as pool:  # a child works, and its parent goes on
        found = pool.apply(_square, (3,))
    channel.all_reduce(torch.ones(10**6)).wait()
    if world.rank == 1:
        if os.fork() == 0:
            time.sleep(child_s)
            os._exit(0)
        time.sleep(0.5)
        _end()
    return _until_lost(world), found


def test_a_forked_child_does_not_hide_its_parents_end() -> None:
    child_s = 6.0
    for ended in processes(_forks, 3, child_s, check=False):
        if ended.rank != 1:
            assert ended.error is None, ended.error
            told_s, found = ended.result
            assert found == 9
            assert told_s < child_s - 2  # 0.5 s, until the worker ends, and 0.1


def _forks_and_exits() -> None:
    """A forked child that runs into Python's exit leaves the world alone: it is its parent's."""
    world = enter_world()
    child = get_context("fork").Process(target=_square, args=(2,))
    child.start()
    child.join()
    world.channel("after").all_reduce(torch.ones(1)).wait()
    leave_world(world)


def test_the_world_outlives_a_forked_child() -> None:
    processes(_forks_and_exits, 2)


def test_an_orderly_end_leaves_the_connections_of_others_alone() -> None:
    """Another thread of the program may open one of its own while ours are noted."""
    with ExitStack() as stack, noting() as noted:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        places = [server.getsockname() for server in servers]
        clients = [stack.enter_context(socket.create_connection(place)) for place in places]
        accepted = [stack.enter_context(server.accept()[0]) for server in servers]
        found = stack.pop_all()
    with found:
        ports = [port for _, port in places]
        assert listening_ports(noted) == set(ports)
        end(noted, {ports[0]})
        accepted[0].settimeout(20)
        assert accepted[0].recv(1) == b""
        for other in (*clients, accepted[1]):
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


# --- ending at a bad moment ----------------------------------------------------------------


def _ends_after_the_last_barrier(victim: int) -> str:
    world = enter_world()
    barrier = RealWorld.barrier

    def then_end(self: RealWorld, name: str, size: int) -> None:
        barrier(self, name, size)
        if name == "close" and self.rank == victim:
            time.sleep(0.5)  # the others have called off their watches by now
            _end()

    RealWorld.barrier = then_end  # type: ignore[method-assign]
    leave_world(world)
    assert threads_left() == []
    return "closed"


@pytest.mark.parametrize("victim", [1, 2])
def test_an_end_after_the_last_barrier_holds_up_nobody(victim: int) -> None:
    for ended in processes(_ends_after_the_last_barrier, 3, victim, check=False, time_out_s=60):
        if ended.rank == victim:
            assert ended.exit_code == -signal.SIGKILL
        else:
            assert (ended.error, ended.result) == (None, "closed")


def _ends_before_it_connects() -> float:
    world = enter_world()
    if world.rank == 1:
        dist.ProcessGroupGloo = lambda *_: _end()  # type: ignore[misc,assignment]
    began = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        world.channel("new").all_reduce(torch.ones(1)).wait()
    told_s = time.monotonic() - began
    assert caught.value.rank == 1
    leave_world(world, caught.value)
    return told_s


def test_an_end_while_a_channel_is_made_is_noticed() -> None:
    for ended in processes(_ends_before_it_connects, 3, check=False, time_out_s=40):
        if ended.rank != 1:
            assert ended.error is None, ended.error
            assert ended.result < 10  # 0.1 s on a quiet machine


def _says_goodbye_late(late_s: float) -> float:
    """Worker 1 is held up between the last barrier and its goodbye."""
    world = enter_world()
    barrier = RealWorld.barrier

    def then_sleep(self: RealWorld, name: str, size: int) -> None:
        barrier(self, name, size)
        if name == "close" and self.rank == 1:
            time.sleep(late_s)

    RealWorld.barrier = then_sleep  # type: ignore[method-assign]
    began = time.monotonic()
    leave_world(world)
    return time.monotonic() - began


def test_a_late_goodbye_is_waited_for() -> None:
    zero, one = (ended.result for ended in processes(_says_goodbye_late, 2, 11.0))
    assert min(zero, one) > 10.5


# --- small all-reduces ---------------------------------------------------------------------


def _first_waits_last() -> str:
    """Worker 0 waits for its own all-reduces once those of all the others are through."""
    world = enter_world()
    channel = world.channel("small")
    channel.all_reduce(torch.zeros(1)).wait()
    works = [channel.all_reduce(torch.full((4,), float(n))) for n in range(3)]
    if world.rank == 0:
        for other in range(1, world.size):
            world.control.wait(f"through {other}")
    for work in works:
        work.wait()
    world.control.set(f"through {world.rank}", b"")
    leave_world(world)
    return "through"


def test_a_small_all_reduce_does_not_wait_until_its_first_member_waits() -> None:
    assert [ended.result for ended in processes(_first_waits_last, 3)] == ["through"] * 3


def _mixed(local_world_size: dict[int, str]) -> float:
    rank = int(os.environ["RANK"])
    del os.environ["LOCAL_WORLD_SIZE"]
    if rank in local_world_size:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_size[rank]
    world = enter_world()
    tensor = torch.ones(2**17)  # small within one host, large between hosts
    world.channel("mixed").all_reduce(tensor).wait()
    leave_world(world)
    return tensor.sum().item()


def test_workers_of_different_launchers_reduce_in_the_same_way() -> None:
    ended = processes(_mixed, 3, {0: "3", 1: "1"}, time_out_s=60)
    assert [each.result for each in ended] == [3 * 2.0**17] * 3


# --- waits that a loss ends ----------------------------------------------------------------


def _told_late(late_s: float) -> Any:
    """Worker 2 hears of the loss of worker 1 after worker 0, who waits for the same key, has."""
    world = enter_world()
    if world.rank == 1:
        time.sleep(1.0)
        _end()
    if world.rank == 2:
        failed = world.failed  # type: ignore[attr-defined]

        def fail_late(error: BaseException) -> None:
            time.sleep(late_s)
            failed(error)

        world.failed = fail_late  # type: ignore[attr-defined]
    try:
        world.control.wait("go")
    except WorkerLostError as lost:
        leave_world(world, lost)
        return lost.rank
    return "a false go"


def test_the_end_of_a_wait_is_no_go_for_others() -> None:
    for ended in processes(_told_late, 3, 2.0, check=False):
        if ended.rank != 1:
            assert (ended.error, ended.result) == (None, 1)
