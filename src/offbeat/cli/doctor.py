"""`offbeat doctor`: argument parsing only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.doctor.script import examine


def doctor(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Your training script.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS", help="After --: what your script gets.", show_default=False
        ),
    ] = None,
) -> None:
    """Run your script, and say where its workers wait for each other, and what to write instead.

    [dim]torchrun --nproc-per-node 2 -m offbeat doctor train.py -- --epochs 1[/]
    """
    if not script.is_file():
        typer.echo(f"{script}: there is no such script; give the path of a Python file", err=True)
        raise typer.Exit(2)
    found = examine(script, arguments or ())
    if found is not None:
        typer.echo(f"\n{found}")
