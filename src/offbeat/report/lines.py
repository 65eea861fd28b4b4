"""The lines of records, checked: what each kind must hold. See offbeat/records.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from offbeat.errors import ReportError


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _Span(_Line):
    rank: NonNegativeInt
    from_s: FiniteFloat
    to_s: FiniteFloat

    @model_validator(mode="after")
    def _ends_after_it_began(self) -> Self:
        if self.to_s < self.from_s:
            raise ValueError(f"to_s, {self.to_s}, is before from_s, {self.from_s}")
        return self

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


class Begin(_Line):
    """What was run; the lines after it belong to it."""

    kind: Literal["run"]
    label: str
    algorithm: str = ""
    world: str = ""
    cluster: str = ""
    cluster_file: str = ""
    workers: NonNegativeInt = 0
    task: str = ""
    seed: int | None = None
    command: str = ""
    offbeat: str = ""
    target: str | None = None
    rate: FiniteFloat | None = None
    tuned: dict[str, Any] = {}
    edge: str = ""


class Compute(_Span):
    kind: Literal["compute"]
    samples: FiniteFloat
    arrival: Literal["on time", "late", "dropped", "abandoned"]


class Wait(_Span):
    kind: Literal["wait"]
    round: int | None


class Round(_Span):
    kind: Literal["round"]
    round: NonNegativeInt
    at_s: FiniteFloat
    samples: FiniteFloat
    workers: NonNegativeInt
    staleness_rounds: NonNegativeInt
    mean_staleness_rounds: FiniteFloat = 0.0


class Evaluation(_Line):
    kind: Literal["evaluation"]
    at_s: FiniteFloat
    round: NonNegativeInt
    samples: FiniteFloat
    loss: float | None = None
    accuracy: float | None = None


class Lost(_Line):
    """A worker goes on without another, or with one that has joined."""

    kind: Literal["lost", "joined"]
    rank: NonNegativeInt
    at_s: FiniteFloat
    round: NonNegativeInt
    words: str
    workers: NonNegativeInt
    took_s: FiniteFloat
    lost_samples: FiniteFloat = 0.0

    @property
    def sentence(self) -> str:
        """For a person."""
        them = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        lost = f"; {self.lost_samples:g} samples are lost in all" if self.lost_samples else ""
        do = "went on" if self.kind == "lost" else "train"
        return f"{self.words}; {them} {do}, after {self.took_s:.3f} s{lost}"


class End(_Line):
    kind: Literal["end"]
    rank: NonNegativeInt
    at_s: FiniteFloat
    steps: NonNegativeInt
    compute_s: FiniteFloat
    wait_s: FiniteFloat
    samples: FiniteFloat
    dropped_samples: FiniteFloat


class Result(_Line):
    kind: Literal["result"]
    seconds_to_target: FiniteFloat | None = None
    samples_to_target: FiniteFloat | None = None
    budget_s: FiniteFloat | None = None
    diverged: bool = False
    seconds: FiniteFloat | None = None
    steps: NonNegativeInt | None = None
    final_accuracy: float | None = None
    final_loss: float | None = None
    utilization: FiniteFloat | None = None
    waited_s: FiniteFloat | None = None
    samples: FiniteFloat | None = None
    dropped_samples: FiniteFloat | None = None
    mean_staleness_rounds: FiniteFloat | None = None
    max_staleness_rounds: NonNegativeInt | None = None
    error: str | None = None


class Verdict(_Line):
    kind: Literal["verdict"]
    text: str


Checked = Begin | Compute | Wait | Round | Evaluation | Lost | End | Result | Verdict

_adapter: TypeAdapter[Checked] = TypeAdapter(Annotated[Checked, Field(discriminator="kind")])
_KINDS = {
    "run",
    "compute",
    "wait",
    "round",
    "evaluation",
    "lost",
    "joined",
    "end",
    "result",
    "verdict",
}


def checked(line: dict[str, Any], file: Path, number: int) -> Checked | None:
    """Return the line as what it is, or None if a later version of offbeat must have written it."""
    if line["kind"] not in _KINDS:
        return None
    try:
        return _adapter.validate_python(line)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][1:])
        where = f'{file}, line {number}, kind "{line["kind"]}"' + (f', key "{key}"' if key else "")
        raise ReportError(f"{where}: {first['msg']}") from None
