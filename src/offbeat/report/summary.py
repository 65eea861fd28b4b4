"""The table of a report: one row per algorithm, over all its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from offbeat.report.runs import Run, Runs, setting

NOTHING = "–"

_NARROW = (  # a terminal may have 80 columns
    "algorithm",
    "lr",
    "time to\ntarget",
    "speed-\nup",
    "utili-\nsation",
    "waited",
    "drop-\nped",
    "stale-\nness",
)


_NARROW_TIMED = (
    "algorithm",
    "steps/s",
    "samples/s",
    "speed-\nup",
    "utili-\nsation",
    "waited",
    "drop-\nped",
    "stale-\nness",
)


@dataclass(frozen=True)
class Row:
    """What came of one algorithm, over all its seeds. None where the records do not say."""

    name: str
    seeds: int
    failed: int
    """In so many of the seeds a worker failed."""
    rate: float | None
    """The factor of the task's learning rate."""
    times: tuple[float, ...]
    """Seconds to the target, of the seeds that reached it."""
    seconds_to_target: float | None
    """The median over the seeds; one that never reached the target counts as infinitely long."""
    speed_up: float | None
    """Over the synchronous one on the same cluster; the median over the seeds that both reached."""
    utilization: float | None
    waited_s: float | None
    """Of all workers together; the mean over the seeds."""
    dropped: float | None
    """The share of the samples computed that was dropped."""
    mean_staleness_rounds: float | None
    max_staleness_rounds: int | None
    accuracies: tuple[float, ...]
    """The last one of every seed."""
    losses: tuple[float, ...]
    """Likewise."""
    steps_per_s: float | None
    """Of all workers together, where nothing is learnt; the mean over the seeds."""
    samples_per_s: float | None
    """Likewise, of the samples that were not dropped."""
    aims: bool = True
    """Whether there was a target."""

    @property
    def timed(self) -> bool:
        """Whether nothing is learnt: what is compared is speed."""
        return self.samples_per_s is not None


def rows(runs: Runs) -> list[Row]:
    """Compare the algorithms."""
    groups = runs.groups()
    baseline = {
        setting(group[0]): {run.about.seed: _compared_s(run) for run in group}
        for group in reversed(groups.values())  # the first of several is the one
        if group[0].synchronous
    }
    return [
        _row(name, group, baseline.get(setting(group[0]), {})) for name, group in groups.items()
    ]


def seconds_of(runs: Runs) -> str:
    """What to call the seconds of these runs: virtual ones are always called virtual."""
    return "virtual s" if all(run.about.world == "virtual" for run in runs) else "s"


