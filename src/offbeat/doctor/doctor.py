"""Doctor: looks at one worker's program while it runs, and then compares notes with the others."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, sampler

from offbeat.algorithm import Algorithm
from offbeat.arguments import wraps_anything
from offbeat.data import marks
from offbeat.doctor.report import diagnose
from offbeat.doctor.waits import Waits
from offbeat.errors import HiddenWaitWarning
from offbeat.worlds import World

_KNOWS_NO_RANK = (sampler.RandomSampler, sampler.SequentialSampler, sampler.WeightedRandomSampler)
_LOOKS_AT = 3
"""The step at which it looks around; by then a program has set up all that it has."""


class Doctor:
    """Notes what one worker waits for, and what else is amiss; `close()` in the end."""

    def __init__(self) -> None:
        self.steps = 0
        self.threads = 0
        self.wrapped = False
        self.same_data = ""
        """What the training data hold, where their sampler does not know of ranks."""
        self._began = self._ended = time.perf_counter()
        self._loader: Any = None
        self._iterates, self._replaced = DataLoader.__iter__, _noting(self)
        DataLoader.__iter__ = self._replaced  # type: ignore[method-assign]
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.waits = Waits()

    def close(self) -> None:
        """Look no longer."""
        self.waits.close()
        self._hook.remove()
        if DataLoader.__iter__ is self._replaced:
            DataLoader.__iter__ = self._iterates  # type: ignore[method-assign]

    def note_loader(self, loader: Any) -> None:
        """The program iterates over this one now."""
        self._loader = loader

    def notes(self, **facts: Any) -> str:
        """What this worker has seen, to be told to another one; `facts` are of its attachment."""
        return json.dumps(
            {
                "steps": self.steps,
                "seconds": self._ended - self._began,
                "threads": self.threads,
                "local": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                "cores": _cores(),
                "wrapped": self.wrapped,
                "same_data": self.same_data,
                "waits": [
                    {
                        "place": list(each.place),
                        "program": None if each.program is None else list(each.program),
                        "known": None if each.known is None else list(each.known),
                        "count": each.count,
                        "seconds": each.seconds,
                    }
                    for each in self.waits.by_place
                ],
                **facts,
            }
        )

    def tell(self, world: World, name: str, algorithm: Algorithm, rounds: int) -> None:
        """Look no longer, and compare notes with the others; one worker warns."""
        self.close()
        control = world.control_in_epoch()
        mine = self.notes(method=type(algorithm).__name__, rounds=rounds)
        control.set(f"{name}/waits/{world.rank}", mine.encode())
        if world.rank == world.members[0]:
            told = [control.get(f"{name}/waits/{rank}").decode() for rank in world.members]
            if (found := diagnose(told)).sentences:
                warnings.warn(f"\n{found}", HiddenWaitWarning, stacklevel=5)

    def _stepped(self, *_: Any) -> None:
        """After every step of every optimizer of this process."""
        if not self.steps:
            self._began = time.perf_counter()
            self.waits.sites.clear()  # what it took to set up
        self._ended = time.perf_counter()
        self.steps += 1
        if self.steps == _LOOKS_AT:
            self.threads = torch.get_num_threads()
            self.wrapped = wraps_anything()
            self._look_at_data()

    def _look_at_data(self) -> None:
        loader = self._loader
        if loader is None or isinstance(loader.dataset, IterableDataset):
            return
        batches = getattr(loader, "batch_sampler", None)
        plain = batches is None or type(batches) is BatchSampler
        if plain and isinstance(loader.sampler, _KNOWS_NO_RANK):
            self.same_data = marks.mark(loader.dataset)


def _noting(doctor: Doctor) -> Any:
    original = DataLoader.__iter__

    def iterate(loader: Any) -> Iterator[Any]:
        doctor.note_loader(loader)
        return original(loader)

    return iterate


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
