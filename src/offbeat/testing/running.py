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
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from offbeat.launch import Function, Supervisor, host_store, join_variables, slots
from offbeat.launch import variables as variables_of
from offbeat.worlds.stand_in import stand_in

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
    restarts: int = 0
    """How often it had been killed before, and was started again."""


def processes(
    function: Callable[..., Any],
    workers: int,
    *arguments: Any,
    environment: dict[str, str] | None = None,
    time_out_s: float = 60.0,
    check: bool = True,
    restarts: int = 0,
) -> list[Ended]:
    """Run a function, which must be importable, in as many processes as torchrun would start.

    The store lives in this process, as torchrun's lives in its agent, so that any worker may die.
    With `check`, the error of the worker that ended first is raised here. Whoever is still running
    `time_out_s` after all have begun is killed, and counts as an error, which shows where its
    threads were. A worker that dies of a signal is started again, to join the others, at most
    `restarts` times.
    """
    store = host_store()
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    folder = Path(tempfile.mkdtemp(prefix="offbeat-"))
    with Supervisor[Function]() as crew:

        def start(rank: int, attempt: int) -> None:
            variables = {**job_variables(rank, workers, store.port), **(environment or {})}
            if attempt:
                variables |= join_variables(slots([workers], 0)[rank], attempt)
            told = (folder / str(rank), variables, time_out_s, function, arguments)
            crew.add(Function(rank, "forkserver", _child, *told))

        for rank in range(workers):
            start(rank, 0)
        ended = _ends(crew, folder, time_out_s, start, restarts)
    shutil.rmtree(folder)
    if check:
        for one in sorted(ended, key=lambda one: one.seconds):  # the others' may be its doing
            if one.error is not None:
                raise one.error
            if one.exit_code != 0:
                raise RuntimeError(f"worker {one.rank} ended with exit status {one.exit_code}")
    return ended


def _ends(
    crew: Supervisor[Function],
    folder: Path,
    time_out_s: float,
    start: Callable[[int, int], None],
    restarts: int,
) -> list[Ended]:
    """How all ended; who is late is killed."""
    attempts: Counter[int] = Counter()
    began, files = time.monotonic(), [folder / str(worker.rank) for worker in crew.running]
    ended: dict[int, Ended] = {}
    all_begun, until = False, began + START_S
    while crew.running and time.monotonic() < until:
        if not all_begun and all(map(_has_begun, files)):
            all_begun, until = True, time.monotonic() + time_out_s
        gone, _ = crew.wait(max(until - time.monotonic(), 0.0) if all_begun else LOOK_S)
        for worker in gone:
            if (worker.exit_code() or 0) < 0 and attempts[worker.rank] < restarts:
                attempts[worker.rank] += 1
                start(worker.rank, attempts[worker.rank])
                continue
            result, error = _result(files[worker.rank])
            seconds = time.monotonic() - began
            again = attempts[worker.rank]
            ended[worker.rank] = Ended(
                worker.rank, worker.exit_code(), result, error, seconds, again
            )
    late = list(crew.running)
    crew.kill()
    for worker in late:
        error = TimeoutError(f"worker {worker.rank} was still running after {time_out_s} s")
        error.add_note(_stacks(files[worker.rank]))
        ended[worker.rank] = Ended(worker.rank, worker.exit_code(), None, error, time_out_s)
    return [ended[rank] for rank in sorted(ended)]


def job_variables(rank: int, workers: int, port: int) -> dict[str, str]:
    """What torchrun tells a worker of a job on this host, whose store is served at `port`."""
    return variables_of(slots([workers], 0)[rank], "127.0.0.1", port)


def _child(
    result: Path,
    variables: dict[str, str],
    time_out_s: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ.update(variables)
    stand_in()  # a script imports offbeat when it has these variables; here that was before
    be_like_a_script()
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


def be_like_a_script() -> None:
    """Be a process as torchrun starts it, though it was forked from a server.

    Its own children are started in Python's usual way: by default they would come from a server
    too, and each worker of a DataLoader would import torch again.
    """
    torch.multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)


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
