"""The gradient-noise scale, against quadratics whose gradient and noise are known."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, nan

import pytest
import torch

from offbeat.averages import Average
from offbeat.noise_scale import NoiseScale

pytestmark = pytest.mark.slow

SEEDS = range(20)


def measured(
    noise: float,
    seed: int,
    rounds: int = 300,
    batches: Callable[[torch.Generator], list[int]] | None = None,
    signal: Callable[[int], float] = lambda _: 1.0,
    size: int = 2000,
) -> NoiseScale:
    """8 workers on |w|^2 / 2, at |w|^2 = signal, with normal noise of this variance a sample."""
    draw = torch.Generator().manual_seed(seed)
    scale = NoiseScale()
    for round in range(rounds):
        b = batches(draw) if batches else torch.randint(1, 9, (8,), generator=draw).tolist()
        weights = torch.tensor(b)[:, None]
        gradients = torch.randn(len(b), size, generator=draw) * (noise / size / weights).sqrt()
        gradients[:, 0] += signal(round) ** 0.5
        mean = (gradients * weights).sum(0) / sum(b)
        scale.add(b, gradients.square().sum(1).tolist(), float(mean.square().sum()))
    return scale


def found(scale: NoiseScale) -> float:
    assert scale.measured is not None
    return scale.measured.scale


@pytest.mark.parametrize(
    "noise", [*(pytest.param(n, marks=pytest.mark.slow) for n in (10.0, 100.0)), 1000.0]
)
def test_the_scale_is_found_within_a_quarter_whatever_the_seed(noise: float) -> None:
    assert [found(measured(noise, seed)) for seed in SEEDS] == [
        pytest.approx(noise, rel=0.25) for _ in SEEDS
    ]


@pytest.mark.slow
def test_it_is_found_where_one_worker_brings_most_of_the_samples() -> None:
    for seed in SEEDS:
        scale = measured(100.0, seed, batches=lambda _: [1, 1, 1, 1, 1, 1, 2, 32])
        assert found(scale) == pytest.approx(100.0, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("fades_rounds", [100, 300])
def test_it_follows_a_signal_that_decays(fades_rounds: int) -> None:
    for seed in SEEDS:
        scale = measured(10.0, seed, signal=lambda number: exp(-number / fades_rounds))
        true = 10.0 / exp(-300 / fades_rounds)
        assert found(scale) == pytest.approx(true, rel=0.35)


def test_the_doubt_is_the_error_that_is_made() -> None:
    errors, doubts = [], []
    for seed in SEEDS:
        noise = measured(1000.0, seed, size=500).measured
        assert noise is not None
        errors.append((noise.signal - 1.0) ** 2)
        doubts.append(noise.doubt**2)
    assert sum(errors) ** 0.5 == pytest.approx(sum(doubts) ** 0.5, rel=0.4)


def test_few_rounds_say_nothing_and_bad_ones_count_for_none() -> None:
    scale = NoiseScale()
    for _ in range(9):
        scale.add([2, 6], [3.0, 1 + 4 / 6], 1.5)
        scale.add([2, 6], [nan, 1.0], nan)
        scale.add([2, 6], [inf, 1.0], inf)
        scale.add([8], [1.5], 1.5)  # alone
    assert scale.measured is None
    scale.add([2, 6], [3.0, 1 + 4 / 6], 1.5)
    assert scale.measured == pytest.approx((1.0, 4.0, 0.0))


def test_a_signal_that_noise_hides_is_a_measurement_and_the_scale_is_infinite() -> None:
    scale = NoiseScale()
    for _ in range(20):
        scale.add([1, 1], [10.0, 10.0], 4.9)
    assert scale.measured is not None
    assert scale.measured.signal < 0 < scale.measured.noise
    assert scale.measured.scale == inf


def test_what_is_measured_can_be_saved_and_goes_on() -> None:
    sums: dict[str, list[float]] = {}
    whole = NoiseScale()
    for round in range(20):
        for scale in (whole, NoiseScale(sums)):
            scale.add([2, 6], [3.0 + round % 3, 2.0], 1.5)
    assert NoiseScale(sums).measured == whole.measured


def test_a_mean_is_over_all_of_a_steady_past_and_forgets_after_a_change() -> None:
    draw = torch.Generator().manual_seed(0)
    average = Average()
    for value in (5 + torch.randn(400, generator=draw)).tolist():
        average.add(value)
    assert average.mean == pytest.approx(5.0, abs=0.15)
    assert average.doubt < 0.07
    for value in (15 + torch.randn(20, generator=draw)).tolist():
        average.add(value)
    assert average.mean == pytest.approx(15.0, abs=1.5)
