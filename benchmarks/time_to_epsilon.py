"""Virtual time until the squared gradient is epsilon, beside the least time that theory allows.

1,000 workers and a server; a gradient of worker i takes 1, sqrt(i), i or i^2 seconds, always.

    f(x, y) = (mu x^2 + L |y|^2) / 2,   L = 1, mu = 1/20, y of 256 dimensions

from y = 0 and x so far away that the squared gradient is 10 epsilon. Gradients have normal noise in
all directions alike, of a variance sigma^2 = 100 epsilon: S = 100. Both limits of the theory bind.
All of the distance lies in the flat direction, so it takes some 30 / (L lr) updates. Nearly all
noise is in the steep ones, where one gradient at a time with a step of lr leaves a squared gradient
of lr L sigma^2 / 2, and gradients that are stale by R updates diverge unless lr L R is about 1 or
less. L Delta / epsilon is 100.

Terms, the same for all, fixed before any result:
- lr is c times what theory has it grow with: min(1, B/S) for a mean of B fresh gradients,
  1/max(R, S) for single ones that are stale by fewer than R, 1/max(n, S) for plain asynchronous
  SGD. c is the fastest of 1/4, 1/2, 1 and 2.
- What a method has to be told (B, m, R) is the fastest of a grid around what theory says, each with
  its own c. "the paper's R" is sigma^2 / epsilon.
- R chosen online: S at the point that is reached, by `UsefulGradients` from the noise scale that
  applied gradients show (`NoiseStream`), between 1 and n, from n on. R is that S; or, "by speeds",
  sqrt(m S), m the number of workers with which T_opt is reached, of those that have come, by the
  shortest time that each has taken. lr = c / max(R, S).
- Choices are made with one seed for noise; figures are medians of two others.
- A run is over at the first update at which the squared gradient, without noise, is at most
  epsilon; where every gradient is an update, every 10th is looked at.

When gradients come does not depend on noise or lr, unless R does. So a run holds all seeds and all
values of c side by side, on one course of events, until the fastest c is there with all seeds.

    python benchmarks/time_to_epsilon.py [--quick] [--json FILE] [--profiles NAME ...] [--rows NAME]

FILE keeps what it holds of other profiles and rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor
from torch.optim import SGD

from offbeat import theory
from offbeat.algorithms import ASGD, RennalaSGD, RingmasterASGD
from offbeat.algorithms.ringmaster import NotTooLate
from offbeat.asynchronous import Asynchronous
from offbeat.lab import crowd
from offbeat.noise_choice import UsefulGradients
from offbeat.noise_stream import NoiseStream
from offbeat.rounds import Enough, Judge, Ticket, Verdict

WORKERS = 1000
S = 100.0  # sigma^2 / epsilon; epsilon is 1, and so is L
FLAT = 1 / 20
STEEP_DIMENSIONS = 256
FIRST_SQUARE = 10.0
LOOK_EVERY = 10
SEEDS = 3  # the first is for choices
STEPS = (1 / 4, 1 / 2, 1.0, 2.0)

PROFILES: dict[str, Callable[[int], float]] = {
    "1": lambda i: 1.0,
    "sqrt(i)": math.sqrt,
    "i": float,
    "i^2": lambda i: float(i * i),
}
CURVATURES = torch.tensor([FLAT] + [1.0] * STEEP_DIMENSIONS)
START = torch.tensor([math.sqrt(FIRST_SQUARE) / FLAT] + [0.0] * STEEP_DIMENSIONS)
NOISE = math.sqrt(S / len(START))
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
    """When the fastest c got there, with each seed; the last run's figures."""

    c: float = 1.0
    seconds: tuple[float, ...] = (math.inf,)
    updates: int = 0
    gradients: int = 0
    models: int = 0


