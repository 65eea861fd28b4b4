"""The `offbeat` command: argument parsing only."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import offbeat
from offbeat.cli import report
from offbeat.cli.campaign import campaign
from offbeat.cli.doctor import doctor
from offbeat.cli.federated import federated
from offbeat.cli.launch import SETTINGS, launch
from offbeat.cli.league import league
from offbeat.cli.profile import profile
from offbeat.cli.race import race
from offbeat.clusters import Cluster, named
from offbeat.errors import ClusterError
from offbeat.lab.simulate import simulate as run_script
from offbeat.records import RecordsFile

_WHICH_CLUSTER = (
    "offbeat simulate needs --cluster: one of those that `offbeat clusters` lists, such as "
    "--cluster two-slow-of-eight, or a cluster file of yours (docs/clusters.md)"
)

app = typer.Typer(
    name="offbeat",
    help="Data-parallel training that does not wait for the slowest worker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"offbeat {offbeat.__version__}")
        raise typer.Exit


def _refuse(message: object) -> typer.Exit:
    """Say what is wrong with the command line."""
    typer.echo(str(message), err=True)
    return typer.Exit(2)


def _load(cluster: str) -> Cluster:
    try:
        return Cluster.load(cluster)
    except ClusterError as error:
        raise _refuse(error) from None


app.command(context_settings=SETTINGS)(launch)
app.command()(profile)
app.command()(doctor)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def simulate(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Your training script.", show_default=False)
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Which cluster to run on: a TOML file, or a name from [bold]offbeat clusters[/]. "
            "It must be said.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENTS", help="After --: what your script gets.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Resize the cluster to so many workers.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of noise and of random numbers.")] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what every worker prints, and all frames.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write what happens there, as JSON lines.", show_default=False
        ),
    ] = None,
) -> None:
    """Run your own training script on a virtual cluster, in this process.

    [dim]offbeat simulate train.py --cluster two-slow-of-eight -- --epochs 3[/]
    """
    if not script.is_file():
        raise _refuse(f"{script}: there is no such script; give the path of a Python file")
    if cluster is None:
        raise _refuse(_WHICH_CLUSTER)
    chosen = _load(cluster)
    if workers is not None:
        try:
            chosen = chosen.resized(workers)
        except ClusterError as error:
            raise _refuse(error) from None
    try:
        sink = None if records is None else RecordsFile(records)
    except OSError as error:
        raise _refuse(f"{records} cannot be written: {error.strerror}") from None
    simulation = run_script(
        script,
        chosen,
        seed=seed,
        arguments=arguments or (),
        verbose=verbose,
        records=sink,
        command=shlex.join(["offbeat", *sys.argv[1:]]),
    )
    if sink is not None:
        sink.close()
    if simulation.error is not None:
        typer.echo(simulation.traceback(everything=verbose), err=True)
        raise typer.Exit(130 if simulation.interrupted else 1)
    Console(highlight=False).print("", simulation.summary(), sep="\n")


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE", help="One to describe in full.")
    ] = None,
) -> None:
    """List the clusters that ship with offbeat, or describe one."""
    if name is not None:
        typer.echo(_load(name).describe())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cluster", no_wrap=True, style="bold")
    table.add_column("workers", justify="right")
    table.add_column("description")
    for cluster in map(Cluster.load, named()):
        table.add_row(cluster.name, str(cluster.workers), cluster.description)
    Console(highlight=False).print(table)


app.command()(race)
app.command()(campaign)
app.command()(league)
app.command()(federated)
app.command()(report.report)
app.command()(report.trace)
