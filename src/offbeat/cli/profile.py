"""`offbeat profile`: argument parsing only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import offbeat
from offbeat.lab.profile import FEWEST, WARM_UP, ProfileError
from offbeat.lab.profile import profile as measure
from offbeat.worlds.real import under_torchrun


def profile(
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="Your attached training script; a stand-in model if left out.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS", help="After --: what your script gets.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The cluster file to write.")
    ] = Path("my-cluster.toml"),
    steps: Annotated[
        int, typer.Option(min=WARM_UP + FEWEST, help="Micro-batches of the stand-in model.")
    ] = 200,
) -> None:
    """Measure the workers of a job and the network between them: a cluster file.

    [dim]torchrun --nproc-per-node 4 -m offbeat profile -o my-cluster.toml[/]

    [dim]torchrun --nproc-per-node 4 -m offbeat profile -o my.toml train.py -- --epochs 1[/]
    """
    speaks = offbeat.rank() == 0
    try:
        if script is not None and not script.is_file():
            raise ProfileError(f"{script}: there is no such script; give the path of a Python file")
        if not under_torchrun():
            typer.echo(
                "not under torchrun, so this measures one worker, and no network; for a cluster:\n"
                f"  torchrun --nproc-per-node 4 -m offbeat {shlex.join(sys.argv[1:])}",
                err=True,
            )
        found = measure(output, script, arguments or (), steps=steps)
    except ProfileError as error:
        if speaks:
            typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if found is not None:
        console = Console(highlight=False)
        console.print(found.summary(), found.network(), sep="\n")
        console.print(f"written: {output}", soft_wrap=True)
