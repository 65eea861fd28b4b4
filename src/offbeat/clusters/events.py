"""Scripted events: what happens to a worker at a given moment of the run."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Literal

from pydantic import Field, field_validator

from offbeat.clusters.noise import LAST, Effect, Place
from offbeat.clusters.tables import NotNegative, Positive, Rank, Table, Workers, kind_may_be_missing


class Slow(Effect):
    """The workers take `factor` times as long, whatever else slows them."""

    kind: Literal["slow"]
    workers: Workers
    factor: Positive

    @field_validator("factor")
    @classmethod
    def _slower(cls, factor: float) -> float:
        if factor < 1:
            raise ValueError(f"must be at least 1 (2 is twice as long), got {factor:g}")
        return factor

    @property
    def order(self) -> int:
        return LAST

    def applied(self, seconds: float, step: int, place: Place) -> float:
        return seconds * self.factor

    def __str__(self) -> str:
        return f"slow {list(self.workers)} x{self.factor:g} from {self.from_s:g} to {self.to_s:g} s"


class _Moment(Table):
    worker: Rank
    at_s: NotNegative

    def __str__(self) -> str:
        return f"{getattr(self, 'kind', '')} {self.worker} at {self.at_s:g} s"


class Crash(_Moment):
    """The worker is gone without a word."""

    kind: Literal["crash"]


class Leave(_Moment):
    """The worker says goodbye and goes."""

    kind: Literal["leave"]


class Join(_Moment):
    """The worker is not there before this moment."""

    kind: Literal["join"]


class Freeze(_Moment):
    """The worker does nothing for a while, and does not answer: it is stopped, or swaps."""

    kind: Literal["freeze"]
    for_s: Positive

    @property
    def to_s(self) -> float:
        """When it goes on."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        return f"{super().__str__()} for {self.for_s:g} s"


Event = Annotated[
    Slow | Crash | Leave | Join | Freeze, Field(discriminator="kind"), kind_may_be_missing
]


def check_presence(events: Sequence[Event], workers: int) -> None:
    """Raise ValueError if a worker does something while it is not there, or twice."""
    seen: dict[tuple[bool, int], tuple[int, str, float]] = {}
    for number, event in enumerate(events):
        if isinstance(event, Slow | Freeze):
            continue
        slot = (isinstance(event, Join), event.worker)
        if slot in seen:
            first, kind, at_s = seen[slot]
            raise ValueError(
                f"event[{number}].worker: worker {event.worker} cannot {event.kind} at "
                f"{event.at_s:g} s, event[{first}] lets it {kind} at {at_s:g} s already"
            )
        seen[slot] = (number, event.kind, event.at_s)
    for (joins, worker), (number, kind, at_s) in seen.items():
        if not joins and (True, worker) in seen and seen[True, worker][2] >= at_s:
            raise ValueError(
                f"event[{number}].at_s: worker {worker} cannot {kind} at {at_s:g} s, "
                f"it joins at {seen[True, worker][2]:g} s"
            )
    late = sum(at_s > 0 for (joins, _), (_, _, at_s) in seen.items() if joins)
    if late == workers:
        raise ValueError("event: all workers join later; one must be there from the start")
    _check_freezes(events, seen)


def _check_freezes(
    events: Sequence[Event], seen: Mapping[tuple[bool, int], tuple[int, str, float]]
) -> None:
    before: dict[int, tuple[int, Freeze]] = {}
    freezes = [(number, event) for number, event in enumerate(events) if isinstance(event, Freeze)]
    for number, event in sorted(freezes, key=lambda each: each[1].at_s):
        cannot = f"event[{number}].at_s: worker {event.worker} cannot freeze at {event.at_s:g} s, "
        _, kind, at_s = seen.get((False, event.worker), (0, "", inf))
        if event.at_s >= at_s:
            raise ValueError(f"{cannot}it has to {kind} at {at_s:g} s")
        if event.at_s < (joins_s := seen.get((True, event.worker), (0, "", 0.0))[2]):
            raise ValueError(f"{cannot}it joins at {joins_s:g} s")
        if event.worker in before and before[event.worker][1].to_s > event.at_s:
            first, other = before[event.worker]
            raise ValueError(f"{cannot}event[{first}] has it frozen until {other.to_s:g} s")
        before[event.worker] = number, event
