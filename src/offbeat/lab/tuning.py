"""Fair learning rates: every contestant gets the best of the same few, before it races.

Global batches differ: a round of one algorithm holds a micro-batch of each worker, that of another
several, so no learning rate suits them all. The grid is one of factors of the task's own rate. Each
factor gets one run in virtual time on the race's cluster, with a seed that does not race. The best
is the first to reach the target; if none does, the one with the best score in the end. A run is
given up when another factor has been faster, and one that diverges has lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from offbeat.errors import NonFiniteGradientError
from offbeat.lab.goals import Target
from offbeat.lab.train import WorkerFailed
from offbeat.lab.watching import Outcome

SEED = 1_000_000
"""A race has its seeds below."""

Trial = Callable[[float, float], list[Outcome]]
"""Runs with a factor, for at most so many seconds."""


def parse_rates(text: str) -> tuple[float, ...]:
    """Read `0.5,1,2`; ValueError for what is no list of factors."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates must be factors such as 0.5,1,2, got {text!r}")
    return rates


def best_rate(rates: Sequence[float], target: Target | None, trial: Trial) -> tuple[float, str]:
    """Return the best factor, and in words what came of each."""
    if len(rates) == 1 or target is None:
        return rates[0], ""
    found: dict[float, tuple[float, float]] = {}
    words = []
    limit_s = math.inf
    for rate in rates:
        try:
            outcomes = trial(rate, limit_s)
        except WorkerFailed as failure:
            diverged = isinstance(failure.__cause__, NonFiniteGradientError)
            found[rate] = (math.inf, math.inf)
            words.append(f"×{rate:g} {'diverged' if diverged else 'failed'}")
            continue
        reached_s, score = judged(outcomes[0], target)
        found[rate] = (reached_s, score)
        if reached_s < math.inf:
            words.append(f"×{rate:g} {reached_s:.1f}")
        else:
            words.append(f"×{rate:g} {'slower' if limit_s < math.inf else 'not reached'}")
        limit_s = min(limit_s, reached_s)
    return min(rates, key=found.__getitem__), ", ".join(words)


def judged(first: Outcome, target: Target) -> tuple[float, float]:
    """Return when worker 0 saw the target reached, and its score in the end: the lower, the better.

    Either is infinite where there is none.
    """
    reached = (
        line["at_s"] for line in first.evaluations if target.reached(line["loss"], line["accuracy"])
    )
    last = first.evaluations[-1]
    score = last["loss"] if target.metric == "loss" else -(last["accuracy"] or 0.0)
    return next(reached, math.inf), score if math.isfinite(last["loss"]) else math.inf
