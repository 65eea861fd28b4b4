"""The program's own collectives, on real processes: offbeat knows that it is in one, and where."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import all_reduce, distributed_c10d  # long before anything is attached

import offbeat
from offbeat.errors import StuckWarning
from offbeat.testing import processes
from offbeat.worlds import World, enter_world, leave_world
from offbeat.worlds.patience import stuck_s

pytestmark = pytest.mark.real


class Attached:
    """Something attached that notes when it is away."""

    def __init__(self, world: World) -> None:
        self.log: list[str] = []
        self.is_away = False
        world.open.append(self)

    @contextmanager
    def away(self, where: str) -> Iterator[None]:
        assert not self.is_away, "away twice"
        self.log.append(where)
        self.is_away = True
        yield
        self.is_away = False

    def close(self) -> None: ...

    def abandon(self, error: BaseException) -> None: ...


def _every_collective() -> dict[str, list[str]]:
    dist.init_process_group("gloo")
    before = (Work.wait, ProcessGroup.monitored_barrier, distributed_c10d._new_group_with_tag)
    rank, size = dist.get_rank(), dist.get_world_size()
    world = enter_world()
    attached, logs = Attached(world), {}

    def gather() -> None:
        dist.gather(torch.ones(1), [torch.empty(1)] * size if rank == 0 else None)

    def pairs() -> None:
        # The receiver waits a while: a message that has arrived is still received by a wait.
        if rank == 0:
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.empty(1), 0)

    def later() -> None:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert not attached.is_away
        time.sleep(0.1 * rank)
        work.wait()

    calls: dict[str, Any] = {
        "all_reduce": lambda: all_reduce(torch.ones(1)),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather([torch.empty(1)] * size, torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 0),
        "gather": gather,
        "all_gather_object": lambda: dist.all_gather_object([None] * size, rank),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "monitored_barrier": dist.monitored_barrier,
        "new_group": lambda: dist.new_group([0, 1]),
        "pairs": pairs,
        "later": later,
    }
    for name, call in calls.items():
        if rank == 1:
            time.sleep(0.05)  # worker 0 has to wait
        call()
        assert not attached.is_away
        logs[name], attached.log = attached.log, []

    # Not the program's: our own channels, and other threads, which do not step.
    world.channel("ours").all_reduce(torch.ones(1)).wait()
    world.channel("ours, large").all_reduce(torch.ones(10**6)).wait()
    other = threading.Thread(target=dist.barrier)
    other.start()
    other.join()
    logs["ours"], attached.log = attached.log, []

    world.open.remove(attached)
    leave_world(world)
    after = (Work.wait, ProcessGroup.monitored_barrier, distributed_c10d._new_group_with_tag)
    assert before == after
    dist.barrier()
    logs["closed"] = attached.log
    dist.destroy_process_group()
    return logs


def test_a_worker_is_away_while_its_program_is_in_a_collective_of_its_own() -> None:
    logs = processes(_every_collective, 2)[0].result
    assert logs.pop("ours") == logs.pop("closed") == []
    assert len(logs["pairs"]) <= 1  # a send may be through before it is waited for
    del logs["pairs"]
    later = logs.pop("later")
    assert len(later) == 1
    assert "in later (work.wait)" in later[0]
    for name, log in logs.items():
        assert log, f"{name} was not noticed"
        for where in log:
            assert where.startswith("test_own_collectives.py:"), where
            assert f"(dist.{name})" in where, where


def _waits_for_each_other() -> list[str]:
    """Worker 0 is in a barrier of two, worker 1 receives, worker 2 computes; then it all ends."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    others = dist.new_group([0, 2])
    world = enter_world()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 2:
            time.sleep(2.5)
        if rank == 1:
            dist.recv(torch.empty(1), 2)
        else:
            dist.barrier(others)
        if rank == 2:
            dist.send(torch.ones(1), 1)
    leave_world(world)
    dist.destroy_process_group()
    return [str(one.message) for one in caught if one.category is StuckWarning]


def test_who_waits_long_says_where_everybody_is() -> None:
    limit = {"OFFBEAT_STUCK_S": "1"}
    zero, one, two = (
        each.result for each in processes(_waits_for_each_other, 3, environment=limit)
    )
    assert two == []
    (zero,), (one,) = zero, one
    assert zero.startswith("for 1 s worker 0 has waited at test_own_collectives.py:")
    assert "in _waits_for_each_other (dist.barrier); worker 1 waits at test_own_co" in zero
    assert "in _waits_for_each_other (dist.recv); worker 2 is in no collective. " in zero
    assert "(dist.recv); worker 0 waits at test_own_collectives.py:" in one


def test_the_limit_must_be_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stuck_s() == 300.0
    for wrong in ("0", "soon", "nan", "-1"):
        monkeypatch.setenv("OFFBEAT_STUCK_S", wrong)
        with pytest.raises(ValueError, match="OFFBEAT_STUCK_S must be a number of seconds above 0"):
            stuck_s()


def test_a_collective_inside_a_collective_is_one_stay() -> None:
    world = enter_world()
    attached = Attached(world)
    with world.elsewhere("outer"), world.elsewhere("inner"):
        assert attached.is_away
    assert (attached.log, attached.is_away) == (["outer"], False)
    with pytest.raises(KeyError), world.elsewhere("again"):
        raise KeyError
    world.open.remove(attached)
    leave_world(world)
    assert offbeat.world_size() == 1
