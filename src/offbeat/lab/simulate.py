"""A user's own script, unchanged, on every worker of a virtual cluster.

    simulation = simulate(Path("train.py"), Cluster.load("two-slow-of-eight"))

Each worker executes the file as `__main__`, with globals of its own. What a script prints is shown
for worker 0, or for all of them with their ranks in front. stand_ins.py gives it what it would find
under torchrun: $RANK, a process group, log handlers of its own.

The rest of the process they share, unlike real workers:

- imported modules, the working directory (with hydra: `hydra.job.chdir=False`), and what a process
  may do only once: a second worker that calls `multiprocessing.set_start_method` fails; guard that
  by `offbeat.rank() == 0`. Of `hydra.main` and `torch.multiprocessing.spawn` see one_process.py
- files. As in a real job on one disk, each worker's writes happen: of several to the same path the
  last one stays, whole, since workers take turns only inside offbeat's and torch.distributed's
  calls. Write from `offbeat.rank() == 0`, or to a path with the rank in it
- the clock on the wall: `time.time()` knows nothing of virtual time, `dp.seconds` does

Virtual time passes only in what is attached; the time that a script spends reading data or
evaluating is free. A DataLoader with `num_workers` starts that many processes for every virtual
worker: it gives the same batches, at a price; use 0.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from traceback import TracebackException
from types import CodeType, ModuleType
from typing import Any, TextIO

import torch
from rich.table import Table
from rich.text import Text

import offbeat
from offbeat.algorithm import Algorithm
from offbeat.attach import Attachment
from offbeat.clusters import Cluster
from offbeat.clusters.write import to_toml
from offbeat.lab import one_process, stand_ins
from offbeat.records import Line, Sink
from offbeat.worlds import run
from offbeat.worlds.base import Closeable
from offbeat.worlds.virtual import current_virtual_world

_MOST_ROWS = 16
_BAR_CELLS = 24


@dataclass
class Simulation:
    """What came out of a script's run on a virtual cluster."""

    script: Path
    cluster: str
    workers: int
    virtual_s: float = 0.0
    """Virtual seconds until the last worker had ended."""
    wall_s: float = 0.0
    events: int = 0
    """Wake-ups that the clock has served."""
    shares: dict[int, float] = field(default_factory=dict)
    """The share of its time that a worker has computed, by rank; of those that attached."""
    error: BaseException | None = None
    """What ended the run: the first worker's error, its `sys.exit()`, or Ctrl-C."""
    algorithm: Algorithm | None = None
    """What was attached first."""

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended the run."""
        return isinstance(self.error, KeyboardInterrupt)

    def traceback(self, everything: bool = False) -> str:
        """Return the error as Python shows it, with the user's own frames only, or with all."""
        if self.error is None:
            return ""
        if self.interrupted and not everything:
            return " ".join(["interrupted", *getattr(self.error, "__notes__", ())])
        shown = TracebackException.from_exception(self.error)
        if not everything:
            _keep_frames_of_the_user(shown, str(self.script))
        if not everything and isinstance(self.error, SystemExit):
            shown.stack = None  # type: ignore[assignment]  # it ended on purpose
        return "".join(shown.format()).rstrip()

    def summary(self) -> Table:
        """Return the run's figures for a terminal."""
        table = Table.grid(padding=(0, 2))
        table.add_row("workers", f"{self.workers} ({self.cluster})")
        table.add_row("virtual time", f"{self.virtual_s:.3f} virtual seconds")
        table.add_row("wall time", f"{self.wall_s:.1f} s, {self.events:,} events")
        if not self.shares:
            table.add_row("computed", "nothing: virtual time passes only inside offbeat.attach()")
            return table
        for label, percent, who in self._rows():
            full = round(percent / 100 * _BAR_CELLS)
            bar = Text("█" * full, "green") + Text("░" * (_BAR_CELLS - full), "dim")
            table.add_row(label, bar + Text(f" {percent:3d} % of the time: {who}"))
        return table

    def _rows(self) -> list[tuple[str, int, str]]:
        """Who computed how much: neighbours that are alike in one row, or only the extremes."""
        rows: list[tuple[str, int, str]] = []
        for percent, alike in groupby(sorted(self.shares), self._percent):
            ranks = list(alike)
            who = f"workers {ranks[0]} to {ranks[-1]}" if ranks[1:] else f"worker {ranks[0]}"
            rows.append(("" if rows else "computed", percent, who))
        if len(rows) <= _MOST_ROWS:
            return rows
        ranks = sorted(self.shares, key=lambda rank: self.shares[rank])
        chosen = {"computed least": 0, "median": len(ranks) // 2, "computed most": -1}
        return [
            (label, self._percent(ranks[place]), f"worker {ranks[place]}")
            for label, place in chosen.items()
        ]

    def _percent(self, rank: int) -> int:
        return round(100 * self.shares[rank])


def simulate(
    script: Path,
    cluster: Cluster,
    *,
    seed: int = 0,
    arguments: Sequence[str] = (),
    verbose: bool = False,
    records: Sink | None = None,
    command: str = "",
) -> Simulation:
    """Run `script` with `arguments` on every worker of `cluster`; an error is in what it returns.

    `verbose` shows what all workers print, not worker 0 alone. `records` is called with a line for
    everything that happens, see records.py; `command` is how to run this again, for its first line.
    """
    source = script.read_bytes()
    simulation = Simulation(script, cluster.name, cluster.workers)
    mains: dict[int, ModuleType] = {}
    sink = None if records is None else _Records(records, simulation, cluster, seed, command)
    began = time.monotonic()
    threads = torch.get_num_threads()
    with _in_place_of_the_process(script, arguments, mains, verbose):
        # As torchrun does: many small workers gain nothing from threads, and lose much to them.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        try:
            code = compile(source, str(script), "exec", dont_inherit=True)
            done = run(
                lambda: _be_worker(code, mains, simulation), cluster, seed=seed, records=sink
            )
            simulation.virtual_s, simulation.events = done.seconds, done.events
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            simulation.error = error
        finally:
            torch.set_num_threads(threads)
    if sink is not None:
        sink.begin()
    simulation.wall_s = time.monotonic() - began
    return simulation


class _Records:
    """A sink whose first line says what is run; the algorithm is known once it is attached."""

    def __init__(
        self, sink: Sink, simulation: Simulation, cluster: Cluster, seed: int, command: str
    ) -> None:
        self._sink = sink
        self._simulation = simulation
        self._cluster = cluster
        self._seed = seed
        self._command = command
        self._begun = False

    def __call__(self, line: Line) -> None:
        self.begin()
        self._sink(line)

    def begin(self) -> None:
        """Write the first line, if it has not been written."""
        if self._begun:
            return
        self._begun = True
        algorithm, script = self._simulation.algorithm, self._simulation.script.name
        settings = vars(algorithm) if algorithm is not None else {}
        self._sink(
            {
                "kind": "run",
                "label": script if algorithm is None else type(algorithm).__name__,
                "algorithm": None if algorithm is None else type(algorithm).__name__,
                "settings": {name: _plain(value) for name, value in settings.items()},
                "world": "virtual",
                "cluster": self._cluster.name,
                "cluster_file": to_toml(self._cluster),
                "workers": self._cluster.workers,
                "task": script,
                "seed": self._seed,
                "command": self._command,
                "offbeat": offbeat.__version__,
            }
        )


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _be_worker(code: CodeType, mains: dict[int, ModuleType], simulation: Simulation) -> None:
    """Run the script from its first line to its last, and note the share of compute."""
    world = current_virtual_world()
    assert world is not None, "a worker of the virtual run"
    main = mains[world.rank] = ModuleType("__main__")
    main.__file__ = str(simulation.script)
    world.open = attached = _Attached(simulation)
    try:
        exec(code, main.__dict__)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    except Exception as error:
        one_process.explain(error, world.rank)
        raise
    for thing in list(world.open):
        thing.close()
    stats = [attachment.stats() for attachment in attached.ever]
    if total_s := sum(each.compute_s + each.wait_s for each in stats):
        simulation.shares[world.rank] = sum(each.compute_s for each in stats) / total_s
    del mains[world.rank]


class _Attached(list[Closeable]):
    """What a worker has attached and not closed; `ever` remembers the closed ones as well."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.ever: list[Attachment] = []
        self._simulation = simulation

    def append(self, thing: Closeable) -> None:
        super().append(thing)
        stand_ins.make_process_group()
        if isinstance(thing, Attachment):
            self.ever.append(thing)
            self._simulation.algorithm = self._simulation.algorithm or thing.algorithm


class _Main(ModuleType):
    """`sys.modules["__main__"]` of the worker that asks: pickling looks its classes up there."""

    def __init__(self, mains: dict[int, ModuleType], outside: ModuleType) -> None:
        super().__init__("__main__")
        object.__setattr__(self, "_find", lambda: _of_this_worker(mains, outside))

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_find")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_find")(), name, value)


def _of_this_worker(mains: dict[int, ModuleType], outside: ModuleType) -> ModuleType:
    world = current_virtual_world()
    return outside if world is None else mains.get(world.rank, outside)


class _Stream:
    """Standard output or error: worker 0's, or every worker's line by line behind its rank."""

    def __init__(self, stream: TextIO, verbose: bool) -> None:
        self._stream = stream
        self._verbose = verbose
        self._begun: dict[int, str] = {}  # lines without an end yet

    def write(self, text: str) -> int:
        world = current_virtual_world()
        if world is None or (world.rank == 0 and not self._verbose):
            return self._stream.write(text)
        if self._verbose:
            *lines, begun = (self._begun.pop(world.rank, "") + text).split("\n")
            self._stream.writelines(f"[{world.rank}] {line}\n" for line in lines)
            if begun:
                self._begun[world.rank] = begun
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Show the lines that nobody has ended."""
        for rank, line in sorted(self._begun.items()):
            self._stream.write(f"[{rank}] {line}\n")
        self._begun.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _in_place_of_the_process(
    script: Path, arguments: Sequence[str], mains: dict[int, ModuleType], verbose: bool
) -> Iterator[None]:
    """Give the script the argv, path, streams and `__main__` that it would find on its own."""
    saved = sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"]
    out, err = _Stream(sys.stdout, verbose), _Stream(sys.stderr, verbose)
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *sys.path]
    sys.stdout, sys.stderr = out, err
    sys.modules["__main__"] = _Main(mains, saved[-1])
    try:
        with stand_ins.installed():
            yield
    finally:
        sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"] = saved
        out.finish()
        err.finish()


def _keep_frames_of_the_user(shown: TracebackException, script: str) -> None:
    """Drop the frames of offbeat, of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    others = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    others.add(Path(__file__).parents[1])
    shown.stack[:] = [
        frame
        for frame in shown.stack
        if frame.filename == script
        or not (frame.filename.startswith("<") or others & {*Path(frame.filename).parents})
    ]
    if not shown.stack:
        shown.stack = None  # type: ignore[assignment]  # then format() leaves out its heading
    for inner in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if inner is not None:
            _keep_frames_of_the_user(inner, script)
