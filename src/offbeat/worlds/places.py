"""Where in the program something was called: the first frame that is neither torch's nor ours."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import offbeat.errors

_TORCH, _OURS = (
    f"{Path(file).parent}{os.sep}" for file in (torch.__file__, offbeat.errors.__file__)
)
_WRAPPERS = ("wrapper", "_fn", "inner", "wait")


class Place(NamedTuple):
    """A line of the program, and what it has called."""

    file: str
    line: int
    function: str
    verb: str

    @property
    def short(self) -> str:
        """File and line."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.short} in {self.function} ({self.verb})"


def place(frame: FrameType | None, verb: str) -> Place:
    """Return where the program is, at this frame or further out, and which verb it has called."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, _OURS)):
            return Place(code.co_filename, frame.f_lineno, code.co_name, verb)
        if code.co_name not in _WRAPPERS:
            verb = f"dist.{code.co_name}"
        frame = frame.f_back
    return Place("?", 0, "?", verb)


def is_ours(frame: FrameType | None) -> bool:
    """Say whether offbeat has called what of torch's is running in this frame."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)
