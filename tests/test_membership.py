"""The members and their epoch are read at once: they may change between any two instructions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from offbeat.data import survivors
from offbeat.errors import EpochOver
from offbeat.worlds.alone import AloneWorld
from offbeat.worlds.meeting import Meeting

BEFORE, AFTER = (0, (0, 1, 2)), (1, (0, 2))


@contextmanager
def interrupted(function: Any, number: int, act: Callable[[], None]) -> Iterator[list[bool]]:
    """Do something before this instruction of a function, as another thread might; say whether."""
    count, done, tracing = 0, [False], sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes = frame.f_code is function.__code__
            return trace if frame.f_trace_opcodes else None
        if event == "opcode":
            if count == number:
                done[0] = True
                act()
            count += 1
        return trace

    sys.settrace(trace)
    try:
        yield done
    finally:
        sys.settrace(tracing)


def world_of(epoch: int, members: tuple[int, ...]) -> AloneWorld:
    world = AloneWorld(None, 0)
    world.survives = True
    world._begin_epoch(epoch, members)
    return world


def changes(world: AloneWorld) -> Callable[[], None]:
    return lambda: world._begin_epoch(*AFTER)


def test_a_share_is_of_members_and_an_epoch_that_belong_together() -> None:
    found, number, goes_on = set(), 0, True
    while goes_on:
        world = world_of(*BEFORE)
        with interrupted(survivors._written, number, changes(world)) as done:
            epoch, members = survivors._written(world, "a turn")
        found.add((epoch, tuple(members)))
        number, goes_on = number + 1, done[0]
        world.close()
    assert found == {BEFORE, AFTER}


class LastToCome:
    """The control plane of an epoch, as the last of its members finds it."""

    def __init__(self, world: AloneWorld) -> None:
        self._world, self._epoch = world, world.epoch
        self._set: set[str] = set()

    def add(self, key: str, amount: int) -> int:
        self._check()
        assert key == f"meet/here/{self._epoch}"
        return len(dict([BEFORE, AFTER])[self._epoch])

    def set(self, key: str, value: bytes) -> None:
        self._check()
        self._set.add(key)

    def wait(self, key: str) -> None:
        self._check()
        assert key in self._set, "it would wait for ever"

    def _check(self) -> None:
        if self._world.epoch != self._epoch:
            raise EpochOver("the members have changed")


def test_the_last_to_come_knows_that_all_are_here_whenever_one_is_lost() -> None:
    met, number, goes_on = set(), 0, True
    while goes_on:
        world = world_of(*BEFORE)
        world.control_in_epoch = lambda world=world: LastToCome(world)  # type: ignore
        with interrupted(Meeting.meet, number, changes(world)) as done:
            met.add(world.meet("here", act=lambda epoch: epoch))
        number, goes_on = number + 1, done[0]
        world.close()
    assert met == {0, 1}
