"""Theory as code: the table and the statements of the papers, to the digits printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest

from offbeat.theory import best_m, rounds_cost


@pytest.mark.parametrize(
    ("tau", "best", "cost"),
    [
        (lambda i: 1.0, 1000, 1.1),
        (lambda i: math.sqrt(i), 100, 20.0),
        (lambda i: float(i), 1, 101.0),
        (lambda i: float(i * i), 1, 101.0),
    ],
)
def test_the_best_m_and_its_cost_are_those_of_the_table(
    tau: Callable[[int], float], best: int, cost: float
) -> None:
    seconds = [tau(i) for i in range(1, 1001)]
    Random(0).shuffle(seconds)
    assert best_m(seconds, noise=100.0) == best
    assert min(rounds_cost(seconds, noise=100.0)) == pytest.approx(cost, rel=1e-12)
    assert rounds_cost(seconds, noise=100.0)[-1] == pytest.approx(tau(1000) * 1.1)


def _optimal(seconds: Sequence[float], noise: float) -> float:
    """What any method needs at least: min over m of (m + S) / (1/tau_1 + ... + 1/tau_m)."""
    speed, costs = 0.0, []
    for m, time_s in enumerate(sorted(seconds), start=1):
        speed += 1 / time_s
        costs.append((m + noise) / speed)
    return min(costs)


def _harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def test_the_best_m_is_within_the_harmonic_number_of_the_optimum() -> None:
    draw = Random(1)
    for _ in range(2000):
        n, noise = draw.randint(1, 40), 10 ** draw.uniform(-2, 4)
        spread = draw.uniform(0, 3)
        seconds = [math.exp(spread * draw.gauss(0, 1)) for _ in range(n)]
        ratio = min(rounds_cost(seconds, noise)) / _optimal(seconds, noise)
        assert 1 - 1e-12 <= ratio <= _harmonic(n) * (1 + 1e-12)


@pytest.mark.parametrize(("n", "ratio"), [(1, 1.0), (10, 1.96), (100, 3.34), (1000, 5.08)])
def test_there_are_workers_for_whom_the_best_m_is_far_from_the_optimum(
    n: int, ratio: float
) -> None:
    seconds = [i / (i + n) for i in range(1, n + 1)]
    found = min(rounds_cost(seconds, noise=n)) / _optimal(seconds, noise=n)
    assert found == pytest.approx(ratio, abs=0.005)
    assert found <= _harmonic(n)


@pytest.mark.parametrize(
    ("tau", "cost"),
    [
        (lambda i: 1.0, 1.1),
        (lambda i: math.sqrt(i), 10.7318),
        (lambda i: float(i), 32.5244),
        (lambda i: float(i * i), 70.7074),
    ],
)
def test_the_optimum_of_these_tests_is_that_of_the_table(
    tau: Callable[[int], float], cost: float
) -> None:
    seconds = [tau(i) for i in range(1, 1001)]
    assert _optimal(seconds, noise=100.0) == pytest.approx(cost, abs=5e-5)
