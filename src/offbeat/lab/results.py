"""What a run of a race came to, and all of them together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from offbeat.lab.goals import Target
from offbeat.lab.watching import Outcome
from offbeat.records import Line

WorldName = Literal["virtual", "real"]


@dataclass(frozen=True)
class Result:
    """What one run came to. `None` is what was not reached, or not measured."""

    label: str
    algorithm: str
    settings: dict[str, Any]
    world: WorldName
    cluster: str
    task: str
    seed: int
    target: str | None
    """None if there is nothing to learn."""
    rate: float
    """The factor of the task's learning rate."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """Settings that were found by trying."""
    edge: str = ""
    """Where the best that was tried is at the edge: what was not tried."""
    seconds_to_target: float | None = None
    samples_to_target: float | None = None
    """Applied by all workers until then."""
    seconds: float | None = None
    """Until the last worker had ended."""
    final_accuracy: float | None = None
    final_loss: float | None = None
    samples: float | None = None
    """Computed, by all workers."""
    rounds: int | None = None
    steps: int | None = None
    """Micro-batches, of all workers."""
    utilization: float | None = None
    """The share of all workers' time that they have computed."""
    waited_s: float | None = None
    """By all workers together."""
    dropped_samples: float | None = None
    mean_staleness_rounds: float | None = None
    max_staleness_rounds: int | None = None
    replicas_identical: bool | None = None
    sent_bytes: float | None = None
    """By all workers; None on real processes, where nobody counts."""
    budget_s: float | None = None
    """A run that has not reached the target by then takes longer than this."""
    diverged: bool = False
    """Its numbers have left all bounds: it never reaches the target."""
    error: str | None = None
    """The traceback of the worker that failed first, with its rank and the time."""


@dataclass
class Standings:
    """What a race has measured, be it to its end or to Ctrl-C."""

    results: list[Result] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    """What records say of each run at its begin and at its end, for the table."""
    interrupted: bool = False
    stopped: str | None = None
    """Why the records cannot be written any more: the race ends there."""


def end_line(result: Result) -> Line:
    return {"kind": "result", **asdict(result)}


def figures(outcomes: list[Outcome], target: Target | None) -> dict[str, Any]:
    first = outcomes[0]
    spent_s = sum(each.compute_s + each.wait_s for each in outcomes)
    learnt: dict[str, Any] = {}
    if target is not None:
        last, there = first.evaluations[-1], math.isfinite(first.reached_s)
        learnt = {
            "seconds_to_target": first.reached_s if there else None,
            "samples_to_target": first.reached_samples if there else None,
            "final_accuracy": last["accuracy"],
            "final_loss": last["loss"] if math.isfinite(last["loss"]) else None,
        }
    return learnt | {
        "seconds": max(each.seconds for each in outcomes),
        "steps": sum(each.steps for each in outcomes),
        "samples": sum(each.computed_samples for each in outcomes),
        "rounds": first.rounds,
        "utilization": sum(each.compute_s for each in outcomes) / spent_s if spent_s else 1.0,
        "waited_s": sum(each.wait_s for each in outcomes),
        "dropped_samples": sum(each.dropped_samples for each in outcomes),
        "mean_staleness_rounds": first.mean_staleness_rounds,
        "max_staleness_rounds": first.max_staleness_rounds,
        "replicas_identical": all(each.replicas_identical for each in outcomes),
        "sent_bytes": max(each.sent_bytes or 0.0 for each in outcomes) or None,
    }
