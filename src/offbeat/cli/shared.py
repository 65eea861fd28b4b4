"""What several commands have in common: exit codes, options, where tables go."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

FAILED, WRONG, NOT_REACHED, INTERRUPTED = 1, 2, 3, 130
_WIDE = 100  # of a table that goes into a file


class World(StrEnum):
    virtual = "virtual"
    real = "real"


Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Virtual runs at a time; as many as there are cores.", show_default=False
    ),
]
Page = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to look at there.")]


def cores() -> int:
    """Those that this process may use, where the system says so."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tables(markup: bool = True) -> Console:
    """Where tables are printed: as wide as the terminal, or as a line of a file."""
    out = Console(highlight=False, markup=markup)
    return out if out.is_terminal else Console(highlight=False, markup=markup, width=_WIDE)
