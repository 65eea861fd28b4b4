"""What is to be launched, checked before anything is started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offbeat.launch.job import DEFAULT_PORT, LaunchError
from offbeat.launch.logs import LogChoices

GRACE_S = 30.0
"""torchrun's: how long workers have from SIGTERM to SIGKILL."""
INTERRUPT_GRACE_S = 0.5
"""The same after Ctrl-C: whoever presses it wants the prompt back."""
JOIN_S = 600.0
"""torchrun's: how long nodes wait for each other at the start."""


@dataclass(frozen=True)
class Plan:
    """One node's part of a job."""

    command: list[str]
    workers: int
    """On this node."""
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    restarts: int = 0
    """How often the worker of a slot is started again."""
    grace_s: float | None = None
    """From the signal to SIGKILL; the defaults above if None."""
    join_s: float = JOIN_S
    run_id: str = "none"
    role: str = "default"
    logs: LogChoices = field(default_factory=LogChoices)

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise LaunchError(f"--nnodes must be at least 1, got {self.nodes}")
        if not 0 <= self.node < self.nodes:
            raise LaunchError(
                f"--node-rank must be between 0 and {self.nodes - 1}, as --nnodes is "
                f"{self.nodes}; got {self.node}"
            )
        if not 0 <= self.port < 2**16:
            raise LaunchError(f"--master-port must be between 0 and 65535, got {self.port}")
        if self.nodes > 1 and self.port == 0:
            raise LaunchError(
                f"several nodes need one port that all know: --master-port {DEFAULT_PORT}"
            )
        if self.restarts < 0:
            raise LaunchError(f"--restart must be 0 or more, got {self.restarts}")


def command(script: str, arguments: list[str], module: bool, no_python: bool) -> list[str]:
    """The command of every worker: as `python -u script`, `python -u -m module`, or as it is."""
    if module and no_python:
        raise LaunchError("-m and --no-python exclude each other: a module needs python")
    if no_python:
        if shutil.which(script) is None:
            raise LaunchError(f"{script}: there is no such program")
        return [script, *arguments]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if module:
        _check_module(script)
        return [*python, "-m", script, *arguments]
    if not Path(script).exists():
        raise LaunchError(f"{script}: there is no such script; give the path of a Python file")
    return [*python, script, *arguments]


def _check_module(name: str) -> None:
    """Only its first part: to look for the rest would import it."""
    first = name.partition(".")[0]
    here = Path.cwd()
    if (here / first).exists() or (here / f"{first}.py").exists():
        return
    if not first or importlib.util.find_spec(first) is None:
        raise LaunchError(f"-m {name}: there is no module {first or name!r} here")


def worker_count(words: str) -> int:
    """How many workers a node has: a number, or as many as torchrun would say."""
    if words in ("auto", "gpu", "cpu", "xpu"):
        return _counted(words)
    try:
        count = int(words)
    except ValueError:
        count = 0
    if count < 1:
        raise LaunchError(
            f"--nproc-per-node must be a number from 1, or auto, cpu, gpu or xpu; got {words!r}"
        )
    return count


def _counted(words: str) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if words == "cpu":
        return cores or 1
    if words == "auto":
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return devices or cores or 1
    device = torch.cuda if words == "gpu" else torch.xpu
    if not device.is_available():
        raise LaunchError(
            f"--nproc-per-node {words}: this host has none; give a number, cpu or auto"
        )
    return int(device.device_count())


def node_count(words: str) -> int:
    """How many nodes: a number, or torchrun's range if both ends are the same."""
    least, _, most = words.partition(":")
    try:
        if not most or int(least) == int(most):
            return int(least)
    except ValueError:
        raise LaunchError(f"--nnodes must be a number from 1, got {words!r}") from None
    raise LaunchError(
        f"--nnodes {words}: a range of nodes is not there; give one number, and lost workers are "
        "survived by those that are left"
    )
