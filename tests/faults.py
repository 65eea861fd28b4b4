"""Runs with faults at random moments, in virtual time: each is drawn from its seed.

Workers are lost, one or two of them, often while the others regroup; they freeze, and come back;
they join while others are lost. What must hold is said where each kind is at home. How many of the
faults have happened is counted, since one that comes when its worker has ended proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import NamedTuple

import test_joining
import test_rejoining
from crashes import STEPS, Lives, Schedule
from test_contract import ALGORITHMS
from test_survival import WORKERS, cluster, lived_through

import offbeat

LATENCIES_S = (1e-5, 1e-3, 0.02, 0.1)


class Faults(NamedTuple):
    """Of one run."""

    drawn: int
    happened: int


@cache
def _surviving() -> list[str]:
    return [name for name in ALGORITHMS if ALGORITHMS[name].make(WORKERS).survives]


@cache
def _span(name: str, latency_s: float) -> tuple[float, float]:
    """When all are attached, and when a run without losses ends."""
    lives = Lives(ALGORITHMS[name].make(WORKERS), STEPS)
    ended = offbeat.run(lives, cluster(latency_s=latency_s))
    return lives.attached_s, ended.seconds


def _moments(draws: Random, latency_s: float, begins_s: float, ends_s: float) -> list[float]:
    """When a worker is lost; and in half of the runs a second one: at once, soon or whenever."""
    first = draws.uniform(begins_s + 1e-6, ends_s)
    if draws.random() < 0.5:
        return [first]
    soon = first + 4 * latency_s * draws.random()
    return [first, draws.choice([first, soon, draws.uniform(first, ends_s)])]


def _few_steps(draws: Random) -> Faults:
    """Two to four workers of any speed, of which some may have nothing to do."""
    schedule = Schedule.drawn(draws.randrange(2**32))
    begins_s = schedule.attached_s
    ends_s = begins_s + schedule.least_s + 8 * schedule.latency_s  # or while all end
    moments = _moments(draws, schedule.latency_s, begins_s, ends_s)[: len(schedule.steps) - 1]
    ranks = draws.sample(range(len(schedule.steps)), len(moments))
    crashes = list(zip(ranks, moments, strict=True))
    return Faults(len(crashes), schedule.lived_with(*crashes))


def _many_steps(draws: Random) -> Faults:
    """All that lost workers had computed is accounted for, too."""
    name, latency_s = draws.choice(_surviving()), draws.choice(LATENCIES_S)
    moments = _moments(draws, latency_s, *_span(name, latency_s))
    crashes = list(zip(draws.sample(range(WORKERS), len(moments)), moments, strict=True))
    lives = Lives(ALGORITHMS[name].make(WORKERS), STEPS)
    return Faults(len(crashes), lived_through(lives, *crashes, latency_s=latency_s))


def _joins(draws: Random) -> Faults:
    return Faults(1, test_joining.drawn(draws.choice(list(test_joining.METHODS)), draws))


def _freezes(draws: Random) -> Faults:
    fates = test_rejoining.drawn(draws.choice(list(test_rejoining.METHODS)), draws)
    return Faults(1, any(fate is None or fate.expelled > 0 for fate in fates))


KINDS: dict[Callable[[Random], Faults], int] = {
    _few_steps: 88,
    _many_steps: 10,
    _joins: 1,
    _freezes: 1,
}
"""What may happen, and how often it is drawn."""


def survived(seed: int) -> Faults:
    """The run of this number; raises unless all holds that must."""
    draws = Random(f"faults {seed}")
    (kind,) = draws.choices(list(KINDS), weights=list(KINDS.values()))
    return kind(draws)
