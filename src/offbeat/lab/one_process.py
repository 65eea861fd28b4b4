"""What a script does once in a process, in a simulation, where all workers share one.

hydra                        of the singletons that hold the run at hand each worker has its own.
                             Those that modules fill when they are imported, such as the store of
                             configurations and the plugins, stay everybody's
torch.multiprocessing.spawn  runs the function for this worker's rank, here: the other workers do
                             the same with theirs
os.chdir                     who goes elsewhere than another worker is told
the rest                     is done by one worker, and fails on the next: `explain` says why
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch.multiprocessing

from offbeat.worlds.virtual import current_virtual_world

_HYDRA = "hydra.core.singleton"
_OF_A_RUN = ("hydra.core.global_hydra", "hydra.core.hydra_config", "hydra.core.utils")
_ONCE = re.compile(r"\balready\b|\btwice\b|\bonly once\b", re.IGNORECASE)


@contextmanager
def installed() -> Iterator[None]:
    """Give each worker singletons of its own, also of a module that is imported later."""
    finder, split, torch_s = _Finder(), _Split(), vars(torch.multiprocessing)
    spawn, chdir = torch_s["spawn"], os.chdir
    finder.found = split.begin
    sys.meta_path.insert(0, finder)
    if _HYDRA in sys.modules:
        split.begin(sys.modules[_HYDRA])
    torch_s["spawn"] = inside(_spawn, spawn)
    os.chdir = inside(_Folder(chdir).change, chdir)
    try:
        yield
    finally:
        os.chdir = chdir
        torch_s["spawn"] = spawn
        sys.meta_path.remove(finder)
        split.end()


def inside(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in, for virtual workers alone."""

    def either(*args: Any, **kwargs: Any) -> Any:
        chosen = original if current_virtual_world() is None else stand_in
        return chosen(*args, **kwargs)

    return either


def _spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """`torch.multiprocessing.spawn`, by a worker that is one of those processes already."""
    world = current_virtual_world()
    assert world is not None, "a stand-in is called inside virtual workers only"
    if nprocs != world.size:
        raise ValueError(
            f"torch.multiprocessing.spawn(nprocs={nprocs}) in a simulation of {world.size} "
            "workers, each of which runs this script: take nprocs=int(os.environ['WORLD_SIZE']), "
            f"or simulate --workers {nprocs}"
        )
    if not join:
        raise NotImplementedError("torch.multiprocessing.spawn(join=False) is not simulated")
    fn(world.rank, *args)


class _Folder:
    """The working directory, which workers share: they cannot be in different ones at a time."""

    def __init__(self, chdir: Callable[[Any], None]) -> None:
        self._chdir = chdir
        self._start = os.path.realpath(os.curdir)
        self._where: dict[int, str] = {}  # by rank

    def change(self, path: Any) -> None:
        world = current_virtual_world()
        assert world is not None, "a stand-in is called inside virtual workers only"
        wanted = os.path.realpath(path)
        for rank, its in self._where.items():
            if rank != world.rank and self._start != wanted != its != self._start:
                raise NotImplementedError(
                    f"os.chdir: worker {world.rank} goes to {wanted!r} while worker {rank} is in "
                    f"{its!r}, but simulated workers share one. Stay where you started, and "
                    "write to full paths; with hydra, hydra.job.chdir=False"
                )
        self._chdir(path)
        self._where[world.rank] = wanted


def explain(error: BaseException, rank: int) -> None:
    """Add to an error what may be behind it, if an earlier worker has done the same before."""
    if rank > 0 and _ONCE.search(str(error)):
        error.add_note(
            "simulated workers share one process, and another worker was here before: do what a "
            "process can do only once where offbeat.rank() == 0, or ask first whether it was done"
        )


class _Finder(MetaPathFinder):
    """Says when hydra has been imported."""

    found: Callable[[ModuleType], None]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _HYDRA:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_split(module: ModuleType) -> None:
                execute(module)
                self.found(module)

            spec.loader.exec_module = then_split  # type: ignore[method-assign]
        return spec


class _Split:
    """The instances of hydra's singletons, in a mapping for each worker."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._outside: Any = None

    def begin(self, module: ModuleType) -> None:
        self._owner = vars(module)["Singleton"]
        self._outside = self._owner._instances
        self._owner._instances = _Instances(self._outside)

    def end(self) -> None:
        if self._owner is not None:
            self._owner._instances = self._outside


class _Instances(MutableMapping[type, Any]):
    """By class, of the worker that asks."""

    def __init__(self, outside: dict[type, Any]) -> None:
        self._outside = outside
        self._workers: dict[int, dict[type, Any]] = {}

    def _of(self, owner: type | None) -> dict[type, Any]:
        world = current_virtual_world()
        module = "" if owner is None else owner.__module__
        everybodys = module.startswith("hydra.") and module not in _OF_A_RUN
        if world is None or everybodys:
            return self._outside
        return self._workers.setdefault(world.rank, {})

    def __getitem__(self, owner: type) -> Any:
        return self._of(owner)[owner]

    def __setitem__(self, owner: type, instance: Any) -> None:
        self._of(owner)[owner] = instance

    def __delitem__(self, owner: type) -> None:
        del self._of(owner)[owner]

    def __iter__(self) -> Iterator[type]:
        return iter(self._of(None))

    def __len__(self) -> int:
        return len(self._of(None))
