"""What one run of a comparison came to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from offbeat import federated as fed
from offbeat.records import Line


@dataclass(frozen=True)
class Outcome:
    """What one client has to say of a run."""

    history: fed.History
    classes: tuple[tuple[int, ...], ...]
    """Of each task."""
    sent_bytes: float | None
    """By all clients until this one ended, where that is counted."""


@dataclass(frozen=True)
class Result:
    """What a method came to with one seed. Empty is what was not measured: it failed."""

    label: str
    seed: int
    classes: list[list[int]] = field(default_factory=list)
    """Of each task, in the order in which they came."""
    seen_accuracy: list[float] = field(default_factory=list)
    """After each task, over all classes so far."""
    by_task: list[list[float]] = field(default_factory=list)
    """After each task, of each task so far."""
    forgetting: float | None = None
    histogram: list[int] = field(default_factory=list)
    """Samples of each class that all clients keep in the end, in the order of `classes`."""
    sum_bytes: int | None = None
    """Given by all clients to sums and scores."""
    sent_bytes: float | None = None
    """By all clients, models included; None on real processes, where nobody counts."""
    rounds: int | None = None
    seconds: float | None = None
    """Until the last task was over."""
    process_s: float | None = None
    """Of the processor, for all clients together; None on real processes."""
    error: str | None = None
    """The traceback of the client that failed first."""

    @property
    def figures(self) -> dict[str, Any]:
        """For whoever shows progress."""
        if self.error is not None:
            return {"seed": self.seed, "error": self.error}
        last, forgotten = self.seen_accuracy[-1], self.forgetting or 0.0
        words = f"{last:.1%} of all classes after {_tasks(len(self.seen_accuracy))}"
        return {
            "seed": self.seed,
            "error": None,
            "word": f"{last:.1%}",
            "words": f"{words}, {100 * forgotten:.1f} points forgotten",
        }

    @property
    def line(self) -> Line:
        """For a file of results; `offbeat report` reads some of it."""
        last = self.seen_accuracy[-1] if self.seen_accuracy else None
        return {"kind": "result", "final_accuracy": last, **asdict(self)}

    @classmethod
    def read(cls, line: Line) -> Result:
        """The same again."""
        left_out = ("kind", "final_accuracy")
        return cls(**{name: value for name, value in line.items() if name not in left_out})

    @classmethod
    def of(cls, label: str, seed: int, outcomes: list[Outcome], process_s: float | None) -> Result:
        """Put together what all clients say."""
        first, histories = outcomes[0].history, [each.history for each in outcomes]
        sent = [each.sent_bytes for each in outcomes if each.sent_bytes is not None]
        return cls(
            label,
            seed,
            [list(group) for group in outcomes[0].classes],
            first.seen_accuracy,
            first.accuracy,
            first.forgetting,
            first.histograms[-1],
            sum(each.sent_bytes for each in histories),
            max(sent, default=None),
            first.rounds,
            max(each.seconds[-1] for each in histories),
            process_s,
        )


def _tasks(count: int) -> str:
    return f"{count} task{'' if count == 1 else 's'}"
