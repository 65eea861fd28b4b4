"""Figures of one run: from its lines first, or from what its result says where it has none."""

from __future__ import annotations

import math

from offbeat.report.runs import Run


def accuracy(run: Run) -> float | None:
    """The last accuracy of a run."""
    if run.result is not None and run.result.final_accuracy is not None:
        return run.result.final_accuracy
    known = [line.accuracy for line in run.evaluations if line.accuracy is not None]
    return known[-1] if known else None


def loss(run: Run) -> float | None:
    """The last loss of a run."""
    if run.result is not None and run.result.final_loss is not None:
        return run.result.final_loss
    known = [line.loss for line in run.evaluations if line.loss is not None]
    return known[-1] if known else None


def to_target_s(run: Run) -> float:
    found = None if run.result is None else run.result.seconds_to_target
    return math.inf if found is None else found


def compared_s(run: Run) -> float:
    """What is compared: seconds to the target, or seconds a sample where there is none."""
    rate = samples_per_s(run)
    return 1 / rate if rate else to_target_s(run)


def samples_to_target(run: Run) -> float:
    """Infinitely many where it was not reached; not a number where nobody has counted."""
    said = run.result
    if said is None or said.seconds_to_target is None:
        return math.inf
    return math.nan if said.samples_to_target is None else said.samples_to_target


def seconds_a_sample(run: Run) -> float:
    samples, seconds = samples_to_target(run), to_target_s(run)
    return math.inf if math.isinf(seconds) else seconds / samples if samples else math.nan


def steps_per_s(run: Run) -> float | None:
    said = run.result
    if run.about.target or said is None or not said.seconds or said.steps is None:
        return None
    return said.steps / said.seconds


def samples_per_s(run: Run) -> float | None:
    said = run.result
    if run.about.target or said is None or not said.seconds or said.samples is None:
        return None
    return (said.samples - (said.dropped_samples or 0.0)) / said.seconds


def utilization(run: Run) -> float | None:
    totals = run.totals.values()
    if spent := sum(each.compute_s + each.wait_s for each in totals):
        return sum(each.compute_s for each in totals) / spent
    return None if run.result is None else run.result.utilization


def waited_s(run: Run) -> float | None:
    if totals := run.totals:
        return sum(each.wait_s for each in totals.values())
    return None if run.result is None else run.result.waited_s


def dropped(run: Run) -> float | None:
    totals = run.totals.values()
    if samples := sum(each.samples for each in totals):
        return sum(each.dropped_samples for each in totals) / samples
    if (said := run.result) is None or not said.samples or said.dropped_samples is None:
        return None
    return said.dropped_samples / said.samples


def mean_staleness(run: Run) -> float | None:
    rounds = run.distinct_rounds
    if samples := sum(line.samples for line in rounds):
        return sum(line.mean_staleness_rounds * line.samples for line in rounds) / samples
    return None if run.result is None else run.result.mean_staleness_rounds


def max_staleness(run: Run) -> int | None:
    if run.rounds:
        return max(line.staleness_rounds for line in run.rounds)
    return None if run.result is None else run.result.max_staleness_rounds
