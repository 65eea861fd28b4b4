"""Timing the collectives that a program, or a framework, issues itself, by call site.

As in worlds/own.py, every synchronous collective of torch.distributed ends in `Work.wait`, which is
replaced while somebody looks. Those of offbeat are left out. What waits in C++ alone is not seen:
the reducer of DistributedDataParallel, functional collectives.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch._C._distributed_c10d import ProcessGroup
from torch._C._distributed_c10d import Work as C10dWork
from torch.distributed import distributed_c10d

from offbeat.doctor.known import Known, known
from offbeat.worlds.places import Place, is_ours, place

_INSTALLED = tuple(
    f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("purelib", "platlib", "stdlib")
)


@dataclass
class Wait:
    """All waits at one call site."""

    place: Place
    """The line that has issued the collective: a framework's, if it is known."""
    program: Place | None
    """The line of the program itself that led there."""
    known: Known | None
    count: int = 0
    seconds: float = 0.0


class Waits:
    """What this process has waited for in collectives that are not offbeat's, by call site."""

    def __init__(self) -> None:
        self.sites: dict[tuple[Any, ...], Wait] = {}
        _looking.append(self)
        _replace()

    def close(self) -> None:
        """Look no longer."""
        if self in _looking:
            _looking.remove(self)
        if not _looking:
            _restore()

    def note(self, frame: FrameType, verb: str, seconds: float) -> None:
        """Somebody has waited in `verb`, called at `frame`."""
        stack = _stack(frame)
        if (wait := self.sites.get(stack)) is None:
            wait = self.sites[stack] = _site(frame, verb)
        wait.count += 1
        wait.seconds += seconds

    @property
    def by_place(self) -> list[Wait]:
        """One entry a place, the longest first."""
        merged: dict[tuple[Place, Place | None], Wait] = {}
        for each in self.sites.values():
            one = merged.setdefault(
                (each.place, each.program), Wait(each.place, each.program, each.known)
            )
            one.count += each.count
            one.seconds += each.seconds
        return sorted(merged.values(), key=lambda wait: -wait.seconds)


def _stack(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    lines = []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _site(frame: FrameType, verb: str) -> Wait:
    """Who has issued this: the known function, if there is one on the stack."""
    issued = place(frame, verb)
    outer: FrameType | None = frame
    found: Known | None = None
    program: Place | None = None
    while outer is not None:
        code = outer.f_code
        here = Place(code.co_filename, outer.f_lineno, code.co_name, issued.verb)
        if found is None and (found := known(code.co_filename, code.co_name)) is not None:
            issued = here
        if program is None and _is_program(code.co_filename):
            program = here
        outer = outer.f_back
    return Wait(issued, program, found)


def _is_program(file: str) -> bool:
    """Whether a file is the program's own: not installed, here or in another place, nor ours."""
    folders = set(Path(file).parts[:-1])
    ours = os.sep + "offbeat" + os.sep
    return not (
        file.startswith((*_INSTALLED, "<"))
        or folders & {"site-packages", "dist-packages"}
        or f"{os.sep}src{ours}" in file
    )


# --- replacing ------------------------------------------------------------------------------

_looking: list[Waits] = []
_TARGETS: tuple[tuple[Any, str, str], ...] = (
    (C10dWork, "wait", "work.wait"),
    (ProcessGroup, "monitored_barrier", "monitored_barrier"),
    (distributed_c10d, "_new_group_with_tag", "new_group"),
)
_originals: list[tuple[Any, str, Any, Any]] = []


def _replace() -> None:
    if _originals:
        return
    for owner, name, verb in _TARGETS:
        replacement = _timed(getattr(owner, name), verb)
        _originals.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)


def _restore() -> None:
    while _originals:
        owner, name, original, replacement = _originals.pop()
        if getattr(owner, name) is replacement:  # else it stays beneath another, and does nothing
            setattr(owner, name, original)


def _timed(original: Callable[..., Any], verb: str) -> Callable[..., Any]:
    def wait(*arguments: Any, **settings: Any) -> Any:
        frame = sys._getframe(1)
        if not _looking or _is_nested(frame) or is_ours(frame):
            return original(*arguments, **settings)
        began = time.perf_counter()
        try:
            return original(*arguments, **settings)
        finally:
            seconds = time.perf_counter() - began
            for each in list(_looking):
                each.note(frame, verb, seconds)

    return wait


def _is_nested(frame: FrameType | None) -> bool:
    """Whether another replacement of ours is about to time the same call."""
    return frame is not None and frame.f_code is _code


_code = _timed(lambda: None, "").__code__


def _forget_in_child() -> None:
    """A forked child has no part in the job."""
    _looking.clear()


os.register_at_fork(after_in_child=_forget_in_child)
