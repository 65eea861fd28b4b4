"""Scalars for TensorBoard: one folder of events per run."""

from __future__ import annotations

import math
import re
from pathlib import Path

from offbeat.errors import ReportError
from offbeat.report.runs import Run, Runs


def write(runs: Runs, folder: str | Path) -> None:
    """Write the scalars of these runs under this folder; raises ReportError if that cannot be done.

    Loss and accuracy are by samples, what a round holds and how many workers are left by round,
    utilisation by worker.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ReportError(
            "scalars need the package tensorboard: pip install 'offbeat[tensorboard]'"
        ) from None
    taken: set[str] = set()
    for run in runs:
        name = _folder_name(run.name, taken)
        try:
            with SummaryWriter(str(Path(folder) / name)) as writer:
                for tag, value, step, at_s in scalars(run):
                    writer.add_scalar(tag, value, step, walltime=at_s)
        except OSError as error:
            raise ReportError(f"{folder}: cannot be written: {error.strerror}") from None


def scalars(run: Run) -> list[tuple[str, float, int, float]]:
    """Return tag, value, step and moment of everything that is worth a curve."""
    found = [
        (f"evaluation/{name}", value, round(line.samples), line.at_s)
        for line in run.evaluations
        for name, value in (("loss", line.loss), ("accuracy", line.accuracy))
        if value is not None and math.isfinite(value)
    ]
    for line in run.distinct_rounds:
        found += [
            ("round/samples", line.samples, line.round, line.at_s),
            ("round/workers", float(line.workers), line.round, line.at_s),
            ("round/staleness_rounds", float(line.staleness_rounds), line.round, line.at_s),
            ("round/mean_staleness_rounds", line.mean_staleness_rounds, line.round, line.at_s),
        ]
    for lost in run.losses:
        found += [
            ("members/workers", float(lost.workers), lost.round, lost.at_s),
            ("members/lost_samples", lost.lost_samples, lost.round, lost.at_s),
        ]
    seconds = run.seconds
    found += [
        ("worker/utilization", totals.utilization, rank, seconds)
        for rank, totals in run.totals.items()
    ]
    return found


def _folder_name(name: str, taken: set[str]) -> str:
    """A name for the run's folder that no other run has."""
    plain = re.sub(r"[^\w.=-]+", "_", name) or "run"
    unique = next(
        candidate
        for number in range(1, len(taken) + 2)
        if (candidate := plain if number == 1 else f"{plain}_{number}") not in taken
    )
    taken.add(unique)
    return unique