class Race:
    """Points side by side, by c and seed, on one course of events; and who is there when."""

    def __init__(self, steps: Sequence[float], seeds: Sequence[int], look_every: int) -> None:
        self.steps = torch.tensor(steps).view(-1, 1, 1)
        self.start = START.repeat(len(steps), len(seeds), 1)
        self._noises = len(seeds)
        self._draw = torch.Generator().manual_seed(seeds[0])
        self._look_every = look_every
        self._updates = 0
        self.there = torch.full(self.start.shape[:2], math.inf)  # after how many updates
        self.winner: int | None = None

    def gradient(self, point: Tensor, worker: int, job: int) -> Tensor:
        noise = torch.randn(self._noises, len(START), generator=self._draw)
        return (CURVATURES * point).add_(noise, alpha=NOISE).mul_(self.steps)

    def done(self, point: Tensor) -> bool:
        """Whether the fastest c for the first seed is there with all others, too."""
        self._updates += 1
        if self._updates % self._look_every:
            return False
        square = (CURVATURES * point).square_().sum(2)
        new = (square <= 1.0) & (self.there == math.inf)
        self.there[new] = float(self._updates)
        if self.winner is None and new[:, 0].any():
            self.winner = int(new[:, 0].nonzero()[-1])
        if self.winner is None:
            return not bool((square[:, 0] < 100 * FIRST_SQUARE).any())  # all have diverged
        return bool((self.there[self.winner] < math.inf).all())


def run(who: Contestant, tau: list[float], until_s: float) -> Reached:
    """One course of events, given up if the first seed is not there by `until_s`."""
    race = Race(STEPS, range(SEEDS), LOOK_EVERY if who.every_gradient else 1)

    def go(until_s: float) -> crowd.Outcome:
        return crowd.run(
            who.make(),
            race.start,
            race.gradient,
            lambda x: SGD(x, lr=who.lr),
            seconds=tau,
            workers=len(tau),
            until_s=until_s,
            updates=4 * 30 / who.lr / min(STEPS),
            done=race.done,
            moments=True,
        )

    found = go(until_s)
    if race.winner is None:
        return Reached()
    seconds = [
        found.moments_s[int(each) - 1] if each < math.inf else math.inf
        for each in race.there[race.winner].tolist()
    ]
    return Reached(STEPS[race.winner], tuple(seconds), found.updates, found.gradients, found.models)


def run_online(c: float, tau: list[float], seed: int, until_s: float, by_speeds: bool) -> Reached:
    """R from the noise that gradients show: each run has its own course of events."""
    race = Race([c], [seed], LOOK_EVERY)
    stream = NoiseStream()
    judge = Online(len(tau), by_speeds)

    def watch(judge_: Judge, gradient: Tensor, ticket: Ticket, verdict: Verdict) -> None:
        stream.add(gradient / c)
        judge.hear(stream)

    found = crowd.run(
        judge,
        race.start,
        race.gradient,
        lambda x: SGD(x, lr=1.0),
        seconds=tau,
        workers=len(tau),
        until_s=until_s,
        updates=8 * 30 * len(tau) / c,
        done=race.done,
        watch=watch,
    )
    seconds = found.seconds if race.winner is not None else math.inf
    return Reached(c, (seconds,), found.updates, found.gradients, found.models)


class Online(NotTooLate):
    """R as many gradients as are of use, by what is measured; or what follows by speeds."""

    def __init__(self, size: int, by_speeds: bool) -> None:
        super().__init__(size, "auto", stops=True)
        self._choice = UsefulGradients(most=size)
        self._by_speeds = by_speeds
        self._useful = size

    def hear(self, stream: NoiseStream) -> None:
        """Choose R anew, from all that was applied."""
        self._useful = self._choice(stream.measured)
        if self._by_speeds:
            self.learn(self._useful)
        else:
            self.limit = self._useful

    def judge(self, ticket: Ticket) -> Verdict:
        return replace(super().judge(ticket), scale=1 / max(self.limit, self._useful))


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
    ms = sorted({m for m in (1, 2, 4, 8, 16, 32, 100, 300, n) if m <= n})
    grids = {
        "Rennala": [of_batches(n, batch) for batch in (100, 50, 200, 400)],
        "Ringmaster, best R": [of_limit(limit) for limit in (100, 50, 200, 25, 400, 12, n)],
        "Ringmaster, the paper's R": [of_limit(math.ceil(S))],
        "m-sync, best m": [
            of_m(n, m) for m in ms if tau[m - 1] * (1 + S / m) < 4 * theory.m_sync_time(tau, S)
        ],
        "m-sync, topped up, best m": [
            topped_up(tau, m) for m in ms if tau[m - 1] < 8 * optimal(tau)
        ],
        "sync": [replace(of_m(n, n), method="sync")],
        "ASGD": [Contestant("ASGD", None, ASGD, 1 / max(n, S), every_gradient=True)],
    }
    if quick:
        grids = {name: grid[:1] for name, grid in grids.items()}
    return grids


