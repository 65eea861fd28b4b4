"""Every world passes the public conformance checks."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import offbeat
from offbeat import testing
from offbeat.clusters import Cluster
from offbeat.worlds import enter_world, leave_world
from offbeat.worlds.threads import within

NETWORKED = Cluster.uniform(4, latency_s=0.001, bandwidth_bytes_per_s=1e9)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_virtual_world_conforms(check: testing.Check, workers: int) -> None:
    offbeat.run(testing.on_this_world(check), NETWORKED, workers=workers)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_the_world_of_one_conforms(check: testing.Check) -> None:
    before, others = sys.getswitchinterval(), set(threading.enumerate())
    testing.on_this_world(check)()
    assert set(threading.enumerate()) <= others  # another test's may still end
    assert sys.getswitchinterval() == before


@pytest.mark.real
@pytest.mark.parametrize("workers", [2, 4])
def test_the_real_world_conforms(workers: int) -> None:
    testing.processes(testing.on_this_world(*testing.CHECKS), workers)


def test_the_bytes_that_all_workers_send_are_counted() -> None:
    def work() -> list[float | None]:
        world = enter_world(None, 0)
        channel, counted = world.channel("bytes"), []
        four = torch.zeros(4)  # 16 bytes
        for call in (
            lambda: channel.all_reduce(four),
            lambda: channel.broadcast(four, 0),
            lambda: channel.all_gather(four, torch.zeros(3, 4)),
            lambda: channel.exchange({(world.rank + 1) % 3: four}, {(world.rank - 1) % 3: four}),
        ):
            call().wait()
            world.sleep_until(10.0 * (1 + len(counted)))  # all have sent
            counted.append(world.sent_bytes)
            world.sleep_until(world.now() + 1.0)  # and all have counted
        channel.close()
        leave_world(world)
        return counted

    sums = [2 * 2 * 16, 2 * 16, 3 * 2 * 16, 3 * 16]
    expected = [float(sum(sums[: count + 1])) for count in range(4)]
    assert offbeat.run(work, "uniform-8", workers=3).results == [expected] * 3


def test_a_wait_with_a_limit_looks_as_often_however_long_the_process_is_stopped() -> None:
    """Seconds that pass while it is stopped would use up the limit, and nobody could say a word."""
    looks: list[float] = []

    def stopped(look_s: float) -> bool:
        looks.append(look_s)
        return len(looks) == 95  # each of them may have taken an hour

    assert within(10.0, stopped)
    assert not within(1.0, lambda look_s: False)
