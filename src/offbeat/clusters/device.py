"""What a micro-batch costs on one worker."""

from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, log, log1p, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from offbeat.clusters import draws
from offbeat.clusters.noise import Effect, Place
from offbeat.clusters.tables import (
    NotNegative,
    Positive,
    PositiveOrInf,
    Table,
    Text,
    folder_of,
    kind_may_be_missing,
    nearest,
    read_csv,
)


class Length(Table):
    """How long the input of a micro-batch is, and what a unit of it costs."""

    per_unit_s: Positive

    def drawn(self, key: int, step: int) -> float:
        """Draw the length of one micro-batch."""
        raise NotImplementedError


class ListedLength(Length):
    """Each length is equally likely; they are listed as `values` or a column of a CSV file."""

    kind: Literal["listed"]
    path: Text | None = None
    column: Text | None = None
    values: Annotated[tuple[Positive, ...], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _read_path(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if "path" not in data and "values" not in data:
            raise ValueError("values is missing: list the lengths (or give the path of a CSV file)")
        if "values" in data and "path" in data and info.context:
            raise ValueError("values and path exclude each other: give one of them")
        if "values" in data:
            return data
        header, rows = read_csv("path", data["path"], folder_of(info))
        column = data.get("column")
        if column is None:
            place = 0
        elif header and column in header:
            place = header.index(column)
        else:
            raise ValueError(f"column {column!r} is not in the file{nearest(column, header or [])}")
        return {**data, "values": [row[place] for row in rows]}

    def drawn(self, key: int, step: int) -> float:
        return self.values[draws.below(len(self.values), key, step)]


class LognormalLength(Length):
    """Log-normal of the given mean and standard deviation, then kept within low and high."""

    kind: Literal["lognormal"]
    mean: Positive
    sd: Positive
    low: NotNegative = 0.0
    high: PositiveOrInf = inf

    @model_validator(mode="after")
    def _low_before_high(self) -> "LognormalLength":
        _check_range(self.low, self.high)
        if self.sd > 1000 * self.mean:
            raise ValueError(f"sd must be at most 1000 x mean, got {self.sd:g} and {self.mean:g}")
        return self

    @cached_property
    def _log_mean_and_sd(self) -> tuple[float, float]:
        variance = log1p((self.sd / self.mean) ** 2)
        return log(self.mean) - variance / 2, sqrt(variance)

    def drawn(self, key: int, step: int) -> float:
        mu, sigma = self._log_mean_and_sd
        return min(max(exp(mu + sigma * draws.normal(key, step)), self.low), self.high)


class UniformLength(Length):
    """Evenly spread between low and high."""

    kind: Literal["uniform"]
    low: NotNegative
    high: Positive

    @model_validator(mode="after")
    def _low_before_high(self) -> "UniformLength":
        _check_range(self.low, self.high)
        return self

    def drawn(self, key: int, step: int) -> float:
        return self.low + (self.high - self.low) * draws.uniform(key, step)


class ExponentialLength(Length):
    """Exponential of the given mean."""

    kind: Literal["exponential"]
    mean: Positive

    def drawn(self, key: int, step: int) -> float:
        return -self.mean * log1p(-draws.uniform(key, step))


def _check_range(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low must be less than high, got {low:g} and {high:g}")


AnyLength = Annotated[
    ListedLength | LognormalLength | UniformLength | ExponentialLength,
    Field(discriminator="kind"),
    kind_may_be_missing,
]


class Compute(Table):
    """What a micro-batch costs on a worker of speed 1: step_s + sample_s x samples + length."""

    step_s: NotNegative = 0.0
    sample_s: NotNegative = 0.0
    length: AnyLength | None = None

    @property
    def is_free(self) -> bool:
        return self.step_s == 0 and self.sample_s == 0 and self.length is None

    def work_s(self, step: int, samples: float, length_key: int) -> float:
        """Cost one micro-batch on a worker of speed 1 without noise."""
        work_s = self.step_s + self.sample_s * samples
        if self.length is not None:
            work_s += self.length.per_unit_s * self.length.drawn(length_key, step)
        return work_s

    def __str__(self) -> str:
        parts = [f"{self.step_s:g} s per micro-batch"] if self.step_s else []
        if self.sample_s:
            parts.append(f"{self.sample_s:g} s per sample")
        if self.length is not None:
            parts.append(f"{self.length.per_unit_s:g} s per unit of a {self.length.kind} length")
        return " + ".join(parts) or "from a trace"


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's compute, as a pure function: the same step costs the same, whoever asks when."""

    rank: int
    speed: float
    compute: Compute
    length_key: int
    effects: tuple[tuple[Effect, Place], ...]  # in the order in which they apply

    def seconds(self, step: int, samples: float, at_s: float) -> float:
        """Cost this worker's micro-batch number `step` of that many samples, started at `at_s`."""
        seconds = self.compute.work_s(step, samples, self.length_key) / self.speed
        for effect, place in self.effects:
            if effect.from_s <= at_s < effect.to_s:
                seconds = effect.applied_at(seconds, step, place, at_s)
        return seconds
