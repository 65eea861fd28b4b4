"""Real processes that are started once and run function after function.

Importing torch takes seconds, a script of a test one: workers are forked from a server that has
imported it, and serve many scripts. A worker whose function raises tells this process and
ends, as under torchrun, so that its broken connections free the others. Then, and after
a hang, the next call starts new processes. A worker that hangs is killed, and leaves the stacks of
its threads behind.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import TCPStore

from offbeat.testing import job_variables
from offbeat.testing.running import PRELOADED, be_like_a_script

START_S = 90.0
"""How long the start of processes may take, on a busy machine."""
DUMP_S = 1.0
"""How long stuck workers have to write their stacks before they are killed."""


@dataclass(frozen=True)
class Ended:
    """How a function ended on one worker: with a result, with an error, or not at all."""

    rank: int
    result: Any = None
    error: str = ""
    """The kind of error and its words; then `words` has the traceback."""
    words: str = ""
    hung: bool = False
    stacks: str = ""
    seconds: float = 0.0


class Pool:
    """So many workers over Gloo, with the default process group made."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.starts = 0
        self._children: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = Path()

    def run(
        self, function: Callable[..., Any], *arguments: Any, limit_s: float, after_error_s: float
    ) -> list[Ended]:
        """Run an importable function on all workers.

        Who has not ended after `limit_s`, or `after_error_s` after the first error, has hung.
        """
        if not self._children:
            self._start()
        began = time.monotonic()
        deadline = began + limit_s
        for pipe in self._pipes:
            pipe.send((function, arguments))
        ended: dict[int, Ended] = {}
        while len(ended) < self.workers and (rest_s := deadline - time.monotonic()) > 0:
            open_pipes = [p for rank, p in enumerate(self._pipes) if rank not in ended]
            for pipe in wait(open_pipes, rest_s):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                result, error, words = self._received(rank)
                ended[rank] = Ended(rank, result, error, words, seconds=time.monotonic() - began)
                if error:
                    deadline = min(deadline, time.monotonic() + after_error_s)
        if stuck := [rank for rank in range(self.workers) if rank not in ended]:
            stacks = self._stacks(stuck)
            for rank in stuck:
                seconds = time.monotonic() - began
                ended[rank] = Ended(rank, hung=True, stacks=stacks[rank], seconds=seconds)
        if any(one.hung or one.error for one in ended.values()):
            self.close()
        return [ended[rank] for rank in range(self.workers)]

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(timeout=2.0)
            child.kill()
            child.join()
        if self._children:
            shutil.rmtree(self._folder)
        self._children, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        self.starts += 1
        self._folder = Path(tempfile.mkdtemp(prefix="offbeat-pool-"))
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        spawning = torch.multiprocessing.get_context("forkserver")
        spawning.set_forkserver_preload(PRELOADED)
        for rank in range(self.workers):
            mine, theirs = spawning.Pipe()
            arguments = (rank, self.workers, self._store.port, theirs, self._dump(rank))
            child = spawning.Process(target=_work, args=arguments, daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(mine)
        for pipe in self._pipes:
            if not pipe.poll(START_S):
                self.close()
                raise TimeoutError(f"workers have not started within {START_S} s")
            pipe.recv()

    def _dump(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._children[rank].pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        stacks = {rank: _told(self._dump(rank).read_text()) for rank in ranks}
        for rank in ranks:
            self._children[rank].kill()
        return stacks

    def _received(self, rank: int) -> tuple[Any, str, str]:
        try:
            return self._pipes[rank].recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            self._children[rank].join(timeout=1.0)
            return None, f"the process ended with status {self._children[rank].exitcode}", ""


def _told(dump: str) -> str:
    """The stacks without what is the same in all of them."""
    threads = [
        [
            line
            for line in thread.splitlines()
            if not any(file in line for file in ("/threading.py", "/multiprocessing/", "<string>"))
        ]
        for thread in dump.strip().split("\n\n")
    ]
    return "\n".join("\n".join(lines) for lines in threads if "_end_with_parent" not in lines[-1])


def _work(rank: int, workers: int, port: int, pipe: Connection, dump: Path) -> None:
    """The life of a worker: function after function, until one raises or nobody asks."""
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # loaders have children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with dump.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        os.environ.update(job_variables(rank, workers, port))
        be_like_a_script()
        dist.init_process_group("gloo")
        pipe.send("ready")
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((function(*arguments), "", ""))
            except BaseException as error:
                words = "".join(traceback.format_exception(error)).rstrip()
                pipe.send((None, f"{type(error).__name__}: {error}", words))
                return


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a child process"
    parent.join()
    os._exit(1)
