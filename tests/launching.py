"""`offbeat launch` in processes of its own, forked from a server that has imported torch.

Workers are plain Python scripts, which start in 30 ms; only some import torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

from offbeat.testing.running import PRELOADED

LIMIT_S = 60.0


class Launched:
    """A launcher that runs."""

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        launcher: str = "offbeat",
        name: str = "launcher",
        namespace: str = "",
        terminal: str = "",
        **environment: str,
    ) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        spawning = torch.multiprocessing.get_context("forkserver")
        spawning.set_forkserver_preload([*PRELOADED, "offbeat.cli", "torch.distributed.run"])
        out = Path(terminal or self._out)
        words = [str(argument) for argument in arguments]
        self._process: Any = spawning.Process(
            target=_launch,
            args=(launcher, words, out, self._err, environment, namespace, folder),
        )
        self._process.start()
        self.began = time.monotonic()

    def send(self, number: int) -> None:
        """Signal the launcher, and it alone."""
        os.kill(self._process.pid, number)

    def runs(self) -> bool:
        """Say whether it has not ended."""
        return bool(self._process.is_alive())

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end; return its exit code."""
        self._process.join(limit_s)
        if self._process.exitcode is None:
            self.send(signal.SIGKILL)
            self._process.join()
            raise TimeoutError(f"the launcher did not end; it said:\n{self.out}\n{self.err}")
        return int(self._process.exitcode)

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    def lines(self) -> list[Any]:
        """What workers have printed, each line a piece of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def _launch(
    launcher: str,
    arguments: list[str],
    out: Path,
    err: Path,
    environment: dict[str, str],
    namespace: str,
    folder: Path,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_DFL)  # whoever runs the tests may ignore it: nohup does
    os.chdir(folder)
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdin.close()
    if namespace:
        _enter(namespace)
    if launcher == "torchrun":
        import torch.distributed.run

        torch.distributed.run.main(arguments)
    else:
        from offbeat.cli import app

        app(["launch", *arguments])


def _enter(namespace: str) -> None:
    """Go to another network; Python has `os.setns` only from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open() as file:
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until something is so."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in time: {what}")
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Say whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def answers(port: int) -> bool:
    """Say whether somebody listens there."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
