"""Real workers of a command: processes on this machine, started once and used for run after run.

The store of the job lives here, so that any worker may die. Workers do not hear Ctrl-C: this
process does, and ends them. If this process is killed, they notice and end as well.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from offbeat.clusters import Cluster
from offbeat.errors import WorkerLostError
from offbeat.lab import tasks
from offbeat.lab.contestants import Contestant
from offbeat.lab.train import WorkerFailed, train
from offbeat.lab.watching import Outcome, Plan, Shared, Tell
from offbeat.launch import Function, LaunchError, Supervisor, end_with_parent, host_store, how
from offbeat.testing import job_variables

_VERDICT_S = 5.0
"""How long to wait, once a worker has failed, for the one that failed first to say why."""


class Job(Protocol):
    """One run, as every worker gets it."""

    @property
    def records(self) -> Path:
        """The folder into which each worker writes its records."""

    def work(self, tell: Tell) -> Any:
        """Be one worker of it; what this returns goes back."""


@dataclass(frozen=True)
class RaceJob:
    """One run of a race."""

    task: str
    contestant: Contestant
    plan: Plan
    seed: int
    cluster: Cluster
    records: Path

    def work(self, tell: Tell) -> Outcome:
        """Train, paced by the cluster."""
        task = tasks.find(self.task)
        return train(task, self.contestant, self.plan, self.seed, Shared(), tell, pace=self.cluster)


@dataclass(frozen=True)
class _Ended:
    result: Any


@dataclass(frozen=True)
class _Failure:
    words: str
    seconds: float
    is_loss: bool
    """It was told of another one's end, and is not the cause."""


class Pool:
    """The processes of one command."""

    def __init__(self, workers: int) -> None:
        try:
            self._store = host_store()
        except LaunchError as error:
            raise WorkerFailed(str(error)) from None
        self._crew: Supervisor[Function] = Supervisor()
        self._workers: list[Function] = []
        self._pipes: list[Connection] = []
        self._began = time.monotonic()
        # Workers inherit the mask: a Ctrl-C that comes now is heard here, when all have started.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(workers):
                mine, theirs = Pipe()
                told = (rank, workers, self._store.port, theirs)
                worker = self._crew.add(Function(rank, "spawn", _work, *told, daemon=True))
                theirs.close()
                self._workers.append(worker)
                self._pipes.append(mine)
        except BaseException:
            self.kill()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, job: Job, tell: Tell) -> list[Any]:
        """Have all workers do a run; return what each returned.

        WorkerFailed if one does not come to its end.
        """
        self._began = time.monotonic()
        for pipe in self._pipes:
            pipe.send(job)
        outcomes: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        deadline: float | None = None
        while len(outcomes) < len(self._pipes):
            rest_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            open_pipes = [p for n, p in enumerate(self._pipes) if n not in {*outcomes, *failures}]
            _, ready = self._crew.wait(rest_s, *open_pipes)
            for rank in [n for n, p in enumerate(self._pipes) if p in ready]:
                message = self._received(rank)
                if isinstance(message, dict):
                    tell(message)
                elif isinstance(message, _Ended):
                    outcomes[rank] = message.result
                else:
                    failures[rank] = message
                    deadline = deadline or time.monotonic() + _VERDICT_S
            everyone = len(outcomes) + len(failures) == len(self._pipes)
            cause = [rank for rank, failure in failures.items() if not failure.is_loss]
            if failures and (cause or everyone or time.monotonic() >= (deadline or 0.0)):
                rank = min(cause or failures)
                failure = failures[rank]
                raise WorkerFailed(
                    f"{failure.words}\nin worker {rank}, {failure.seconds:.1f} s into the run"
                )
        return [outcomes[rank] for rank in sorted(outcomes)]

    def close(self) -> None:
        """Let the workers end."""
        for pipe in self._pipes:
            pipe.close()
        self._crew.end(grace_s=2.0)
        self._crew.close()

    def kill(self) -> None:
        """End the workers at once."""
        self._crew.close()

    def _received(self, rank: int) -> Any:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            worker = self._workers[rank]
            if (status := worker.exit_code()) is None:
                self._crew.wait(timeout_s=1.0)
                status = worker.exit_code()
            ending = "closed its pipe" if status is None else how(status)
            return _Failure(
                f"worker {rank} {ending}", time.monotonic() - self._began, is_loss=False
            )


def _work(rank: int, workers: int, port: int, pipe: Connection) -> None:
    """The life of a worker: run after run, until nobody asks for another one."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.update(job_variables(rank, workers, port))
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            os.environ["OFFBEAT_RECORDS"] = str(job.records)
            pipe.send(_Ended(job.work(pipe.send)))
        except BaseException as error:
            words = "".join(traceback.format_exception(error)).rstrip()
            seconds = time.monotonic() - began
            pipe.send(_Failure(words, seconds, isinstance(error, WorkerLostError)))
            return
