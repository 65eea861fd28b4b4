"""Who takes part in a race: algorithms by name, with settings, from the command line.

    sync    eager:quorum=majority,late=drop    msync:m=0.75    ddp

A name is that of the algorithm's file in `offbeat.algorithms`, its settings are the fields of its
dataclass. `ddp` is torch's DistributedDataParallel on real processes; in virtual time, where that
cannot run, it is its equal `SyncSGD`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import offbeat.algorithms
from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD
from offbeat.lab.settings import nearest, parsed

DDP = "ddp"
_SIZES = {"msync": {"m": 0.75}}
"""Where an algorithm has no size of its own, and a search for one has to begin."""
DEFAULT = (
    "sync",
    "eager",
    "eager:quorum=solo",
    "eager:quorum=majority",
    "msync:m=0.75",
    "abs",
    "waitfree",
    "nonblocking:micro_batches=2",
    "dropcompute:micro_batches=2,window_rounds=10",
)


@dataclass(frozen=True)
class Contestant:
    """An algorithm, and what the command line calls it."""

    label: str
    algorithm: Algorithm
    settings: dict[str, Any] = field(default_factory=dict)
    """What was given; the rest is as the algorithm has it."""
    rate: float = 1.0
    """The factor of the task's own learning rate that it races with."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """Its size, if that was not given: see sizes.py."""
    edge: str = ""
    """What was not tried beside these two, if the best is at the edge of what was."""

    @property
    def name(self) -> str:
        """Of the algorithm, without settings."""
        return self.label.partition(":")[0]

    @property
    def is_ddp(self) -> bool:
        """Whether real processes run DistributedDataParallel itself."""
        return self.label == DDP


def told(contestant: Contestant) -> str:
    """What it races with, in words: `lr ×2, steps=8`."""
    sizes = [f"{name}={shown(value)}" for name, value in contestant.tuned.items()]
    return ", ".join([f"lr ×{contestant.rate:.3g}", *sizes])


def shown(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm by the name of its file."""
    public = [getattr(offbeat.algorithms, name) for name in offbeat.algorithms.__all__]
    return {
        each.__module__.rpartition(".")[2]: each
        for each in public
        if isinstance(each, type) and issubclass(each, Algorithm)
    }


def default(world: Literal["virtual", "real"]) -> list[Contestant]:
    """Return those that race where nobody is named."""
    return [parse(spec) for spec in ([DDP, *DEFAULT] if world == "real" else DEFAULT)]


def parse(spec: str) -> Contestant:
    """Read a name with settings; ValueError with the nearest match for what does not exist."""
    name, _, rest = spec.partition(":")
    if name == DDP:
        if rest:
            raise ValueError(f"{spec}: {DDP} has no settings")
        return Contestant(DDP, SyncSGD())
    known = algorithms()
    if name not in known:
        raise ValueError(
            f"no algorithm is called {name!r}{nearest(name, [*known, DDP])}\n"
            f"There are {', '.join([*known, DDP])}"
        )
    sizes = _SIZES.get(name, {})
    settings = parsed(spec, known[name], rest, sizes, known[name].check_removed)
    begun = {key: value for key, value in sizes.items() if key not in settings}
    try:
        return Contestant(spec, known[name](**settings, **begun), settings, tuned=begun)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec}: {error}") from None


def check(contestants: Sequence[Contestant], workers: int) -> None:
    """Raise ValueError where settings do not fit the cluster, or somebody races twice."""
    for number, contestant in enumerate(contestants):
        try:
            contestant.algorithm.check(workers)
        except ValueError as error:
            raise ValueError(f"{contestant.label}: {error}") from None
        if contestant.label in [other.label for other in contestants[:number]]:
            raise ValueError(f"{contestant.label} is named twice")
