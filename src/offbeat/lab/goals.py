"""What a run is to reach, and when it ends."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

_UNITS = {"s": "seconds", "rounds": "rounds", "samples": "samples"}


@dataclass(frozen=True)
class Target:
    """An accuracy to reach from below, or a loss to reach from above."""

    metric: Literal["accuracy", "loss"]
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `accuracy=0.95` or `loss=0.1`."""
        metric, _, value = text.partition("=")
        number = _number(value)
        if metric not in ("accuracy", "loss") or number is None:
            raise ValueError(f"target must be such as accuracy=0.95 or loss=0.1, got {text!r}")
        if metric == "accuracy" and not 0 < number <= 1:
            raise ValueError(f"an accuracy to reach is above 0 and at most 1, got {value}")
        return cls(metric, number)  # type: ignore[arg-type]

    def reached(self, loss: float, accuracy: float | None) -> bool:
        """Say whether an evaluation is good enough."""
        if self.metric == "loss":
            return loss <= self.value
        return accuracy is not None and accuracy >= self.value

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"


@dataclass(frozen=True)
class Until:
    """When a worker leaves its loop."""

    kind: Literal["target", "seconds", "rounds", "samples"]
    amount: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Until:
        """Read `target`, `60s`, `300rounds` or `20000samples`."""
        if text == "target":
            return cls("target")
        found = re.fullmatch(r"([0-9.e+]+) ?(s|rounds|samples)", text)
        amount = _number(found[1]) if found else None
        if found is None or not amount or amount < 0:
            raise ValueError(
                f"until must be target, or such as 60s, 300rounds or 20000samples, got {text!r}"
            )
        return cls(_UNITS[found[2]], amount)  # type: ignore[arg-type]

    def share(self, seconds: float, rounds: int, samples: float) -> float:
        """Say how much of the run is over, from 0 to 1 and beyond."""
        if self.kind == "rounds":
            return rounds / self.amount
        return (samples if self.kind == "samples" else seconds) / self.amount

    def __str__(self) -> str:
        if self.kind == "target":
            return "target"
        return f"{self.amount:g}{'s' if self.kind == 'seconds' else self.kind}"


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