def optimal(tau: list[float]) -> float:
    """T_opt."""
    return theory.optimal_time(tau, S).time_s


def bounds(tau: list[float]) -> dict[str, float]:
    """The table, in units of L Delta / epsilon."""
    best = optimal(tau)
    return {
        "Rennala": best,
        "Ringmaster, best R": best,
        "Ringmaster, the paper's R": best,
        "Ringmaster, R online": best,
        "Ringmaster, R online, by speeds": best,
        "m-sync, best m": theory.m_sync_time(tau, S),
        "sync": theory.sync_time(tau, S),
        "ASGD": theory.async_time(tau, S),
    }


# --- the table -----------------------------------------------------------------------------


def measured(name: str, grid: list[Contestant], tau: list[float]) -> dict[str, Any]:
    """The best of a grid, and how long it takes with other seeds."""
    best, chosen = Reached(), grid[0]
    for who in grid:
        # Some more than the fastest so far: the other seeds of a faster one may be slower.
        found = run(who, tau, 1.2 * best.seconds[0])
        if found.seconds[0] < best.seconds[0]:
            best, chosen = found, who
    return _row(name, best, chosen.setting, best.c * chosen.lr, tau)


def measured_online(name: str, by_speeds: bool, tau: list[float]) -> dict[str, Any]:
    """The best c, and how long it takes with other seeds."""
    best = Reached()
    for c in (1.0, 0.5, 2.0, 0.25):
        until_s = min(best.seconds[0], optimal(tau) * DIFFICULTY)  # else it is given up
        found = run_online(c, tau, 0, until_s, by_speeds)
        if found.seconds[0] < best.seconds[0]:
            best = found
    runs = [run_online(best.c, tau, seed, math.inf, by_speeds) for seed in range(1, SEEDS)]
    seconds = (best.seconds[0], *(each.seconds[0] for each in runs))
    return _row(name, replace(runs[0], seconds=seconds), None, None, tau)


def _row(
    name: str, best: Reached, setting: int | None, lr: float | None, tau: list[float]
) -> dict[str, Any]:
    seconds = statistics.median(best.seconds[1:] or (math.inf,))
    unit_s = optimal(tau) * DIFFICULTY
    least = bounds(tau).get(name)
    return {
        "method": name,
        "setting": setting,
        "c": best.c,
        "lr": lr,
        "seconds": seconds,
        "seconds_of_each": best.seconds[1:],
        "over_optimal": seconds / unit_s,
        "theory_over_optimal": None if least is None else least / optimal(tau),
        "updates": best.updates,
        "gradients": best.gradients,
        "models": best.models,
    }


def main() -> None:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", help="only those whose name has this in it")
    parser.add_argument("--profiles", nargs="*", choices=list(PROFILES), default=list(PROFILES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    n, rows = 100 if asked.quick else WORKERS, []
    for profile in asked.profiles:
        tau = [PROFILES[profile](i) for i in range(1, n + 1)]
        runs = {
            name: partial(measured, name, grid, tau)
            for name, grid in everybody(tau, asked.quick).items()
        }
        for name, by_speeds in (("R online", False), ("R online, by speeds", True)):
            name = f"Ringmaster, {name}"
            runs[name] = partial(measured_online, name, by_speeds, tau)
        for name, go in runs.items():
            if asked.rows is not None and asked.rows not in name:
                continue
            row = {"profile": profile, "workers": n, **go()}
            rows.append(row)
            theirs = row["theory_over_optimal"]
            print(
                f"{profile:8s} {name:28s} {row['setting'] or '':>5} c {row['c']:<5g} "
                f"{row['seconds']:12.2f} s  {row['over_optimal']:8.3f} of T_opt"
                + ("" if theirs is None else f"  theory {theirs:.3f}"),
                flush=True,
            )
            mine = {(each["profile"], each["method"]) for each in rows}
            held = common.held(asked.json)
            kept = [each for each in held if (each["profile"], each["method"]) not in mine]
            figures = {"S": S, "difficulty": DIFFICULTY, "rows": kept + rows}
            common.write(asked.json, figures)


if __name__ == "__main__":
    main()
