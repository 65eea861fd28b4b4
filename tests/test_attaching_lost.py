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
from typing import Any

import pytest
import torch

import offbeat
from offbeat.alike import FirstModel
from offbeat.errors import WorkerLostError
from offbeat.testing import processes
from offbeat.worlds import enter_world, gloo, leave_world, mesh, store

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
