"""A race's runs, one after the other or several at a time.

Contestants are tuned first; as soon as one has its settings, its runs may begin. Virtual runs are
independent of each other, so with several jobs each is a call in a pool of processes
(concurrent.futures). What they record goes into a file each, and from there into the race's
records in the same order as if they had run one after the other.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offbeat import records
from offbeat.errors import ReportError
from offbeat.lab.contestants import Contestant, told
from offbeat.lab.progress import Progress
from offbeat.lab.results import Result, Standings, end_line
from offbeat.lab.runners import Real, Virtual
from offbeat.launch import end_with_parent
from offbeat.records import Line, RecordsFile, Sink

if TYPE_CHECKING:
    from offbeat.lab.race import Race

_ENDS_S = 5.0
"""How long processes that were killed may take to be gone."""


def run(race: Race, show: Progress, sink: Sink | None, jobs: int) -> Standings:
    """Run all contestants for all seeds; on Ctrl-C return what there is."""
    standings = Standings()
    try:
        if jobs == 1:
            _in_turn(race, show, sink, standings)
        else:
            with Crew(jobs) as crew, tempfile.TemporaryDirectory(prefix="offbeat-race-") as folder:
                _at_a_time(race, show, sink, standings, crew, Path(folder))
    except KeyboardInterrupt:
        standings.interrupted = True
    except BrokenProcessPool:
        standings.stopped = (
            "a process that ran a part of the race was ended from outside: perhaps the memory did "
            "not suffice, then fewer --jobs need less"
        )
    except ReportError as error:
        standings.stopped = str(error)
    return standings


def _in_turn(race: Race, show: Progress, sink: Sink | None, standings: Standings) -> None:
    tuned = []
    for contestant in race.contestants:
        tuned.append(race.tuned(contestant, show))
        _say_tuned(show, tuned[-1])
    _race_on(race, tuned, show, sink, standings)


def _race_on(
    race: Race, tuned: list[Contestant], show: Progress, sink: Sink | None, standings: Standings
) -> None:
    with Virtual() if race.world == "virtual" else Real(race.cluster.workers) as runner:
        for seed in race.seed_numbers:
            for contestant in tuned:
                result = race.one(runner, contestant, seed, show, sink)
                standings.results.append(result)
                standings.lines += race.begin_line(contestant, seed), end_line(result)
                show.end(result.label, asdict(result))


def _say_tuned(show: Progress, contestant: Contestant) -> None:
    show.tuned(contestant.label, told(contestant), contestant.edge)


# --- several at a time ---------------------------------------------------------------------------

_Place = tuple[int, int]
"""A seed and a contestant: the order in which runs are written down."""


def _at_a_time(
    race: Race,
    show: Progress,
    sink: Sink | None,
    standings: Standings,
    crew: Crew,
    folder: Path,
) -> None:
    tuned: dict[int, Contestant] = {}
    done: dict[_Place, Result] = {}
    try:
        _work_off(race, show, crew, folder if sink is not None else None, tuned, done)
    finally:  # after Ctrl-C as well
        for place in sorted(done):
            _write_down(race, tuned[place[1]], done[place], sink, _file(folder, place), standings)
    if race.world == "real":
        _race_on(race, [tuned[number] for number in sorted(tuned)], show, sink, standings)


def _work_off(
    race: Race,
    show: Progress,
    crew: Crew,
    folder: Path | None,
    tuned: dict[int, Contestant],
    done: dict[_Place, Result],
) -> None:
    """Tune and run everybody; what is there goes into `tuned` and `done`."""
    tuning: dict[Future[Any], int] = {}
    running: dict[Future[Any], _Place] = {}
    for number, contestant in enumerate(race.contestants):
        tuning[crew.submit(tune, race, contestant)] = number
        show.tune(contestant.label, "")
    while tuning or running:
        for future in wait([*tuning, *running], return_when=FIRST_COMPLETED).done:
            if future in tuning:
                number = tuning.pop(future)
                tuned[number] = future.result()
                _say_tuned(show, tuned[number])
                seeds = race.seed_numbers if race.world == "virtual" else ()
                for place in [(seed, number) for seed in seeds]:
                    path = None if folder is None else _file(folder, place)
                    call = crew.submit(make, race, tuned[number], place[0], path)
                    running[call] = place
            else:
                done[running.pop(future)] = result = future.result()
                show.end(result.label, asdict(result))


def tune(race: Race, contestant: Contestant) -> Contestant:
    """Give a contestant its settings, in a process of the crew."""
    return race.tuned(contestant, Progress())


def make(race: Race, contestant: Contestant, seed: int, path: Path | None) -> Result:
    """Make one run, in a process of the crew; what it records goes into a file."""
    with Virtual() as runner, _recorded(path) as sink:
        return race.one(runner, contestant, seed, Progress(), sink)


@contextmanager
def _recorded(path: Path | None) -> Iterator[Sink | None]:
    if path is None:
        yield None
        return
    with _told(path):
        file = RecordsFile(path)

    def sink(line: Line) -> None:
        with _told(path):
            file(line)

    try:
        yield sink
    finally:
        with _told(path):
            file.close()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say which file it is that cannot be written, and why."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}") from None


def _write_down(
    race: Race,
    contestant: Contestant,
    result: Result,
    sink: Sink | None,
    path: Path,
    standings: Standings,
) -> None:
    standings.results.append(result)
    standings.lines += race.begin_line(contestant, result.seed), end_line(result)
    if sink is not None:
        for line in records.read(path):
            sink(line)
        path.unlink()


def _file(folder: Path, place: _Place) -> Path:
    return folder / f"{place[0]}-{place[1]}.jsonl"


class Crew:
    """The processes that runs are made in."""

    def __init__(self, jobs: int) -> None:
        self.room = jobs + 1
        """Calls that should be in hand, so that nobody idles."""
        self._others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), initializer=_begin
        )

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a process call this."""
        # A process that starts now inherits the mask: this one hears Ctrl-C, and ends the others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(work, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for child in set(multiprocessing.active_children()) - self._others:
                child.kill()
        # Else the interpreter, which ends, may wake the pool's thread while that closes its pipes,
        # and says so in a traceback. It has nothing more to wait for.
        thread = getattr(self._pool, "_executor_manager_thread", None)
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if thread is not None:
            thread.join(_ENDS_S)


def _begin() -> None:
    """What a process does first."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
