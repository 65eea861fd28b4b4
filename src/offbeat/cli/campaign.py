"""`offbeat campaign`: its arguments."""

from __future__ import annotations

import shlex
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offbeat import report as reports
from offbeat.cli.shared import FAILED, INTERRUPTED, WRONG, Jobs, cores, tables
from offbeat.errors import OffbeatError
from offbeat.lab import progress, verdict
from offbeat.lab.campaign import PROCESSES, Campaign, check_engine
from offbeat.lab.campaign_file import Settings
from offbeat.lab.results_file import ResultsFile


def campaign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What is to be raced, as TOML.")],
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where results are appended; beside FILE, with the ending .jsonl.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="processes|ray[:ADDRESS]",
            help="What the runs are made on: processes of this machine, or a Ray cluster.",
        ),
    ] = PROCESSES,
) -> None:
    """Race on many clusters and tasks, from a file; go on where it was interrupted.

    [dim]offbeat campaign league.toml[/]

    Exit status: 0; 1 if a run failed; 2 for wrong arguments; 130 after Ctrl-C.
    """
    try:
        check_engine(engine)
        chosen = Campaign(Settings.load(file), shlex.join(["offbeat", *sys.argv[1:]]))
        opened = ResultsFile(results or file.with_suffix(".jsonl"))
    except (OffbeatError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WRONG) from None
    try:
        status = _run(chosen, opened, jobs or cores(), engine)
    finally:
        opened.close()
    raise typer.Exit(status)


def _run(chosen: Campaign, opened: ResultsFile, jobs: int, engine: str) -> int:
    status = 0
    races = chosen.races
    try:
        chosen.read(opened)
        console = Console(stderr=True, highlight=False)
        trials = races[0].trials if len(races[0].rates) > 1 else 0
        show = progress.Lines(console, chosen.labels, races[0].seeds, "virtual s", trials)
        show.done(len(chosen.tuned), len(chosen.results))
        chosen.run(opened, show, jobs, engine)
    except KeyboardInterrupt:
        typer.echo("Interrupted: the same command goes on from here.", err=True)
        status = INTERRUPTED
    except BrokenProcessPool:
        typer.echo(
            "A process was ended from outside: the same command goes on from here.", err=True
        )
        status = FAILED
    except OffbeatError as error:
        typer.echo(str(error), err=True)
        return FAILED if chosen.results else WRONG
    _show(chosen)
    failed = any(result.error for result in chosen.results.values())
    return status or (FAILED if failed else 0)


def _show(chosen: Campaign) -> None:
    """A table and a sentence for every race, as far as it has come."""
    out = tables()
    for number, race in enumerate(chosen.races):
        lines, results = chosen.lines(number)
        if results:
            out.print(f"\n[bold]{race.task_name} on {race.cluster.name}[/]")
            runs = reports.measured(lines)
            out.print(reports.table(runs), *reports.edges(runs), sep="\n")
            out.print(f"\n{verdict.sentence(race, results)}")
