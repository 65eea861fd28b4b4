"""The supervisor: waits for the ends of workers, and ends them. Starting is the workers' own.

A worker is signalled with all that it has started, by its process group. Whoever asks for an end
has it after the grace, from everyone: first a signal that can be heeded, then SIGKILL.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

_POLL_S = 0.1
"""How often to look at workers where a system cannot wait for their ends."""


class Worker(ABC):
    """One process of the job."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.began = time.monotonic()

    @property
    @abstractmethod
    def sentinel(self) -> int | None:
        """What becomes readable when it has ended; None if it must be asked."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as in `multiprocessing`."""

    @abstractmethod
    def close(self) -> None:
        """It has ended, and nobody asks for it any more."""

    def send(self, number: int) -> None:
        """Signal it and what it has started, as far as that is in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.began


W = TypeVar("W", bound=Worker)


class Supervisor(Generic[W]):
    """Workers that run, until each of them has ended."""

    def __init__(self) -> None:
        self.running: list[W] = []
        self._ended: list[W] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, worker: W) -> W:
        """Watch over a worker that has been started."""
        self.running.append(worker)
        return worker

    def wait(self, timeout_s: float | None = None, *others: Any) -> tuple[list[W], list[Any]]:
        """Wait for an end, or until another thing can be read; return who has ended, and those."""
        sentinels = [worker.sentinel for worker in self.running]
        known = [sentinel for sentinel in sentinels if sentinel is not None]
        if len(known) < len(sentinels):
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        ready = wait([*known, *others], timeout_s)
        ended = [worker for worker in self.running if worker.exit_code() is not None]
        self.running = [worker for worker in self.running if worker not in ended]
        self._ended += ended
        return ended, [one for one in others if one in ready]

    def send(self, number: int) -> None:
        """Signal all that run."""
        for worker in self.running:
            worker.send(number)

    def end(self, number: int = signal.SIGTERM, grace_s: float = 0.0) -> None:
        """Ask all to end; who has not after the grace is killed."""
        self.send(number)
        deadline = time.monotonic() + grace_s
        while self.running and (rest_s := deadline - time.monotonic()) > 0:
            self.wait(rest_s)
        self.kill()

    def kill(self) -> None:
        """End all that run, and what they and those before them have left behind, at once."""
        for worker in [*self.running, *self._ended]:
            worker.send(signal.SIGKILL)
        while self.running:
            self.wait()

    def close(self) -> None:
        """End who still runs, and let go of all."""
        if self.running:
            self.kill()
        for worker in self._ended:
            worker.close()
        self._ended.clear()


def how(exit_code: int) -> str:
    """How a worker has ended, in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal without a name"
    return f"was killed by {name} (signal {-exit_code})"
