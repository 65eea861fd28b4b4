"""`offbeat league`: what campaigns have found, as a table here and a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from offbeat.cli.shared import WRONG, Page, tables
from offbeat.errors import ReportError
from offbeat.lab import league as leagues
from offbeat.lab.league.words import sentences


def league(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Files that [bold]offbeat campaign[/] appends to, be they whole or not.",
            show_default=False,
        ),
    ],
    report: Page = None,
) -> None:
    """Compare algorithms over all races of campaigns.

    [dim]offbeat league benchmarks/results/league.jsonl --report league.html[/]

    Exit status: 0; 2 for what cannot be read or written.
    """
    try:
        found = leagues.load(results)
        figures = leagues.figures.of(found)
        if report is not None:
            leagues.page.write(found, figures, report)
    except ReportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WRONG) from None
    over_all = figures.overall
    out = tables(markup=False)
    out.print(_table(over_all))
    for text in sentences(found, over_all):
        out.print(f"\n{text}")
    if found.waiting:
        out.print(f"\nNot run yet: {', '.join(found.waiting)}.")
    if report is not None:
        typer.echo(f"\nreport: {report}")


def _table(over_all: list[leagues.figures.Overall]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("algorithm", style="bold", overflow="fold")
    table.add_column("family")
    for name in ("races", "first", "near", "never", "behind", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in over_all:
        counts = map(str, (each.races, each.first, each.near, each.never))
        behind = (_times(each.median_behind), _times(max(each.behind)))
        table.add_row(each.label, each.family, *counts, *behind)
    return table


def _times(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}"
