"""Functions on real processes, as torchrun would start them.

They are forked from a server that has imported torch, which takes longer than most tests.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "offbeat"]
"""The first optimizer of a process imports dynamo, which takes longer than torch."""

START_S = 90.0
"""How long processes may take to begin: the first of all wait until torch has been imported."""
LOOK_S = 0.01
"""How often to look whether they have."""
SOONER_S = 1.0
"""So long before its time is up a process writes down where its threads are."""


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    rank: int
    exit_code: int | None
    """As in `multiprocessing`: negative for a signal."""
    result: Any
    error: BaseException | None
    seconds: float
    """From the start of all processes."""


def processes(
    function: Callable[..., Any],
    workers: int,
    *arguments: Any,
    environment: dict[str, str] | None = None,
    time_out_s: float = 60.0,
    check: bool = True,
) -> list[Ended]:
    """Run a function, which must be importable, in as many processes as torchrun would start.

    The store lives in this process, as torchrun's lives in its agent, so that any worker may die.
    With `check`, the first error of a worker is raised here. Whoever is still running
    `time_out_s` after all have begun is killed, and counts as an error, which shows where its
    threads were.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawning = torch.multiprocessing.get_context("forkserver")
    spawning.set_forkserver_preload(PRELOADED)
    began, children = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="offbeat-"))
    for rank in range(workers):
        variables = {**job_variables(rank, workers, store.port), **(environment or {})}
        child = spawning.Process(
            target=_child,
            args=(folder / str(rank), variables, time_out_s, function, arguments),
        )
        child.start()
        children.append(child)
    ended: dict[int, Ended] = {}
    all_begun, until = False, began + START_S
    while len(ended) < workers and time.monotonic() < until:
        if not all_begun and all(_has_begun(folder / str(rank)) for rank in range(workers)):
            all_begun, until = True, time.monotonic() + time_out_s
        running = [children[rank].sentinel for rank in range(workers) if rank not in ended]
        wait(running, timeout=max(until - time.monotonic(), 0.0) if all_begun else LOOK_S)
        for rank in range(workers):
            if rank not in ended and not children[rank].is_alive():
                result, error = _result(folder / str(rank))
                seconds = time.monotonic() - began
                ended[rank] = Ended(rank, children[rank].exitcode, result, error, seconds)
    for rank, child in enumerate(children):
        if rank not in ended:
            child.kill()
            child.join()
            late = TimeoutError(f"worker {rank} was still running after {time_out_s} s")
            late.add_note(_stacks(folder / str(rank)))
            ended[rank] = Ended(rank, child.exitcode, None, late, time_out_s)
    shutil.rmtree(folder)
    ordered = [ended[rank] for rank in range(workers)]
    if check:
        for one in ordered:
            if one.error is not None:
                raise one.error
            if one.exit_code != 0:
                raise RuntimeError(f"worker {one.rank} ended with exit status {one.exit_code}")
    return ordered


def job_variables(rank: int, workers: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker of a job on this host, whose store is served at `port`."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _child(
    result: Path,
    variables: dict[str, str],
    time_out_s: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    stacks = result.with_suffix(".stacks").open("w")
    faulthandler.dump_traceback_later(max(time_out_s - SOONER_S, 0.1), file=stacks)
    try:
        ended = pickle.dumps((function(*arguments), None))
    except BaseException as error:
        words = "".join(traceback.format_exception(error))
        try:
            error.add_note(words)
            pickle.loads(ended := pickle.dumps((None, error)))
        except Exception:
            ended = pickle.dumps((None, RuntimeError(words)))
    result.with_suffix(".part").write_bytes(ended)
    result.with_suffix(".part").rename(result)
    atexit._run_exitfuncs()  # a process that was forked does not, and a script's would


def _has_begun(file: Path) -> bool:
    return file.with_suffix(".stacks").exists()


def _stacks(file: Path) -> str:
    """Where the threads of a process were shortly before its time was up."""
    return file.with_suffix(".stacks").read_text() if _has_begun(file) else "it had not begun"


def _result(file: Path) -> tuple[Any, BaseException | None]:
    """What a process has left behind: nothing, if it was killed."""
    if not file.exists():
        return None, None
    result, error = pickle.loads(file.read_bytes())
    return result, error
