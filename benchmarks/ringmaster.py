"""Ringmaster ASGD and its relatives on 6,174 workers and a server: the authors' quadratic.

f(x) = x'Ax/2 - b'x, A = tridiag(-1, 2, -1)/4, b = -e_1/4, from x = sqrt(d) e_1, d = 1,729.
A gradient has noise: one number of 0.01 N(0, 1), the same in every coordinate. A job of worker i
takes 1 + sqrt(i) + |N(0, std sqrt(i + 1))| virtual seconds, drawn for every job. 2,000 of them.

`table` is another replication of the authors' experiment, one run of it; their paper has curves
only. |grad f|^2 at the end differs by a factor of five from one noise to another. So every row is
the mean over several runs of the clock, each of them with several noises side by side: which
gradient counts when does not depend on them, so they share its events, jobs and delays. Where no
gradient is stale, the mean over all noises is known (`exact`): the quadratic is linear.

"m-Sync": the first 6 gradients of 6 workers, one of each; then all begin anew.

    python benchmarks/ringmaster.py [--quick] [--json FILE] [--rows NAME ...]

FILE keeps what it holds of other rows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
from torch import Tensor
from torch.optim import SGD

from offbeat.algorithms import ASGD, RennalaSGD, RingmasterASGD
from offbeat.algorithms.ringmaster import NotTooLate
from offbeat.asynchronous import Asynchronous
from offbeat.lab import crowd
from offbeat.rounds import Enough, Judge, Ticket, Verdict

WORKERS = 6174
DIMENSIONS = 1729
UNTIL_S = 2000.0
NOISE = 0.01
REAL = torch.float64


class InTime(NotTooLate):
    """Ringmaster ASGD that stops only those whose new gradient would come in time.

    That is, those of whom a job takes at most 1.5 times as long as R updates do, on average; a
    worker that has finished no job is not stopped.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit, stops=True)
        self._now_s = [0.0] * size  # when each worker came last: its tickets add up to that
        self._jobs = [(0, 0.0)] * size  # that nobody has stopped: how many, and their seconds
        self._stopped = set[int]()

    def judge(self, ticket: Ticket) -> Verdict:
        worker = ticket.worker
        self._now_s[worker] += ticket.seconds
        if worker not in self._stopped:
            count, total_s = self._jobs[worker]
            self._jobs[worker] = (count + 1, total_s + ticket.seconds)
        self._stopped.discard(worker)
        verdict = super().judge(ticket)
        limit_s = 1.5 * self.limit * self._now_s[worker] / max(self.version, 1)
        stopped = [each for each in verdict.stopped if self._takes_s(each) <= limit_s]
        self._stopped.update(stopped)
        return replace(verdict, stopped=stopped)

    def _takes_s(self, worker: int) -> float:
        count, total_s = self._jobs[worker]
        return total_s / count if count else math.inf


@dataclass(frozen=True)
class Row:
    """A method, how it is run, and what the other replication has."""

    name: str
    make: Callable[[], Asynchronous | Judge]
    lr: float
    clocks: int
    noises: int
    table: tuple[int, float, float] | None
    batch: int = 0
    """Gradients of the same point in an update, if none is stale."""


ROWS = [
    Row("Ringmaster B, lr 0.25", lambda: RingmasterASGD(6, "expired"), 0.25, 4, 16,
        (2992, 3.74e-3, 1.08e-5)),
    Row("Ringmaster B, lr 0.20", lambda: RingmasterASGD(6, "expired"), 0.20, 4, 16,
        (2992, 4.37e-3, 1.11e-5)),
    Row("Ringmaster A", lambda: RingmasterASGD(6, "never"), 0.25, 1, 16,
        (2820, 6.86e-3, 1.53e-5)),
    Row("Rennala", lambda: RennalaSGD(6), 1.0, 3, 16, (467, 4.81e-3, 1.44e-5), 6),
    Row("m-Sync", lambda: Enough(WORKERS, gradients=6, workers=6, once=True), 1.0, 3, 16,
        (432, 5.40e-3, 1.61e-5), 6),
    Row("Delay-Adaptive", lambda: ASGD(delay_adaptive=True), 3.2e-4, 1, 1,
        (166_033, 7.03e-2, 2.41e-3)),
    Row("Ringmaster, stop if in time", lambda: InTime(WORKERS, 6), 0.25, 4, 16, None),
    Row("Ringmaster, stop if longer", lambda: RingmasterASGD(6, "longer"), 0.25, 1, 16, None),
]  # fmt: skip


def gradient_of(point: Tensor) -> Tensor:
    """Ax - b, of several points at once."""
    found = 0.5 * point
    found[:, 1:] -= 0.25 * point[:, :-1]
    found[:, :-1] -= 0.25 * point[:, 1:]
    found[:, 0] += 0.25
    return found


def gaps_and_squares(point: Tensor) -> tuple[list[float], list[float]]:
    """f - f* and |grad f|^2, of several points at once."""
    gradient = gradient_of(point)
    product = gradient.clone()
    product[:, 0] -= 0.25  # Ax
    value = 0.5 * (point * product).sum(1) + 0.25 * point[:, 0]
    least = -0.125 * DIMENSIONS / (DIMENSIONS + 1)
    return (value - least).tolist(), gradient.square().sum(1).tolist()


