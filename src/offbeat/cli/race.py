"""`offbeat race`: its arguments."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import torch
import typer

import offbeat
from offbeat import report as reports
from offbeat.cli.shared import (
    FAILED,
    INTERRUPTED,
    NOT_REACHED,
    WRONG,
    Jobs,
    Page,
    World,
    cores,
    tables,
)
from offbeat.errors import OffbeatError
from offbeat.lab import progress, tuning, verdict
from offbeat.lab.contestants import algorithms as known_algorithms
from offbeat.lab.race import Race
from offbeat.lab.results import Standings
from offbeat.lab.tasks import TASKS
from offbeat.records import Line
from offbeat.report.files import WholeFile


def race(
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ALGORITHM[:SETTING=VALUE,...]]...",
            help=f"Of {', '.join(known_algorithms())} and ddp; a choice of them if none is named.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="The cluster to race on: a TOML file, or a name from [bold]offbeat clusters[/].",
        ),
    ] = "two-slow-of-eight",
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Of {', '.join(TASKS)}; cifar10:FOLDER; or module:function of yours.",
        ),
    ] = "digits",
    world: Annotated[
        World, typer.Option(help="In virtual time, or on paced processes of this machine.")
    ] = World.virtual,
    until: Annotated[
        str | None,
        typer.Option(
            help="When a run ends: target, 60s, 300rounds or 20000samples; if nothing is said, at "
            "the target, where the task has one.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="accuracy=0.95 or loss=0.1, instead of the task's own.", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="How many; 5 in virtual time, else 1.", show_default=False),
    ] = None,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    rates: Annotated[
        str,
        typer.Option(
            help="Factors of the task's learning rate to try first, in virtual time, by a seed "
            "that does not race; then those beside the best, and other sizes of rounds. A single "
            "one: no tuning."
        ),
    ] = "1,2,4",
    trials: Annotated[
        int,
        typer.Option(min=1, help="How many such tries each algorithm has, before it races."),
    ] = tuning.TRIALS,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SAMPLES",
            help="Samples of all workers between two evaluations, which cost no time.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Resize the cluster to so many workers.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures there.")
    ] = None,
    report: Page = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write there everything that happened, line by line."),
    ] = None,
) -> None:
    """Race algorithms on a cluster, and say which to use there.

    [dim]offbeat race sync eager:quorum=majority --cluster two-slow-of-eight[/]

    Exit status: 0; 1 if a worker failed; 2 for wrong arguments; 3 if nobody reached the target.
    """
    command = shlex.join(["offbeat", *sys.argv[1:]])
    outputs = _Outputs()
    try:
        chosen = Race.of(
            algorithms or (),
            cluster=cluster,
            task=task,
            world=world.value,
            until=until,
            target=target,
            seeds=seeds,
            first_seed=first_seed,
            rates=rates,
            trials=trials,
            every=every,
            workers=workers,
            command=command,
        )
        outputs.open(json, report, records)
        status = _run(chosen, outputs, command, jobs or cores())
    except (OffbeatError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WRONG) from None
    finally:
        outputs.discard()
    raise typer.Exit(status)


class _Records(WholeFile):
    """A sink of records."""

    def __call__(self, line: Line) -> None:
        self.write(dumps(line) + "\n")


class _Outputs:
    """The files that were asked for; all can be written, or none is begun."""

    def __init__(self) -> None:
        self.all: list[WholeFile] = []
        self.json: WholeFile | None = None
        self.report: WholeFile | None = None
        self.records: _Records | None = None
        self.keeps_records = False

    def open(self, json: Path | None, report: Path | None, records: Path | None) -> None:
        if json is not None:
            self.json = WholeFile(json)
            self.all.append(self.json)
        if report is not None:
            self.report = WholeFile(report)
            self.all.append(self.report)
        self.keeps_records = records is not None
        # A report is made from records: those that nobody asked for lie beside it meanwhile.
        if (path := records or report) is not None:
            self.records = _Records(path)
            self.all.append(self.records)

    def discard(self) -> None:
        for output in self.all:
            output.discard()


def _run(chosen: Race, outputs: _Outputs, command: str, jobs: int) -> int:
    for note in chosen.notes():
        typer.echo(note, err=True)
    labels = [each.label for each in chosen.contestants]
    trials = chosen.trials if len(chosen.rates) > 1 else 0
    with progress.watching(labels, chosen.seeds, chosen.unit, trials) as show:
        standings = chosen.run(show, outputs.records, jobs)
    text = verdict.sentence(chosen, standings.results)
    _show(standings, text)
    _write(outputs, standings, text, command)
    if standings.interrupted:
        return INTERRUPTED
    if standings.stopped or any(result.error for result in standings.results):
        return FAILED
    times = [result.seconds_to_target for result in standings.results]
    missed = chosen.plan.until.kind == "target" and not any(each is not None for each in times)
    return NOT_REACHED if missed else 0


def _show(standings: Standings, text: str) -> None:
    for result in standings.results:
        if result.error is not None:
            typer.echo(f"\n{result.label}, seed {result.seed}, failed:\n{result.error}", err=True)
    out = tables()
    if standings.interrupted:
        typer.echo("Interrupted: this is what was measured until then.", err=True)
    if standings.stopped:
        typer.echo(f"{standings.stopped}: this is what was measured until then.", err=True)
    if standings.results:
        runs = reports.measured(standings.lines)
        out.print("", reports.table(runs), *reports.edges(runs), sep="\n")
    out.print(f"\n{text}")


def _write(outputs: _Outputs, standings: Standings, text: str, command: str) -> None:
    if outputs.json is not None:
        content = {
            "command": command,
            "versions": {
                "offbeat": offbeat.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "interrupted": standings.interrupted,
            "runs": [asdict(result) for result in standings.results],
            "verdict": text,
        }
        outputs.json.write(dumps(content, indent=2) + "\n")
        outputs.json.keep()
    if outputs.records is None or standings.stopped:
        return
    outputs.records({"kind": "verdict", "text": text})
    outputs.records.flush()
    if outputs.report is not None and standings.results:
        outputs.report.write(reports.html.page(reports.load([outputs.records.part])))
        outputs.report.keep()
        typer.echo(f"\nreport: {outputs.report.path}")
    if outputs.keeps_records:
        outputs.records.keep()
