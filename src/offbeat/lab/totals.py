"""What one worker has done so far, by whatever way it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offbeat.attach import Attachment
from offbeat.records import Line, Sink


class Totals(Protocol):
    """What one worker has done so far."""

    @property
    def compute_s(self) -> float: ...

    @property
    def wait_s(self) -> float: ...

    @property
    def samples(self) -> float:
        """Of all workers, in the rounds that were applied here."""

    @property
    def own_samples(self) -> float:
        """Of this worker, in its own steps or in rounds that were applied here."""


class OfAttached:
    """The totals that an attachment keeps itself."""

    def __init__(self, dp: Attachment) -> None:
        self._apply = dp._apply

    @property
    def compute_s(self) -> float:
        return self._apply.stats.compute_s

    @property
    def wait_s(self) -> float:
        return self._apply.stats.wait_s

    @property
    def samples(self) -> float:
        return self._apply.samples

    @property
    def own_samples(self) -> float:
        return self._apply.stats.applied_samples


@dataclass
class Watch:
    """The totals of a worker without one, read off its records, which are handed on."""

    sink: Sink | None
    compute_s: float = 0.0
    wait_s: float = 0.0
    samples: float = 0.0
    own_samples: float = 0.0

    def __call__(self, line: Line) -> None:
        kind = line["kind"]
        if kind == "compute":
            self.compute_s += line["to_s"] - line["from_s"]
        elif kind == "wait":
            self.wait_s += line["to_s"] - line["from_s"]
        elif kind == "round":
            self.samples += line["samples"]
        if self.sink is not None:
            self.sink(line)
