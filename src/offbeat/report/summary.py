"""The table of a report: one row per algorithm, over all its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from offbeat.report import figures, spread
from offbeat.report.runs import Run, Runs, setting
from offbeat.report.spread import Interval

NOTHING = "–"

_NARROW = (  # a terminal may have 80 columns
    "algorithm",
    "lr",
    "time to\ntarget",
    "speed-\nup",
    "sam-\nples/s",
    "sam-\nples",
    "utili-\nsation",
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


_NARROW_PLAIN = ("run", "utilisation", "waited", "dropped", "staleness")


@dataclass(frozen=True)
class Row:
    """What came of one algorithm, over all its seeds. None where the records do not say."""

    name: str
    seeds: int
    failed: int
    """In so many of the seeds a worker failed."""
    diverged: int
    """In so many of them its numbers left all bounds."""
    rate: float | None
    """The factor of the task's learning rate."""
    tuned: dict[str, Any]
    """Settings that were found by trying."""
    times: tuple[float, ...]
    """Seconds to the target, of the seeds that reached it."""
    to_target: Interval | None
    """Over the seeds; one that never reached the target counts as infinitely long."""
    budget_s: float | None
    """Who has not reached the target takes longer than this."""
    speed_ups: Interval | None
    """Over the synchronous one on the same cluster, seed by seed."""
    throughput: Interval | None
    """Likewise, of samples a second on the way to the target."""
    efficiency: Interval | None
    """Likewise, how many times fewer samples to the target; times `throughput` the speed-up."""
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
    def seconds_to_target(self) -> float | None:
        """The median; None if that seed never came there."""
        found = self.to_target
        return None if found is None or math.isinf(found.median) else found.median

    @property
    def speed_up(self) -> float | None:
        """The median."""
        return None if self.speed_ups is None else self.speed_ups.median

    @property
    def timed(self) -> bool:
        """Whether nothing is learnt: what is compared is speed."""
        return self.samples_per_s is not None

    @property
    def plain(self) -> bool:
        """Whether an ordinary script has run: nothing is known of a target or a learning curve."""
        return not (self.aims or self.accuracies or self.losses or self.timed or self.rate)


def rows(runs: Runs) -> list[Row]:
    """Compare the algorithms."""
    groups = runs.groups()
    baseline = {
        setting(group[0]): {run.about.seed: run for run in group}
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
    if all_plain(compared):
        return ("run", "utilisation", f"waited, {seconds}", "dropped", "staleness, mean and most")
    return (
        "algorithm",
        "lr",
        f"time to target, {seconds}",
        "speed-up",
        "of it: samples a second",
        "of it: samples needed",
        "utilisation",
        "dropped",
        "staleness, mean and most",
        f"waited, {seconds}",
        f"final {_score_of(compared)}",
    )


def cells(row: Row, plain: bool) -> tuple[str, ...]:
    """A row as text, under the headings; `plain` if all rows are."""
    if plain:
        return (
            row.name,
            _text(row.utilization, "{:.0%}"),
            _text(row.waited_s, "{:,.1f}"),
            _text(row.dropped, "{:.0%}"),
            _staleness(row),
        )
    if row.timed:
        return (
            row.name,
            _text(row.steps_per_s, "{:,.1f}"),
            _text(row.samples_per_s, "{:,.0f}"),
            _text(row.speed_up, "{:.2f}×"),
            _text(row.utilization, "{:.0%}"),
            _text(row.waited_s, "{:,.1f}"),
            _text(row.dropped, "{:.0%}"),
            _staleness(row),
        )
    *shown, score = _learnt_cells(row)
    return (*shown, _text(row.waited_s, "{:,.1f}"), score)


def _learnt_cells(row: Row) -> tuple[str, ...]:
    """Those that a terminal has room for."""
    return (
        ", ".join([row.name, *(f"{name}={_plain(value)}" for name, value in row.tuned.items())]),
        _text(row.rate, "×{:.3g}"),
        _to_target(row),
        _with_interval(row.speed_ups, "{:.2f}".format) if row.times else NOTHING,
        _factor(row.throughput) if row.times else NOTHING,
        _factor(row.efficiency) if row.times else NOTHING,
        _text(row.utilization, "{:.0%}"),
        _text(row.dropped, "{:.0%}"),
        _staleness(row),
        _score(row),
    )


def all_plain(compared: Sequence[Row]) -> bool:
    """Whether there is nothing to compare but how time was spent."""
    return bool(compared) and all(row.plain for row in compared)


def _all_timed(compared: Sequence[Row]) -> bool:
    return bool(compared) and all(row.timed for row in compared)


def table(runs: Runs) -> Table:
    """The comparison, for a terminal."""
    compared = rows(runs)
    timed, plain = _all_timed(compared), all_plain(compared)
    seconds = f"times in {seconds_of(runs)}"
    waits = "waited: all workers together; staleness: mean, most"
    split = "in brackets: 95 % intervals; speed-up = samples a second × samples needed"
    shown = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=f"{seconds}; {waits if timed or plain else split}",
        caption_justify="left",
        min_width=len(seconds) + len(waits) + 2 if plain else None,
    )
    narrow = _NARROW_TIMED if timed else (*_NARROW, f"final\n{_score_of(compared)}")
    for number, heading in enumerate(_NARROW_PLAIN if plain else narrow):
        if number == 0:
            shown.add_column(heading, style="bold", overflow="fold")
        else:
            shown.add_column(heading, justify="right", vertical="top")
    for row in compared:
        shown.add_row(*(cells(row, plain) if timed or plain else _learnt_cells(row)))
    return shown


