"""`offbeat launch`: argument parsing only, in torchrun's spelling."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.launch.job import DEFAULT_PORT, LaunchError
from offbeat.launch.launcher import launch as run
from offbeat.launch.logs import Choice, LogChoices
from offbeat.launch.plan import JOIN_S, Plan, command, node_count, worker_count

WRONG, SIGNALLED = 2, 128


def _spelled(flag: str) -> str:
    """torchrun's spellings: --nproc_per_node, --max-restarts."""
    return {"max-restarts": "restart"}.get(name := flag.replace("_", "-"), name)


SETTINGS: dict[str, Any] = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "token_normalize_func": _spelled,
}

_STREAMS = "0-3|RANK:0-3,..."


def _option(panel: str, variable: str, words: str, *flags: str, **settings: Any) -> Any:
    """An option that torchrun has too, and reads from PET_`variable` as well."""
    return typer.Option(
        *flags,
        envvar=f"PET_{variable}" if variable else None,
        show_envvar=False,
        help=words,
        rich_help_panel=panel,
        **settings,
    )


_job, _nodes, _output = (partial(_option, panel) for panel in ("Job", "Several nodes", "Output"))


def launch(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Your training script.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS...", help="What your script gets.", show_default=False),
    ] = None,
    nproc_per_node: Annotated[
        str, _job("NPROC_PER_NODE", "Workers on this node.", metavar="N|auto|cpu|gpu|xpu")
    ] = "1",
    restart: Annotated[
        int,
        _job(
            "MAX_RESTARTS",
            "How often a lost worker is started again, to join the others.",
            metavar="N",
        ),
    ] = 0,
    module: Annotated[bool, _job("", "SCRIPT is a module's name.", "--module", "-m")] = False,
    no_python: Annotated[bool, _job("", "SCRIPT is a program, not Python.", "--no-python")] = False,
    shutdown_timeout: Annotated[
        float | None,
        _job(
            "SHUTDOWN_TIMEOUT",
            "From a signal to SIGKILL; 30, or 0.5 after Ctrl-C.",
            metavar="SECONDS",
            min=0.0,
            show_default=False,
        ),
    ] = None,
    role: Annotated[str, _job("ROLE", "ROLE_NAME of the workers, and their prefix.")] = "default",
    nnodes: Annotated[str, _nodes("NNODES", "How many nodes there are.", metavar="N")] = "1",
    node_rank: Annotated[
        int, _nodes("NODE_RANK", "Which one this is; node 0 hosts the store.")
    ] = 0,
    master_addr: Annotated[
        str, _nodes("MASTER_ADDR", "Where node 0 is.", metavar="ADDRESS")
    ] = "127.0.0.1",
    master_port: Annotated[
        int | None,
        _nodes(
            "MASTER_PORT",
            f"Its port; {DEFAULT_PORT}, or on one node a free one.",
            metavar="PORT",
            show_default=False,
        ),
    ] = None,
    standalone: Annotated[bool, _nodes("", "One node, on a free port.", "--standalone")] = False,
    rdzv_endpoint: Annotated[
        str,
        _nodes(
            "RDZV_ENDPOINT",
            "The same as --master-addr and --master-port.",
            metavar="ADDRESS:PORT",
            show_default=False,
        ),
    ] = "",
    rdzv_id: Annotated[
        str, _nodes("RDZV_ID", "Of the run: TORCHELASTIC_RUN_ID.", metavar="NAME")
    ] = "none",
    join_timeout: Annotated[
        float,
        _nodes("", "How long nodes wait for each other at the start.", metavar="SECONDS", min=0.0),
    ] = JOIN_S,
    log_dir: Annotated[
        Path | None,
        _output(
            "LOG_DIR",
            "Where --redirects and --tee write files.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    redirects: Annotated[
        str,
        _output(
            "REDIRECTS",
            "To files instead of the console: 1 stdout, 2 stderr, 3 both.",
            "--redirects",
            "-r",
            metavar=_STREAMS,
        ),
    ] = "0",
    tee: Annotated[
        str,
        _output(
            "TEE", "To files and, behind a prefix, to the console.", "--tee", "-t", metavar=_STREAMS
        ),
    ] = "0",
    local_ranks_filter: Annotated[
        str,
        _output(
            "LOCAL_RANKS_FILTER",
            "Only these local ranks come to the console.",
            metavar="RANK,...",
            show_default=False,
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
    if status > SIGNALLED:  # somebody waits for the prompt, and torch takes seconds to go
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
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
