"""`offbeat federated`: its arguments."""

from __future__ import annotations

import shlex
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.shared import FAILED, INTERRUPTED, WRONG, Jobs, Page, World, cores, tables
from offbeat.errors import OffbeatError
from offbeat.lab import federation, progress
from offbeat.lab.federation import Comparison, Result
from offbeat.lab.federation.entrants import DEFAULT, known
from offbeat.lab.federation.tasks import MODELS, TASKS
from offbeat.lab.results_file import ResultsFile
from offbeat.records import Line
from offbeat.report.files import WholeFile


def federated(
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE],...",
            help=f"Methods to compare, of {', '.join(known())}; if none is named: {DEFAULT}",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"Of {', '.join(TASKS)}; fashion:FOLDER, cifar10:FOLDER."
        ),
    ] = "digits",
    tasks: Annotated[int, typer.Option(help="Into how many tasks the classes are cut.")] = 5,
    clients: Annotated[int, typer.Option(help="How many clients there are.")] = 5,
    seeds: Annotated[int, typer.Option(help="How many: data, clients and order of classes.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    world: Annotated[
        World, typer.Option(help="In virtual time, or on processes of this machine.")
    ] = World.virtual,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Speeds of the clients: a TOML file, or a name from [bold]offbeat clusters[/]; "
            "equal ones if none is named, on processes the machine's own.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{' or '.join(MODELS)}.")] = MODELS[0],
    samples: Annotated[
        int | None,
        typer.Option(help="To train on, drawn by the seed; the task's own.", show_default=False),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Of a task; the task's own.", show_default=False)
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Samples of a task that all clients together keep; the task's own.",
            show_default=False,
        ),
    ] = None,
    beta: Annotated[
        float, typer.Option(help="Of the Dirichlet split over clients: small, unlike clients.")
    ] = 0.5,
    quorum: Annotated[
        str, typer.Option(help="Clients that a round waits for: all, a number, or a share.")
    ] = "all",
    secure: Annotated[
        bool, typer.Option("--secure", help="Mask what clients give to sums between tasks.")
    ] = False,
    jobs: Jobs = None,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where runs are appended, and not made again; beside the report, with the ending "
            ".jsonl.",
            show_default=False,
        ),
    ] = None,
    report: Page = None,
) -> None:
    """Compare methods against forgetting: clients whose tasks bring new classes.

    [dim]offbeat federated --task digits --method fedcbdr,uniform --report forgetting.html[/]

    Exit status: 0; 1 if a run failed; 2 for wrong arguments; 130 after Ctrl-C.
    """
    page: WholeFile | None = None
    opened: ResultsFile | None = None
    try:
        chosen = Comparison.of(
            method or (),
            task=task,
            tasks=tasks,
            clients=clients,
            model=model,
            samples=samples,
            rounds=rounds,
            budget=budget,
            beta=beta,
            quorum=_quorum(quorum),
            secure=secure,
            cluster=cluster,
            world=world.value,
            seeds=seeds,
            first_seed=first_seed,
            command=shlex.join(["offbeat", *sys.argv[1:]]),
        )
        page = None if report is None else WholeFile(report)
        if (
            path := results or (None if report is None else report.with_suffix(".jsonl"))
        ) is not None:
            opened = ResultsFile(path)
            chosen.read(opened)
        status = _run(chosen, opened, page, jobs or cores())
    except (OffbeatError, ValueError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(WRONG) from None
    finally:
        if page is not None:
            page.discard()
        if opened is not None:
            opened.close()
    raise typer.Exit(status)


def _quorum(text: str) -> str | int | float:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _run(chosen: Comparison, opened: ResultsFile | None, page: WholeFile | None, jobs: int) -> int:
    done = {} if opened is None else chosen.read(opened)
    labels = [each.label for each in chosen.entrants]
    goes_on = "the same command goes on from here" if opened else "--results FILE would keep it"
    status = 0
    try:
        with progress.watching(labels, len(chosen.seeds), chosen.unit) as show:
            chosen.run(show, opened, jobs, done)
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {goes_on}.", err=True)
        status = INTERRUPTED
    except BrokenProcessPool:
        typer.echo(
            f"A process was ended from outside: {goes_on}; fewer --jobs need less memory.", err=True
        )
        status = FAILED
    made = [place for place in chosen.places if place in done]
    return _show(chosen, [line for place in made for line in done[place]], page) or status


def _show(chosen: Comparison, done: list[Line], page: WholeFile | None) -> int:
    results = [Result.read(line) for line in done if line["kind"] == "result"]
    if not results:
        return 0
    for each in results:
        if each.error is not None:
            typer.echo(f"\n{each.label}, seed {each.seed}, failed:\n{each.error}", err=True)
    out = tables()
    compared = federation.rows(results)
    out.print("", federation.table(compared, chosen.tasks, chosen.unit), sep="\n")
    out.print(f"\n{federation.sentence(compared, len(chosen.seeds))}")
    if page is not None:
        page.write(federation.page.page(chosen, done))
        page.keep()
        typer.echo(f"\nreport: {page.path}")
    return FAILED if any(each.error for each in results) else 0
