"""offbeat report, offbeat trace: what was recorded, drawn again without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from offbeat import report as reports
from offbeat.errors import ReportError

Records = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORDS...",
        help="Files that [bold]offbeat race[/] wrote, or folders given as $OFFBEAT_RECORDS.",
        show_default=False,
    ),
]


def report(
    records: Records,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")
    ] = Path("report.html"),
    html: Annotated[bool, typer.Option(help="Write the page, or print the table only.")] = True,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write scalars there.", show_default=False),
    ] = None,
) -> None:
    """Compare recorded runs: a table here, and a page to look at."""
    try:
        runs = reports.load(records)
        if html:
            reports.html.write(runs, output)
        if tensorboard is not None:
            reports.scalars.write(runs, tensorboard)
    except ReportError as error:
        raise _refuse(error) from None
    out = Console(highlight=False, markup=False)
    out.print(reports.table(runs), *reports.edges(runs), sep="\n")
    for failure in reports.failures(runs):
        out.print(f"\n{failure}")
    if html or tensorboard:
        typer.echo()
    if html:
        typer.echo(f"report: {output}")
    if tensorboard is not None:
        typer.echo(f"scalars: {tensorboard} (tensorboard --logdir {tensorboard})")


def trace(
    records: Records,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The trace to write.")
    ] = Path("trace.json"),
) -> None:
    """Write recorded runs as a trace, to be opened in ui.perfetto.dev."""
    try:
        reports.trace.write(reports.load(records), output)
    except ReportError as error:
        raise _refuse(error) from None
    typer.echo(f"trace: {output} (open it in https://ui.perfetto.dev)")


def _refuse(error: ReportError) -> typer.Exit:
    typer.echo(str(error), err=True)
    return typer.Exit(2)
