"""Noise: what makes the same micro-batch take longer now and then.

Each kind is a function of the seconds so far and of (seed, rank, step), or of the moment. They
combine without regard to their order in the file: a trace in seconds replaces the compute time,
then factors multiply it, then delays are added (and last, a scripted `slow` multiplies all of it).
"""

from dataclasses import dataclass
from math import exp, inf, log1p
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from offbeat.clusters import draws
from offbeat.clusters.tables import (
    Count,
    Flag,
    NotNegative,
    Positive,
    PositiveOrInf,
    Table,
    Text,
    Workers,
    folder_of,
    kind_may_be_missing,
    read_csv,
)

REPLACES, MULTIPLIES, ADDS, LAST = range(4)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an effect meets a worker: its position among those covered, and its random streams."""

    position: int
    count: int
    key: int
    shared_key: int  # the same for every worker


class Effect(Table):
    """Something that changes what a micro-batch costs if it starts in from_s <= t < to_s."""

    from_s: NotNegative = 0.0
    to_s: PositiveOrInf = inf

    @model_validator(mode="after")
    def _window_is_not_empty(self) -> "Effect":
        if self.from_s >= self.to_s:
            raise ValueError(f"from_s must be before to_s, got {self.from_s:g} and {self.to_s:g}")
        return self

    def applied(self, seconds: float, step: int, place: Place) -> float:
        """Turn the seconds so far into the seconds with this effect."""
        raise NotImplementedError

    def applied_at(self, seconds: float, step: int, place: Place, at_s: float) -> float:
        """Likewise, of a micro-batch that starts at `at_s`: to most kinds that is all the same."""
        return self.applied(seconds, step, place)

    @property
    def order(self) -> int:
        """Say when this effect applies, the lowest first."""
        return MULTIPLIES


class Noise(Effect):
    """Noise on all workers, or on those listed."""

    workers: Workers | None = None

    def __str__(self) -> str:
        shown = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in ("kind", "rows") and value != field.default:
                listed = isinstance(value, tuple)
                shown.append(f"{name}={list(value) if listed else value}")
        return " ".join([str(getattr(self, "kind", "")), *shown])


class NoNoise(Noise):
    """Every micro-batch takes its nominal time."""

    kind: Literal["none"]

    def applied(self, seconds: float, step: int, place: Place) -> float:
        return seconds


class Lognormal(Noise):
    """Times exp(sigma N(0,1)), divided by its mean exp(sigma²/2) unless mean_one is false."""

    kind: Literal["lognormal"]
    sigma: Annotated[Positive, Field(le=10)]  # beyond that, exp() overflows sooner or later
    mean_one: Flag = True

    def applied(self, seconds: float, step: int, place: Place) -> float:
        mu = -0.5 * self.sigma * self.sigma if self.mean_one else 0.0
        return seconds * exp(mu + self.sigma * draws.normal(place.key, step))


class Exponential(Noise):
    """Times 1 + an exponential of mean `scale`."""

    kind: Literal["exponential"]
    scale: Positive

    def applied(self, seconds: float, step: int, place: Place) -> float:
        return seconds * (1.0 - self.scale * log1p(-draws.uniform(place.key, step)))


class Pareto(Noise):
    """Times 1 + a Lomax (a Pareto that starts at 0): P(> x) = (1 + x/scale)^-shape."""

    kind: Literal["pareto"]
    shape: Annotated[Positive, Field(ge=0.1)]  # below that, the power overflows sooner or later
    scale: Positive

    def applied(self, seconds: float, step: int, place: Place) -> float:
        tail = 1.0 - draws.uniform(place.key, step)
        lomax: float = self.scale * (tail ** (-1.0 / self.shape) - 1.0)
        return seconds * (1.0 + lomax)


class Uniform(Noise):
    """Times a factor between low and high."""

    kind: Literal["uniform"]
    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _low_before_high(self) -> "Uniform":
        if self.low >= self.high:
            raise ValueError(f"low must be less than high, got {self.low:g} and {self.high:g}")
        return self

    def applied(self, seconds: float, step: int, place: Place) -> float:
        return seconds * (self.low + (self.high - self.low) * draws.uniform(place.key, step))


class DropCompute(Noise):
    """Times 1 + min(Z/alpha, beta), ln Z ~ N(4, 1): the delay environment of DropCompute.

    Giladi et al., NeurIPS 2023, arXiv 2306.10598: 1.5 times as long on average, 6.5 at worst.
    """

    kind: Literal["dropcompute"]

    ALPHA: ClassVar[float] = 2.0 * exp(4.5)
    BETA: ClassVar[float] = 5.5

    def applied(self, seconds: float, step: int, place: Place) -> float:
        z = exp(4.0 + draws.normal(place.key, step))
        return seconds * (1.0 + min(z / self.ALPHA, self.BETA))


class Delay(Noise):
    """Noise in seconds, whatever the micro-batch costs."""

    @property
    def order(self) -> int:
        return ADDS


class Rotating(Delay):
    """Plus a delay between low_s and high_s, spread evenly over the workers, moving on every step.

    Li et al., PPoPP 2020, arXiv 1908.04207 (eager-SGD): 50 .. 400 ms over 8 workers.
    """

    kind: Literal["rotating"]
    low_s: NotNegative
    high_s: NotNegative

    @model_validator(mode="after")
    def _low_before_high(self) -> "Rotating":
        if self.low_s > self.high_s:
            raise ValueError(
                f"low_s must not be more than high_s, got {self.low_s:g} and {self.high_s:g}"
            )
        return self

    def applied(self, seconds: float, step: int, place: Place) -> float:
        turn = (place.position + step) % place.count
        spread = turn / (place.count - 1) if place.count > 1 else 0.0
        return seconds + self.low_s + (self.high_s - self.low_s) * spread


class RandomDelay(Delay):
    """Plus delay_s on exactly k workers per step, drawn from a seed that the workers share.

    Li et al., PPoPP 2020, arXiv 1908.04207 (eager-SGD): 200 .. 400 ms on 1 of 8 workers.
    """

    kind: Literal["random_delay"]
    k: Count
    delay_s: NotNegative

    def applied(self, seconds: float, step: int, place: Place) -> float:
        hit = draws.subset(self.k, place.count, place.shared_key, step)
        return seconds + self.delay_s if place.position in hit else seconds


class Spells(Noise):
    """Times `factor` on k workers for the first `for_s` of every `every_s` seconds, then on others.

    Which ones is drawn anew for every stretch, from a seed that the workers share: what a script of
    `slow` events would be, but another one with every seed.
    """

    kind: Literal["spells"]
    k: Count
    factor: Annotated[Positive, Field(ge=1)]
    every_s: Positive
    for_s: Positive

    @model_validator(mode="after")
    def _spells_do_not_overlap(self) -> "Spells":
        if self.for_s > self.every_s:
            raise ValueError(
                f"for_s must be at most every_s, got {self.for_s:g} and {self.every_s:g}"
            )
        return self

    def applied_at(self, seconds: float, step: int, place: Place, at_s: float) -> float:
        stretch, since_s = divmod(at_s, self.every_s)
        if since_s >= self.for_s:
            return seconds
        hit = draws.subset(self.k, place.count, place.shared_key, int(stretch))
        return seconds * self.factor if place.position in hit else seconds


class Trace(Noise):
    """A recording, from a CSV file or listed as `rows`: one row per step, one column per worker.

    It wraps around. With fewer columns than workers, worker i has column i modulo their number, and
    those who share a column start at different rows of it: else they would be slow together.
    """

    kind: Literal["trace"]
    unit: Literal["seconds", "factor"]
    path: Text | None = None
    rows: tuple[tuple[Positive, ...], ...]

    @model_validator(mode="before")
    @classmethod
    def _read_path(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if "path" not in data and "rows" not in data:
            raise ValueError("path is missing: the CSV file of the trace (or list its rows)")
        if "rows" in data and "path" in data and info.context:
            raise ValueError("rows and path exclude each other: give one of them")
        if "rows" in data:
            return data
        _, rows = read_csv("path", data["path"], folder_of(info))
        return {**data, "rows": rows}

    @model_validator(mode="after")
    def _rows_are_a_table(self) -> "Trace":
        if not self.rows or not self.rows[0]:
            raise ValueError("rows must hold at least one value")
        for number, row in enumerate(self.rows):
            if len(row) != len(self.rows[0]):
                raise ValueError(
                    f"rows[{number}] has {len(row)} values, but rows[0] has {len(self.rows[0])}"
                )
        return self

    @property
    def order(self) -> int:
        return REPLACES if self.unit == "seconds" else MULTIPLIES

    def applied(self, seconds: float, step: int, place: Place) -> float:
        lap, column = divmod(place.position, len(self.rows[0]))
        laps = -(-place.count // len(self.rows[0]))
        first = lap * len(self.rows) // laps
        value = self.rows[(first + step) % len(self.rows)][column]
        return value if self.unit == "seconds" else seconds * value

    def __str__(self) -> str:
        return f"{super().__str__()} ({len(self.rows)} rows, {len(self.rows[0])} columns)"


AnyNoise = Annotated[
    NoNoise
    | Lognormal
    | Exponential
    | Pareto
    | Uniform
    | DropCompute
    | Rotating
    | RandomDelay
    | Spells
    | Trace,
    Field(discriminator="kind"),
    kind_may_be_missing,
]
