"""A crew on a Ray cluster: the same calls, on as many machines as there are.

    offbeat campaign league.toml --engine ray              a cluster of this machine alone
    offbeat campaign league.toml --engine ray:auto         the one that this machine is part of
    offbeat campaign league.toml --engine ray:10.0.0.7:6379

Every machine needs the same offbeat, and the files that tasks read. Ray repeats a call whose
machine was lost; a run is a function of its arguments, so nothing else changes.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from offbeat.errors import WorldError


def check_installed() -> None:
    """Raise ValueError if Ray is not there."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError("the engine ray is not installed: pip install 'offbeat[ray]'")


class RayCrew:
    """Calls in the processes of a Ray cluster; `running.Crew` has them here."""

    def __init__(self, address: str, jobs: int) -> None:
        """Connect to a cluster; without an address, begin one with as many processes as jobs."""
        self._ray: Any = importlib.import_module("ray")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        where = {"address": address} if address else {"num_cpus": jobs, "include_dashboard": False}
        try:
            self._ray.init(**where, **quiet)
        except ConnectionError as error:
            raise WorldError(f"--engine ray:{address}: there is no Ray cluster: {error}") from None
        self._call = self._ray.remote(num_cpus=1)(_called)
        processes = int(self._ray.cluster_resources().get("CPU", 1))
        self.room = 2 * processes

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have some process of the cluster call this."""
        found: Future[Any] = Future()
        theirs = self._call.remote(work, *arguments).future()
        theirs.add_done_callback(lambda done: self._hand_on(done, found))
        return found

    def _hand_on(self, done: Future[Any], found: Future[Any]) -> None:
        """Give what came of a call, with our own errors for Ray's."""
        error = done.exception()
        if error is None:
            found.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            found.set_exception(getattr(error, "cause", None) or error)
        else:
            found.set_exception(BrokenProcessPool(f"Ray lost a process: {error}"))

    def __enter__(self) -> RayCrew:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()  # what is not done is left


def _called(work: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of the cluster."""
    torch.set_num_threads(1)
    return work(*arguments)
