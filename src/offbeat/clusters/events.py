"""Scripted events: what happens to a worker at a given moment of the run."""

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


Event = Annotated[Slow | Crash | Leave | Join, Field(discriminator="kind"), kind_may_be_missing]
