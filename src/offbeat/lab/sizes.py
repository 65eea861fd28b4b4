"""The one setting of each method that is tuned beside the learning rate: how large its rounds are.

Names are those of contestants. A method that is not listed has none. A setting that a user names,
as in `local:steps=4`, is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbeat.lab.contestants import Contestant

Ladder = Callable[[int, float], Sequence[Any]]
"""Of the number of workers and the samples of one micro-batch: values, from small to large."""


def _counts(workers: int, samples: float) -> Sequence[Any]:
    return (1, 2, 4, 8, 16, 32, 64)


def _members(workers: int, samples: float) -> Sequence[Any]:
    """Of a quorum: one worker, quarters of them, all."""
    return sorted({max(1, round(share * workers / 4)) for share in range(5)})


def _batches(workers: int, samples: float) -> Sequence[Any]:
    """The least samples of a round: none, or some micro-batches of every worker."""
    return (0.0, *(count * workers * samples for count in (2, 4, 8, 16, 32)))


def _groups(workers: int, samples: float) -> Sequence[Any]:
    """Of as many workers each."""
    return [each for each in range(2, workers + 1) if workers % each == 0] or [1]


SIZES: dict[str, tuple[str, Ladder]] = {
    "sync": ("micro_batches", _counts),
    "lbbsp": ("micro_batches", _counts),
    "dropcompute": ("micro_batches", _counts),
    "nonblocking": ("micro_batches", _counts),
    "eager": ("quorum", _members),
    "msync": ("m", _members),
    "abs": ("min_batch", _batches),
    "waitfree": ("min_batch", _batches),
    "local": ("steps", _counts),
    "dasgd": ("steps", _counts),
    "diloco": ("steps", _counts),
    "wagma": ("group", _groups),
    "ringmaster": ("max_delay", _counts),
    "rennala": ("batch", _counts),
}


@dataclass(frozen=True)
class Sizes:
    """A contestant's sizes on a cluster; the contestant itself is one of them."""

    setting: str
    values: tuple[Any, ...]
    start: int
    """Where in `values` the search begins: the nearest to the algorithm's own."""

    @classmethod
    def of(cls, contestant: Contestant, workers: int, samples: float) -> Sizes:
        """Those that there are; a single one, without a name, if there is nothing to choose."""
        setting, ladder = SIZES.get(contestant.name, ("", None))
        if ladder is None or contestant.is_ddp or setting in contestant.settings:
            return cls("", (None,), 0)
        fit = [each for each in ladder(workers, samples) if _fits(contestant, setting, each)]
        own = getattr(contestant.algorithm, setting)
        return cls(setting, tuple(fit), _nearest(fit, own, workers)) if fit else cls("", (None,), 0)

    def put(self, contestant: Contestant, number: int) -> Contestant:
        """The contestant with one of the sizes."""
        if not self.setting:
            return contestant
        tuned = {self.setting: self.values[number]}
        algorithm = replace(contestant.algorithm, **tuned)  # type: ignore[type-var]
        return replace(contestant, algorithm=algorithm, tuned=tuned)


def _fits(contestant: Contestant, setting: str, value: Any) -> bool:
    """Whether the other settings allow it."""
    try:
        replace(contestant.algorithm, **{setting: value})  # type: ignore[type-var]
    except ValueError:
        return False
    return True


def _nearest(values: Sequence[Any], own: Any, workers: int) -> int:
    if isinstance(own, float) and 0 < own < 1:  # a share of the workers
        own *= workers
    if own == "auto":
        own = workers
    if not isinstance(own, int | float):  # it follows from the cluster
        return 0
    return min(range(len(values)), key=lambda number: abs(values[number] - own))