def failures(runs: Runs) -> list[str]:
    """Say of each run that failed which worker it was, and why."""
    return [f"{run.name}, failed: {run.failure}" for run in runs if run.error is not None]


def _row(name: str, group: list[Run], baseline: dict[int | None, Run]) -> Row:
    def over(cost: Callable[[Run], float]) -> Interval | None:
        pairs = [
            (cost(run), cost(baseline[seed]))
            for run in group
            if (seed := run.about.seed) in baseline
        ]
        known = [(ours, theirs) for ours, theirs in pairs if not math.isnan(ours + theirs)]
        return spread.interval(spread.speed_ups([a for a, _ in known], [b for _, b in known]))

    budgets = [run.result.budget_s for run in group if run.result and run.result.budget_s]
    known_most = [most for run in group if (most := figures.max_staleness(run)) is not None]
    return Row(
        name=name,
        seeds=len(group),
        aims=any(run.about.target is not None or run.result is not None for run in group),
        failed=sum(run.error is not None for run in group),
        diverged=sum(run.result is not None and run.result.diverged for run in group),
        rate=group[0].about.rate,
        tuned=group[0].about.tuned,
        times=tuple(time for run in group if math.isfinite(time := figures.to_target_s(run))),
        to_target=spread.interval(map(figures.to_target_s, group)),
        budget_s=min(budgets, default=None),
        speed_ups=over(figures.compared_s),
        throughput=over(figures.seconds_a_sample),
        efficiency=over(figures.samples_to_target),
        utilization=_mean(figures.utilization(run) for run in group),
        waited_s=_mean(figures.waited_s(run) for run in group),
        dropped=_mean(figures.dropped(run) for run in group),
        mean_staleness_rounds=_mean(figures.mean_staleness(run) for run in group),
        max_staleness_rounds=max(known_most, default=None),
        accuracies=tuple(value for run in group if (value := figures.accuracy(run)) is not None),
        losses=tuple(value for run in group if (value := figures.loss(run)) is not None),
        steps_per_s=_mean(figures.steps_per_s(run) for run in group),
        samples_per_s=_mean(figures.samples_per_s(run) for run in group),
    )


# --- as text -------------------------------------------------------------------------------------


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _to_target(row: Row) -> str:
    """The median with its interval; and how many seeds never came there, and why."""
    if row.failed == row.seeds:
        return "failed"
    if row.diverged == row.seeds:
        return "diverged"
    if not row.times and not row.aims:
        return NOTHING
    if not row.times:
        return "not reached"
    assert row.to_target is not None
    missed = row.seeds - len(row.times) - row.failed - row.diverged
    counts = {"failed": row.failed, "diverged": row.diverged, "never": missed}
    notes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    shown = _with_interval(row.to_target, spread.seconds, row.budget_s)
    return f"{shown}, {notes}" if notes else shown


def _with_interval(
    found: Interval | None, form: Callable[[float], str], most: float | None = None
) -> str:
    """A median, and its interval; what is infinite is more than the budget."""
    if found is None:
        return NOTHING

    def text(value: float) -> str:
        if math.isfinite(value):
            return form(value)
        return "∞" if most is None else f">{form(most)}"

    if found.seeds < 2 or found.low == found.high:
        return text(found.median)
    return f"{text(found.median)} ({text(found.low)}–{text(found.high)})"


def _factor(found: Interval | None) -> str:
    known = found is not None and 0 < found.median < math.inf
    return f"{found.median:.2f}×" if known and found is not None else NOTHING


def _staleness(row: Row) -> str:
    if row.max_staleness_rounds is None:
        return NOTHING
    return f"{row.mean_staleness_rounds or 0.0:.1f}, {row.max_staleness_rounds}"


def _score_of(compared: list[Row]) -> str:
    return "loss" if not any(row.accuracies for row in compared) else "accuracy"


def _score(row: Row) -> str:
    if row.accuracies:
        return f"{statistics.fmean(row.accuracies):.1%}"
    return f"{statistics.fmean(row.losses):.3g}" if row.losses else NOTHING
