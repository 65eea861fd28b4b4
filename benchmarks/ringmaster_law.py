"""What one run of ringmaster.py may end with: the law of f - f* and |grad f|^2 over all noises.

The quadratic is linear, and which gradient counts when does not depend on its noise. So for one
course of events the gradient at the end is a Gaussian: in the basis of A's eigenvectors

    g_{k+1} = g_k - lr lambda (g_v + xi_k u),      v the version that update k was computed at,

xi_k one number of N(0, 1) for each update, u the noise in that basis. How much each xi_k is worth
at the end follows by going through the updates backwards. Hence the exact means of a course of
events, and as many runs on it as one likes, each of them as good as a simulated one.

`table` is what ringmaster.py has beside its rows: one run of another replication. `above` is the
share of our runs that end with as much or more, `within` the share of them whose |grad f|^2 is
within 20 % of their own mean: what a single run can be expected to be.

    python benchmarks/ringmaster_law.py [--quick] [--json FILE] [--rows NAME ...]
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import common
import torch
from ringmaster import (
    DIMENSIONS,
    NOISE,
    REAL,
    ROWS,
    UNTIL_S,
    WORKERS,
    Row,
    gradient_of,
    job_seconds,
    start_of,
)
from torch import Tensor
from torch.optim import SGD

from offbeat.lab import crowd
from offbeat.rounds import Judge, Ticket, Verdict

CLOCKS = 2
DRAWS = 2000
"""Runs on each course of events."""


def versions_of(row: Row, clock: int, until_s: float) -> list[int]:
    """By update, the version of the parameters that its gradients were computed at."""
    seconds, expected_s = job_seconds(clock)
    found: list[int] = []

    def watch(judge: Judge, gradient: Tensor, ticket: Ticket, verdict: Verdict) -> None:
        if verdict.update:
            found.append(int(ticket.version))

    nothing = torch.zeros(1)
    crowd.run(
        row.make(), nothing, lambda *_: nothing, lambda x: SGD(x, lr=row.lr), workers=WORKERS,
        seconds=seconds, until_s=until_s, expected_s=expected_s, watch=watch,
    )  # fmt: skip
    return found


class Law:
    """Of the gradient at the end, in the basis of eigenvectors."""

    def __init__(self, lr: float, versions: list[int], batch: int) -> None:
        k = torch.arange(1, DIMENSIONS + 1, dtype=REAL)
        angles = math.pi / (DIMENSIONS + 1)
        self._eigenvalues = 0.5 - 0.5 * torch.cos(angles * k)
        vectors = math.sqrt(2 / (DIMENSIONS + 1)) * torch.sin(angles * torch.outer(k, k))
        shrink = lr * self._eigenvalues
        later: list[list[int]] = [[] for _ in versions]  # by version, the updates computed at it
        for update, version in enumerate(versions):
            later[version].append(update)
        worth = torch.ones(len(versions) + 1, DIMENSIONS, dtype=REAL)  # of g_k, at the end
        for version in reversed(range(len(versions))):
            worth[version] = worth[version + 1]
            for update in later[version]:
                worth[version] -= shrink * worth[update + 1]
        self._mean = worth[0] * (vectors @ gradient_of(start_of(1))[0])
        self._pushes = -shrink * (NOISE / math.sqrt(batch)) * vectors.sum(1) * worth[1:]

    def means(self) -> tuple[float, float]:
        """Of f - f* and |grad f|^2, over all noises."""
        squares = self._mean.square() + self._pushes.square().sum(0)
        return (squares / self._eigenvalues / 2).sum().item(), squares.sum().item()

    def draws(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """The same, of so many runs."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(count, len(self._pushes), generator=generator, dtype=REAL)
        squares = (drawn @ self._pushes + self._mean).square()
        return (squares / self._eigenvalues / 2).sum(1), squares.sum(1)


def measured(row: Row, quick: bool) -> dict[str, Any]:
    """The law of a row, over several clocks."""
    means, gaps, squares, updates = [], [], [], []
    for clock in range(1 if quick else CLOCKS):
        versions = versions_of(row, clock, 100.0 if quick else UNTIL_S)
        law = Law(row.lr, versions, row.batch or 1)
        gap, square = law.draws(100 if quick else DRAWS, clock)
        updates.append(len(versions))
        means.append(law.means())
        gaps.append(gap)
        squares.append(square)
    gap, square = (statistics.fmean(each) for each in zip(*means, strict=True))
    all_gaps, all_squares = torch.cat(gaps), torch.cat(squares)
    found: dict[str, Any] = {
        "method": row.name,
        "updates": updates,
        "exact": {"gap": gap, "grad_norm2": square},
        "exact_grad_norm2_of_each": [each for _, each in means],
        "gap": _quantiles(all_gaps),
        "grad_norm2": _quantiles(all_squares),
        "within": _share((all_squares / square - 1).abs() <= 0.2),
    }
    if row.table is not None and not quick:
        _, table_gap, table_square = row.table
        found["table"] = {"gap": table_gap, "grad_norm2": table_square}
        found["above"] = {
            "gap": _share(all_gaps >= table_gap),
            "grad_norm2": _share(all_squares >= table_square),
        }
    return found


def _quantiles(values: Tensor) -> dict[str, float]:
    return {f"{q:.0%}": values.quantile(q).item() for q in (0.05, 0.5, 0.95)}


def _share(which: Tensor) -> float:
    return which.double().mean().item()


def _say(row: dict[str, Any]) -> None:
    square = row["grad_norm2"]
    print(
        f"{row['method']:27s} {statistics.fmean(row['updates']):7.1f} updates  |grad f|^2 "
        f"{row['exact']['grad_norm2']:.2e} ({square['5%']:.2e} to {square['95%']:.2e})  "
        f"within 20 %: {row['within']:.0%}  above the table: "
        + ", ".join(f"{key} {share:.1%}" for key, share in row.get("above", {}).items()),
        flush=True,
    )


def main() -> None:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", nargs="*", help="only those whose name has one of these in it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for row in ROWS:
        if row.table is None or row.name == "Delay-Adaptive":  # whose learning rate changes
            continue
        if asked.rows is None or any(part in row.name for part in asked.rows):
            rows.append(measured(row, asked.quick))
            _say(rows[-1])
            common.write(asked.json, {"clocks": CLOCKS, "draws": DRAWS, "rows": rows})


if __name__ == "__main__":
    main()