def exact(lr: float, updates: int, batch: int) -> tuple[float, float]:
    """The means of f - f* and |grad f|^2 over all noises, where no gradient is stale."""
    k = torch.arange(1, DIMENSIONS + 1, dtype=REAL)
    eigenvalues = 0.5 - 0.5 * torch.cos(math.pi * k / (DIMENSIONS + 1))
    vectors = math.sqrt(2 / (DIMENSIONS + 1)) * torch.sin(
        math.pi * torch.outer(k, k) / (DIMENSIONS + 1)
    )
    start = vectors @ gradient_of(start_of(1))[0]
    pushes = NOISE**2 / batch * vectors.sum(1).square()
    shrinks = (1 - lr * eigenvalues) ** 2
    left = shrinks**updates
    noise = lr**2 * eigenvalues**2 * pushes * (1 - left) / (1 - shrinks)
    squares = left * start.square() + noise
    return (squares / eigenvalues / 2).sum().item(), squares.sum().item()


def start_of(noises: int) -> Tensor:
    """Where it begins, as often as there are noises."""
    start = torch.zeros(noises, DIMENSIONS, dtype=REAL)
    start[:, 0] = math.sqrt(DIMENSIONS)
    return start


def job_seconds(clock: int) -> tuple[Callable[[Tensor, Tensor], Tensor], list[float]]:
    """What jobs take, drawn for this clock, and by worker what is expected of one."""
    times = torch.Generator().manual_seed(2 * clock)
    least_s = 1 + torch.arange(WORKERS, dtype=REAL).sqrt()
    spread_s = (1 + torch.arange(WORKERS, dtype=REAL)).sqrt()

    def seconds(workers: Tensor, jobs: Tensor) -> Tensor:
        drawn = torch.randn(len(workers), generator=times, dtype=REAL)
        return least_s[workers] + spread_s[workers] * drawn.abs_()

    return seconds, (least_s + math.sqrt(2 / math.pi) * spread_s).tolist()


def run(row: Row, clock: int, until_s: float) -> dict[str, Any]:
    """One course of events, with several noises on it."""
    seconds, expected_s = job_seconds(clock)
    noise = torch.Generator().manual_seed(2 * clock + 1)

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        drawn = torch.randn(row.noises, 1, generator=noise, dtype=REAL)
        return gradient_of(point).add_(drawn, alpha=NOISE)

    began = time.perf_counter()
    found = crowd.run(
        row.make(), start_of(row.noises), gradient, lambda x: SGD(x, lr=row.lr),
        workers=WORKERS, seconds=seconds, until_s=until_s,
        expected_s=expected_s,
    )  # fmt: skip
    took_s = time.perf_counter() - began
    gaps, squares = gaps_and_squares(found.point)
    return {
        "updates": found.updates, "gaps": gaps, "squares": squares, "seconds": took_s,
        "stopped": found.stopped, "models": found.models, "dropped": found.dropped,
        "largest_delay": found.largest_delay,
    }  # fmt: skip


def measured(row: Row, quick: bool) -> dict[str, Any]:
    """The means of a row's runs, with their spread."""
    runs = [
        run(row, clock, 100.0 if quick else UNTIL_S)
        for clock in range(row.clocks)[: 1 if quick else None]
    ]
    gaps, squares = ([each for run in runs for each in run[key]] for key in ("gaps", "squares"))
    figures = {
        "method": row.name,
        "workers": WORKERS,
        "lr": row.lr,
        "updates": statistics.fmean(run["updates"] for run in runs),
        "gap": statistics.fmean(gaps),
        "grad_norm2": statistics.fmean(squares),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "updates_of_each": [run["updates"] for run in runs],
        "grad_norm2_range": [min(squares), max(squares)],
        "grad_norm2_error": _error(squares),
        **{
            key: statistics.fmean(run[key] for run in runs)
            for key in ("stopped", "models", "dropped")
        },
        "largest_delay": max(run["largest_delay"] for run in runs),
        "clocks": len(runs),
        "noises": row.noises,
    }
    if row.table is not None and not quick:
        figures["table"] = dict(zip(("updates", "gap", "grad_norm2"), row.table, strict=True))
    if row.batch:
        gap, square = exact(row.lr, round(figures["updates"]), row.batch)
        figures["exact"] = {"gap": gap, "grad_norm2": square}
    return figures


def _error(values: list[float]) -> float | None:
    return None if len(values) < 2 else statistics.stdev(values) / math.sqrt(len(values))


def _say(row: dict[str, Any]) -> None:
    table = row.get("table", {})
    beside = {key: row[key] / table[key] - 1 for key in table}
    print(
        f"{row['method']:27s} {row['updates']:9.1f} updates  gap {row['gap']:.2e}  "
        f"|grad f|^2 {row['grad_norm2']:.2e}  "
        f"{row['models'] / row['updates']:7.1f} models an update  "
        f"{row['seconds']:5.1f} s on the wall"
        + "".join(f"  {key} {share:+.1%}" for key, share in beside.items()),
        flush=True,
    )


def main() -> None:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", nargs="*", help="only those whose name has one of these in it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in ROWS:
        if asked.rows is None or any(part in row.name for part in asked.rows):
            rows.append(measured(row, asked.quick))
            _say(rows[-1])
            until_s = 100.0 if asked.quick else UNTIL_S
            mine = {each["method"] for each in rows}
            kept = [each for each in common.held(asked.json) if each["method"] not in mine]
            common.write(asked.json, {"until_s": until_s, "rows": kept + rows})


if __name__ == "__main__":
    main()
