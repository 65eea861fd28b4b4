"""Virtual time until the squared gradient is epsilon, beside the least time that theory allows.

1,000 workers and a server; a gradient of worker i takes 1, sqrt(i), i or i^2 seconds, always.

    f(x, y) = (mu x^2 + L |y|^2) / 2,   L = 1, mu = 1/20, y of 512 dimensions

from y = 0 and x so far away that the squared gradient is 10 epsilon. Gradients have normal noise in
all directions alike, of a variance sigma^2 = 100 epsilon: S = 100. Both limits of the theory bind
here. All of the distance lies in the flat direction, so it takes some 30 / (L lr) updates. Nearly all
noise is in the steep ones, where one gradient at a time with a step of lr leaves a squared gradient
of lr L sigma^2 / 2, and gradients that are stale by R updates diverge unless lr L R is about 1 or
less. L Delta / epsilon is 100.

Terms, the same for all, fixed before any result:
- lr is c times what theory has it grow with: min(1, B/S) for a mean of B fresh gradients, 1/max(R, S)
  for single ones that are stale by fewer than R, 1/max(n, S) for plain asynchronous SGD. c starts
  at 1, and goes up or down by factors of 2 while that is faster.
- What a method has to be told (B, m, R) is the best of a grid around what theory says, each with
  its own c. "the paper's R" is sigma^2 / epsilon.
- R chosen online: from the noise scale that applied gradients show, lr = c / R.
- Choices are made with one seed for noise; figures are medians of three others.
- A run is over at the first update at which the squared gradient, without noise, is at most epsilon;
  where every gradient is an update, every 10th is looked at.

    python benchmarks/time_to_epsilon.py [--quick] [--json FILE] [--profiles NAME ...]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
from torch import Tensor
from torch.optim import SGD

from offbeat.algorithms import ASGD, RennalaSGD, RingmasterASGD
from offbeat.asynchronous import Asynchronous
from offbeat.lab import crowd
from offbeat.rounds import Enough, Judge

WORKERS = 1000
S = 100.0  # sigma^2 / epsilon; epsilon is 1, and so is L
FLAT = 1 / 20
STEEP_DIMENSIONS = 512
FIRST_SQUARE = 10.0
LOOK_EVERY = 10
MOST_UPDATES = 200_000
TUNING_SEED, SEEDS = 0, (1, 2, 3)

PROFILES: dict[str, Callable[[int], float]] = {
    "1": lambda i: 1.0,
    "sqrt(i)": math.sqrt,
    "i": float,
    "i^2": lambda i: float(i * i),
}
CURVATURES = torch.tensor([FLAT] + [1.0] * STEEP_DIMENSIONS)
START = torch.tensor([math.sqrt(FIRST_SQUARE) / FLAT] + [0.0] * STEEP_DIMENSIONS)
DIFFICULTY = 0.5 * FLAT * START[0].item() ** 2  # L Delta / epsilon


@dataclass(frozen=True)
class Contestant:
    """A method with its settings, and the learning rate that theory has it grow with."""

    method: str
    setting: int | None
    make: Callable[[], Asynchronous | Judge]
    lr: float
    every_gradient: bool = False
    """Whether every gradient that counts is an update."""


@dataclass(frozen=True)
class Reached:
    """How long it took, if it got there."""

    seconds: float = math.inf
    updates: int = 0
    gradients: int = 0
    models: int = 0
    c: float = 1.0


def run(who: Contestant, tau: list[float], c: float, seed: int, until_s: float) -> Reached:
    """One run to epsilon, given up after `until_s` or when it diverges."""
    times = torch.tensor(tau, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    size = math.sqrt(S / len(START))
    looked, reached = 0, False

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        return (CURVATURES * point).add_(torch.randn(len(point), generator=draw), alpha=size)

    def done(point: Tensor) -> bool:
        nonlocal looked, reached
        looked += 1
        if who.every_gradient and looked % LOOK_EVERY:
            return False
        square = (CURVATURES * point).square_().sum().item()
        reached = square <= 1.0
        return reached or not square < 100 * FIRST_SQUARE

    found = crowd.run(
        who.make(),
        START,
        gradient,
        lambda x: SGD(x, lr=c * who.lr),
        workers=len(tau),
        seconds=lambda workers, jobs: times[workers],
        until_s=until_s,
        updates=MOST_UPDATES,
        done=done,
    )
    if not reached:
        return Reached()
    return Reached(found.seconds, found.updates, found.gradients, found.models, c)


def tuned(who: Contestant, tau: list[float], until_s: float = math.inf) -> Reached:
    """With the best c: from 1 on, up or down by factors of 2 while that is faster."""
    best = run(who, tau, 1.0, TUNING_SEED, until_s)
    for factor in (2.0, 0.5):
        while True:
            limit_s = min(best.seconds, until_s)
            other = run(who, tau, best.c * factor, TUNING_SEED, limit_s)
            if other.seconds >= best.seconds:
                break
            best = other
    return best


# --- who takes part ------------------------------------------------------------------------


def of_batches(n: int, batch: int) -> Contestant:
    return Contestant("Rennala", batch, lambda: RennalaSGD(batch), min(1.0, batch / S))


def of_m(n: int, m: int) -> Contestant:
    def make() -> Judge:
        return Enough(n, gradients=m, workers=m, once=True)

    return Contestant("m-sync", m, make, min(1.0, m / S))


def topped_up(tau: list[float], m: int) -> Contestant:
    gradients = sum(math.floor(tau[m - 1] / each) for each in tau[:m])

    def make() -> Judge:
        return Enough(len(tau), workers=m)

    return Contestant("m-sync, topped up", m, make, min(1.0, gradients / S))


def of_limit(limit: int) -> Contestant:
    def make() -> Asynchronous:
        return RingmasterASGD(limit, "expired")

    return Contestant("Ringmaster", limit, make, 1 / max(limit, S), every_gradient=True)


def everybody(tau: list[float], quick: bool) -> dict[str, list[Contestant]]:
    """The grids, by name of the row."""
    n = len(tau)
    ms = sorted({m for m in (1, 2, 4, 8, 16, 32, 64, 100, 200, 500, n) if m <= n})
    grids = {
        "Rennala": [of_batches(n, batch) for batch in (25, 50, 100, 200)],
        "Ringmaster, best R": [of_limit(limit) for limit in (12, 25, 50, 100, 200, 400)],
        "Ringmaster, the paper's R": [of_limit(math.ceil(S))],
        "m-sync, best m": [of_m(n, m) for m in ms if tau[m - 1] * (1 + S / m) < 4 * _m_sync(tau)],
        "m-sync, topped up, best m": [
            topped_up(tau, m) for m in ms if tau[m - 1] < 8 * optimal(tau)
        ],
        "sync": [replace(of_m(n, n), method="sync")],
        "ASGD": [Contestant("ASGD", None, ASGD, 1 / max(n, S), every_gradient=True)],
    }
    if quick:
        grids = {name: grid[len(grid) // 2 :][:1] for name, grid in grids.items()}
    return grids


def optimal(tau: list[float], noise: float = S) -> float:
    """T_opt."""
    speed, best = 0.0, math.inf
    for m, each in enumerate(tau, start=1):
        speed += 1 / each
        best = min(best, (m + noise) / speed)
    return best


def _m_sync(tau: list[float]) -> float:
    return min(each * (1 + S / m) for m, each in enumerate(tau, start=1))


def theory(tau: list[float]) -> dict[str, float]:
    """The table, in units of L Delta / epsilon."""
    n = len(tau)
    mean = n / sum(1 / each for each in tau)
    best = optimal(tau)
    return {
        "Rennala": best,
        "Ringmaster, best R": best,
        "Ringmaster, the paper's R": best,
        "Ringmaster, R online": best,
        "m-sync, best m": _m_sync(tau),
        "sync": tau[-1] * (1 + S / n),
        "ASGD": mean * (1 + S / n),
    }


# --- the table -----------------------------------------------------------------------------


def measured(name: str, grid: list[Contestant], tau: list[float]) -> dict[str, Any]:
    """The best of a grid, and how long it takes with other seeds."""
    best, chosen = Reached(), grid[0]
    for who in grid:
        found = tuned(who, tau, best.seconds)
        if found.seconds < best.seconds:
            best, chosen = found, who
    runs = [run(chosen, tau, best.c, seed, 20 * best.seconds) for seed in SEEDS]
    seconds = statistics.median(each.seconds for each in runs)
    unit_s = optimal(tau) * DIFFICULTY
    least = theory(tau).get(name)
    return {
        "method": name,
        "setting": chosen.setting,
        "c": best.c,
        "lr": best.c * chosen.lr,
        "seconds": seconds,
        "seconds_of_each": [each.seconds for each in runs],
        "over_optimal": seconds / unit_s,
        "theory_over_optimal": None if least is None else least / optimal(tau),
        "updates": statistics.median(each.updates for each in runs),
        "gradients": statistics.median(each.gradients for each in runs),
        "models": statistics.median(each.models for each in runs),
    }


def main() -> None:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--profiles", nargs="*", choices=list(PROFILES), default=list(PROFILES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    n, rows = 100 if asked.quick else WORKERS, []
    for profile in asked.profiles:
        tau = [PROFILES[profile](i) for i in range(1, n + 1)]
        for name, grid in everybody(tau, asked.quick).items():
            row = {"profile": profile, "workers": n, **measured(name, grid, tau)}
            rows.append(row)
            theirs = row["theory_over_optimal"]
            print(
                f"{profile:8s} {name:28s} {row['setting'] or '':>5} c {row['c']:<5g} "
                f"{row['seconds']:12.2f} s  {row['over_optimal']:8.3f} of T_opt"
                + ("" if theirs is None else f"  theory {theirs:.3f}"),
                flush=True,
            )
            common.write(asked.json, {"S": S, "difficulty": DIFFICULTY, "rows": rows})


if __name__ == "__main__":
    main()