def headings(runs: Runs) -> tuple[str, ...]:
    """The columns, with the seconds called what they are."""
    seconds, compared = seconds_of(runs), rows(runs)
    if _all_timed(compared):
        return (
            "algorithm",
            f"steps a {seconds}",
            f"samples a {seconds}",
            "speed-up",
            "utilisation",
            f"waited, {seconds}",
            "dropped",
            "staleness, mean and most",
        )
    return (
        "algorithm",
        "lr",
        f"time to target, {seconds}",
        "speed-up",
        "utilisation",
        f"waited, {seconds}",
        "dropped",
        "staleness, mean and most",
        f"final {_score_of(compared)}",
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, under the headings."""
    if row.timed:
        return (
            row.name,
            _text(row.steps_per_s, "{:,.1f}"),
            _text(row.samples_per_s, "{:,.0f}"),
            *_shared_cells(row),
        )
    return (
        row.name,
        _text(row.rate, "×{:g}"),
        _to_target(row),
        *_shared_cells(row),
        _score(row),
    )


def _shared_cells(row: Row) -> tuple[str, ...]:
    return (
        _text(row.speed_up, "{:.2f}×"),
        _text(row.utilization, "{:.0%}"),
        _text(row.waited_s, "{:,.1f}"),
        _text(row.dropped, "{:.0%}"),
        _staleness(row),
    )


def _all_timed(compared: Sequence[Row]) -> bool:
    return bool(compared) and all(row.timed for row in compared)


def table(runs: Runs) -> Table:
    """The comparison, for a terminal."""
    shown = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=f"times in {seconds_of(runs)}; waited: all workers together; staleness: mean, most",
        caption_justify="left",
    )
    compared = rows(runs)
    narrow = (*_NARROW, f"final\n{_score_of(compared)}")
    for number, heading in enumerate(_NARROW_TIMED if _all_timed(compared) else narrow):
        if number == 0:
            shown.add_column(heading, style="bold", overflow="fold")
        else:
            shown.add_column(heading, justify="right", vertical="top")
    for row in compared:
        shown.add_row(*cells(row))
    return shown


def failures(runs: Runs) -> list[str]:
    """Say of each run that failed which worker it was, and why."""
    return [f"{run.name}, failed: {run.failure}" for run in runs if run.error is not None]


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


def _row(name: str, group: list[Run], baseline: dict[int | None, float]) -> Row:
    median = statistics.median(_to_target_s(run) for run in group)
    pairs = [(baseline.get(run.about.seed, math.inf), _compared_s(run)) for run in group]
    ratios = [theirs / ours for theirs, ours in pairs if math.isfinite(theirs + ours) and ours > 0]
    known_most = [most for run in group if (most := _max_staleness(run)) is not None]
    return Row(
        name=name,
        seeds=len(group),
        aims=any(run.about.target is not None or run.result is not None for run in group),
        failed=sum(run.error is not None for run in group),
        rate=group[0].about.rate,
        times=tuple(time for run in group if math.isfinite(time := _to_target_s(run))),
        seconds_to_target=median if math.isfinite(median) else None,
        speed_up=statistics.median(ratios) if ratios else None,
        utilization=_mean(_utilization(run) for run in group),
        waited_s=_mean(_waited_s(run) for run in group),
        dropped=_mean(_dropped(run) for run in group),
        mean_staleness_rounds=_mean(_mean_staleness(run) for run in group),
        max_staleness_rounds=max(known_most, default=None),
        accuracies=tuple(value for run in group if (value := accuracy(run)) is not None),
        losses=tuple(value for run in group if (value := loss(run)) is not None),
        steps_per_s=_mean(_steps_per_s(run) for run in group),
        samples_per_s=_mean(_samples_per_s(run) for run in group),
    )


# --- of one run: its lines first, and what its result says where it has none ---------------------


def _to_target_s(run: Run) -> float:
    found = None if run.result is None else run.result.seconds_to_target
    return math.inf if found is None else found


def _compared_s(run: Run) -> float:
    """What is compared: seconds to the target, or seconds a sample where there is none."""
    rate = _samples_per_s(run)
    return 1 / rate if rate else _to_target_s(run)


def _steps_per_s(run: Run) -> float | None:
    said = run.result
    if run.about.target or said is None or not said.seconds or said.steps is None:
        return None
    return said.steps / said.seconds


def _samples_per_s(run: Run) -> float | None:
    said = run.result
    if run.about.target or said is None or not said.seconds or said.samples is None:
        return None
    return (said.samples - (said.dropped_samples or 0.0)) / said.seconds


def _utilization(run: Run) -> float | None:
    totals = run.totals.values()
    if spent := sum(each.compute_s + each.wait_s for each in totals):
        return sum(each.compute_s for each in totals) / spent
    return None if run.result is None else run.result.utilization


def _waited_s(run: Run) -> float | None:
    if totals := run.totals:
        return sum(each.wait_s for each in totals.values())
    return None if run.result is None else run.result.waited_s


def _dropped(run: Run) -> float | None:
    totals = run.totals.values()
    if samples := sum(each.samples for each in totals):
        return sum(each.dropped_samples for each in totals) / samples
    if (said := run.result) is None or not said.samples or said.dropped_samples is None:
        return None
    return said.dropped_samples / said.samples


def _mean_staleness(run: Run) -> float | None:
    rounds = run.distinct_rounds
    if samples := sum(line.samples for line in rounds):
        return sum(line.mean_staleness_rounds * line.samples for line in rounds) / samples
    return None if run.result is None else run.result.mean_staleness_rounds


def _max_staleness(run: Run) -> int | None:
    if run.rounds:
        return max(line.staleness_rounds for line in run.rounds)
    return None if run.result is None else run.result.max_staleness_rounds


# --- as text -------------------------------------------------------------------------------------


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _text(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _to_target(row: Row) -> str:
    failed = f"{row.failed} failed" if row.failed else ""
    if row.failed == row.seeds:
        return "failed"
    if not row.times and not row.aims:
        return NOTHING
    if not row.times:
        return f"not reached{failed and f', {failed}'}"
    if len(row.times) < row.seeds:
        notes = ", ".join(filter(None, (f"{len(row.times)} of {row.seeds}", failed)))
        return f"{_text(row.seconds_to_target, '{:,.1f}')} ({notes})"
    return f"{row.seconds_to_target:,.1f}{_range(row.times, '{:,.1f}')}"


def _staleness(row: Row) -> str:
    if row.max_staleness_rounds is None:
        return NOTHING
    return f"{row.mean_staleness_rounds or 0.0:.1f}, {row.max_staleness_rounds}"


def _score_of(compared: list[Row]) -> str:
    return "loss" if not any(row.accuracies for row in compared) else "accuracy"


def _score(row: Row) -> str:
    if row.accuracies:
        percent = [100 * value for value in row.accuracies]
        return f"{statistics.fmean(percent):.1f}%{_range(percent, '{:.1f}')}"
    if row.losses:
        return f"{statistics.fmean(row.losses):.3g}{_range(row.losses, '{:.3g}')}"
    return NOTHING


def _range(values: Sequence[float], form: str) -> str:
    """From the lowest to the highest seed; broken off first where a terminal is narrow."""
    if len(values) < 2:
        return ""
    return f" ({form.format(min(values))}–{form.format(max(values))})"
