"""The table of a comparison: one row per method, over all its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from offbeat.lab.federation.results import Result
from offbeat.lab.league.words import bytes_of
from offbeat.report.summary import NOTHING

UPPER_BOUND = "joint"


@dataclass(frozen=True)
class Row:
    """What came of one method: means over the seeds that did not fail."""

    label: str
    failed: int
    accuracy: tuple[float, ...]
    """After each task, over all classes so far."""
    lowest: float
    """After the last one, of the seeds."""
    highest: float
    matrix: tuple[tuple[float, ...], ...]
    """After each task, of each task so far."""
    forgetting: float
    sum_bytes: float
    sent_bytes: float | None
    seconds: float

    @property
    def last(self) -> float | None:
        """The accuracy over all classes in the end."""
        return self.accuracy[-1] if self.accuracy else None


def rows(results: Iterable[Result]) -> list[Row]:
    """Compare the methods, in the order in which they come."""
    by_label: dict[str, list[Result]] = {}
    for each in results:
        by_label.setdefault(each.label, []).append(each)
    return [_row(label, its) for label, its in by_label.items()]


def _row(label: str, its: list[Result]) -> Row:
    good = [each for each in its if each.error is None]
    last = [each.seen_accuracy[-1] for each in good]
    sent = [each.sent_bytes for each in good if each.sent_bytes is not None]
    return Row(
        label,
        len(its) - len(good),
        _means([each.seen_accuracy for each in good]),
        min(last, default=0.0),
        max(last, default=0.0),
        tuple(_means(after) for after in zip(*(each.by_task for each in good), strict=True)),
        _mean(each.forgetting for each in good),
        _mean(each.sum_bytes for each in good),
        statistics.fmean(sent) if sent else None,
        _mean(each.seconds for each in good),
    )


def _means(columns: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.fmean(values) for values in zip(*columns, strict=True))


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0


# --- as text -------------------------------------------------------------------------------------


def headings(tasks: int, unit: str) -> tuple[str, ...]:
    """The columns; `unit` is what seconds are called."""
    after = [f"after {number}" for number in range(1, tasks)]
    whole = "accuracy in the end" if tasks > 1 else "accuracy"
    return ("method", *after, whole, "forgotten", "for scores", "sent in all", unit)


def cells(row: Row, tasks: int) -> tuple[str, ...]:
    """A row as text, under the headings."""
    if row.last is None:
        return (row.label, *[NOTHING] * (tasks - 1), "failed", *[NOTHING] * 4)
    spread = "" if row.lowest == row.highest else f" ({row.lowest:.1%}–{row.highest:.1%})"
    failed = f", {row.failed} failed" if row.failed else ""
    return (
        row.label,
        *(f"{value:.1%}" for value in row.accuracy[:-1]),
        f"{row.last:.1%}{spread}{failed}",
        f"{100 * row.forgetting:.1f}",
        bytes_of(row.sum_bytes),
        bytes_of(row.sent_bytes),
        f"{row.seconds:,.1f}",
    )


def table(compared: Sequence[Row], tasks: int, unit: str) -> Table:
    """The comparison, for a terminal."""
    shown = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption="accuracy over all classes so far, after each task: mean (lowest–highest seed); "
        "forgotten: points that old tasks have lost since their best",
        caption_justify="left",
    )
    for number, heading in enumerate(headings(tasks, unit)):
        if number == 0:
            shown.add_column(heading, style="bold", overflow="fold")
        else:
            shown.add_column(heading, justify="right", vertical="top")
    for row in compared:
        shown.add_row(*cells(row, tasks))
    return shown


def sentence(compared: Sequence[Row], seeds: int) -> str:
    """Say which method knows the most in the end, and how sure that is."""
    known = {row.label: row for row in compared if row.last is not None}
    bound = known.pop(UPPER_BOUND, None)
    if not known:
        return "Nothing to compare: no method has come to its end."
    ordered = sorted(known.values(), key=lambda row: row.accuracy[-1], reverse=True)
    best, others = ordered[0], ordered[1:]
    said = f"{best.label} tells {best.accuracy[-1]:.1%} of all classes apart in the end"
    if others:
        next_one = others[0]
        apart = 100 * (best.accuracy[-1] - next_one.accuracy[-1])
        overlap = seeds < 2 or best.lowest <= next_one.highest
        doubt = ", but their seeds overlap" if overlap and seeds > 1 else ""
        doubt = ", by one seed" if seeds == 1 else doubt
        said += f", {apart:.1f} points more than {next_one.label}{doubt}"
    if bound is not None:
        said += f"; with every sample kept it would be {bound.accuracy[-1]:.1%}"
    return f"{said}."
