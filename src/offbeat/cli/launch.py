"""`offbeat launch`: argument parsing only, in torchrun's spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.launch.job import DEFAULT_PORT, LaunchError
from offbeat.launch.launcher import launch as run
from offbeat.launch.logs import Choice, LogChoices
from offbeat.launch.plan import JOIN_S, Plan, command, node_count, worker_count

WRONG = 2


def _spelled(flag: str) -> str:
    """torchrun's spellings: --nproc_per_node, --max-restarts."""
    return {"max-restarts": "restart"}.get(name := flag.replace("_", "-"), name)


SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "token_normalize_func": _spelled,
}

_JOB, _NODES, _OUTPUT = "Job", "Several nodes", "Output"


def launch(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Your training script.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS...", help="What your script gets.", show_default=False),
    ] = None,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            metavar="N|auto|cpu|gpu|xpu",
            envvar="PET_NPROC_PER_NODE",
            show_envvar=False,
            help="Workers on this node.",
            rich_help_panel=_JOB,
        ),
    ] = "1",
    restart: Annotated[
        int,
        typer.Option(
            metavar="N",
            envvar="PET_MAX_RESTARTS",
            show_envvar=False,
            help="How often a lost worker is started again, to join the others.",
            rich_help_panel=_JOB,
        ),
    ] = 0,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="SCRIPT is a module's name.", rich_help_panel=_JOB),
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option("--no-python", help="SCRIPT is a program, not Python.", rich_help_panel=_JOB),
    ] = False,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            envvar="PET_SHUTDOWN_TIMEOUT",
            show_envvar=False,
            help="From a signal to SIGKILL; 30, or 0.5 after Ctrl-C.",
            show_default=False,
            rich_help_panel=_JOB,
        ),
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            envvar="PET_ROLE",
            show_envvar=False,
            help="ROLE_NAME of the workers, and their prefix.",
            rich_help_panel=_JOB,
        ),
    ] = "default",
    nnodes: Annotated[
        str,
        typer.Option(
            metavar="N",
            envvar="PET_NNODES",
            show_envvar=False,
            help="How many nodes there are.",
            rich_help_panel=_NODES,
        ),
    ] = "1",
    node_rank: Annotated[
        int,
        typer.Option(
            envvar="PET_NODE_RANK",
            show_envvar=False,
            help="Which one this is; node 0 hosts the store.",
            rich_help_panel=_NODES,
        ),
    ] = 0,
    master_addr: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            envvar="PET_MASTER_ADDR",
            show_envvar=False,
            help="Where node 0 is.",
            rich_help_panel=_NODES,
        ),
    ] = "127.0.0.1",
    master_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            envvar="PET_MASTER_PORT",
            show_envvar=False,
            help=f"Its port; {DEFAULT_PORT}, or on one node a free one.",
            show_default=False,
            rich_help_panel=_NODES,
        ),
    ] = None,
    standalone: Annotated[
        bool,
        typer.Option("--standalone", help="One node, on a free port.", rich_help_panel=_NODES),
    ] = False,
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS:PORT",
            envvar="PET_RDZV_ENDPOINT",
            show_envvar=False,
            help="The same as --master-addr and --master-port.",
            show_default=False,
            rich_help_panel=_NODES,
        ),
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            envvar="PET_RDZV_ID",
            show_envvar=False,
            help="Of the run: TORCHELASTIC_RUN_ID.",
            rich_help_panel=_NODES,
        ),
    ] = "none",
    join_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="How long nodes wait for each other at the start.",
            rich_help_panel=_NODES,
        ),
    ] = JOIN_S,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="PET_LOG_DIR",
            show_envvar=False,
            help="Where --redirects and --tee write files.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    redirects: Annotated[
        str,
        typer.Option(
            "--redirects",
            "-r",
            metavar="0-3|RANK:0-3,...",
            envvar="PET_REDIRECTS",
            show_envvar=False,
            help="To files instead of the console: 1 stdout, 2 stderr, 3 both.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "0",
    tee: Annotated[
        str,
        typer.Option(
            "--tee",
            "-t",
            metavar="0-3|RANK:0-3,...",
            envvar="PET_TEE",
            show_envvar=False,
            help="To files and, behind a prefix, to the console.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "0",
    local_ranks_filter: Annotated[
        str,
        typer.Option(
            metavar="RANK,...",
            envvar="PET_LOCAL_RANKS_FILTER",
            show_envvar=False,
            help="Only these local ranks come to the console.",
            show_default=False,
            rich_help_panel=_OUTPUT,
        ),
    ] = "",
) -> None:
    """Start the workers of a job, as torchrun does, and let it survive their loss.

    [dim]offbeat launch --nproc-per-node 4 train.py --epochs 3[/]

    [dim]offbeat launch --nnodes 2 --node-rank 1 --master-addr HOST train.py[/]

    A script for torchrun runs as it is: a worker that fails ends the others,
    unless the job says that it survives. Flags may have _ in place of -.

    Exit status: 0 if the workers that are left ended well, 1 if not, 2 for
    wrong arguments; after a signal 128 and its number, so 130 after Ctrl-C.
    """
    try:
        if rdzv_endpoint:
            master_addr, master_port = _endpoint(rdzv_endpoint)
        nodes = node_count(nnodes)
        if standalone and nodes > 1:
            raise LaunchError(f"--standalone means one node, but --nnodes is {nodes}")
        plan = Plan(
            command(script, arguments or [], module, no_python),
            worker_count(nproc_per_node),
            nodes,
            node_rank,
            "127.0.0.1" if standalone else master_addr,
            _port(master_port, nodes, standalone),
            restart,
            shutdown_timeout,
            join_timeout,
            rdzv_id,
            role,
            LogChoices(
                log_dir,
                Choice.parse("--redirects", redirects),
                Choice.parse("--tee", tee),
                _ranks(local_ranks_filter),
            ),
        )
        status = run(plan)
    except LaunchError as error:
        typer.echo(f"offbeat launch: {error}", err=True)
        raise typer.Exit(WRONG) from None
    raise typer.Exit(status)


def _port(given: int | None, nodes: int, standalone: bool) -> int:
    if standalone:
        return 0
    return given if given is not None else DEFAULT_PORT if nodes > 1 else 0


def _endpoint(words: str) -> tuple[str, int | None]:
    address, _, port = words.rpartition(":") if ":" in words else (words, "", "")
    try:
        return address, int(port) if port else None
    except ValueError:
        raise LaunchError(f"--rdzv-endpoint must be ADDRESS:PORT, got {words!r}") from None


def _ranks(words: str) -> frozenset[int] | None:
    try:
        return frozenset(map(int, words.split(","))) if words else None
    except ValueError:
        raise LaunchError(
            f"--local-ranks-filter must be numbers with commas between, got {words!r}"
        ) from None
