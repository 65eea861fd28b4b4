"""Where runs take place: in virtual time, in this process, or on real processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import offbeat
from offbeat import records
from offbeat.clusters import Cluster
from offbeat.errors import ReportError
from offbeat.lab.contestants import Contestant
from offbeat.lab.processes import Job, Pool, RaceJob
from offbeat.lab.progress import Progress
from offbeat.lab.train import WorkerFailed, train
from offbeat.lab.watching import Outcome, Shared
from offbeat.records import Sink

if TYPE_CHECKING:
    from offbeat.lab.race import Race


class Virtual:
    """Runs in virtual time, in this process."""

    def __enter__(self) -> Virtual:
        self._threads = torch.get_num_threads()
        # As torchrun does: many small workers gain nothing from threads, and lose much to them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._threads)

    def outcomes(
        self, race: Race, contestant: Contestant, seed: int, show: Progress, sink: Sink | None
    ) -> list[Outcome]:
        work = partial(train, race.task, contestant, race.plan, seed, Shared(), show.tell)
        results = self.done(work, race.cluster, seed, sink, own_random_state=race.task.draws)
        outcomes = [outcome for outcome in results if outcome is not None]
        if not outcomes or outcomes[0].rank != 0:
            raise WorkerFailed("worker 0 crashed, as the cluster file says: nobody evaluated")
        return outcomes

    def done(
        self,
        work: Callable[[], Any],
        cluster: Cluster,
        seed: int,
        sink: Sink | None,
        own_random_state: bool = True,
    ) -> list[Any]:
        """Have every worker do this; return what each returned."""
        try:
            own = own_random_state
            done = offbeat.run(work, cluster, seed=seed, own_random_state=own, records=sink)
        except ReportError:
            raise
        except Exception as error:
            raise WorkerFailed("".join(traceback.format_exception(error)).rstrip()) from error
        return done.results


class Real:
    """Runs on real processes, which are started at the first run and again after a failure."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: Pool | None = None

    def __enter__(self) -> Real:
        self._folder = Path(tempfile.mkdtemp(prefix="offbeat-race-"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._pool is not None:
            self._pool.close() if kind is None else self._pool.kill()
        shutil.rmtree(self._folder)

    def outcomes(
        self, race: Race, contestant: Contestant, seed: int, show: Progress, sink: Sink | None
    ) -> list[Outcome]:
        told = (race.task_name, contestant, race.plan, seed, race.cluster)
        return self.done(lambda folder: RaceJob(*told, folder), show, sink)

    def done(self, job: Callable[[Path], Job], show: Progress, sink: Sink | None) -> list[Any]:
        """Do the job that records into this folder; return what each worker returned."""
        if self._pool is None:
            self._pool = Pool(self._workers)
        with self._recorded(sink) as folder:
            try:
                return self._pool.run(job(folder), show.tell)
            except WorkerFailed:
                self._pool.kill()
                self._pool = None
                raise

    @contextmanager
    def _recorded(self, sink: Sink | None) -> Iterator[Path]:
        """Hand on what the workers have recorded, be it to their end or to Ctrl-C."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            yield folder
        finally:
            if sink is not None and any(folder.glob("*.jsonl")):
                for line in records.read(folder):
                    sink(line)
            shutil.rmtree(folder, ignore_errors=True)  # workers may still be writing
