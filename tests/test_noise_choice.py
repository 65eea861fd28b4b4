"""Choices by the measured noise: how many gradients are of use together."""

from __future__ import annotations

from itertools import pairwise
from math import nan

import pytest
import torch

from offbeat.noise_choice import UsefulGradients, of_gradients
from offbeat.noise_scale import Noise
from offbeat.noise_stream import NoiseStream


def sure(scale: float) -> Noise:
    return Noise(signal=1.0, noise=scale, doubt=0.0)


@pytest.mark.parametrize(
    ("scale", "samples", "chosen"),
    [
        (0.0, 1, 1),
        (0.3, 1, 1),
        (2.1, 1, 3),
        (1000.0, 1, 256),
        (100.0, 1, 100),
        (1000.0, 32, 32),
    ],
)
def test_it_is_the_scale_in_gradients_rounded_up_and_clipped(
    scale: float, samples: float, chosen: int
) -> None:
    assert UsefulGradients(most=256, first=8)(sure(scale), samples) == chosen


def test_until_something_is_measured_it_is_the_first_choice() -> None:
    assert UsefulGradients(most=64)(None) == 64
    assert UsefulGradients(most=64, first=8)(None) == 8
    assert UsefulGradients(most=64, first=8)(Noise(0.0, 0.0, 0.0)) == 8  # gradients of zeros


def test_it_changes_by_a_factor_of_at_least_1_3() -> None:
    choice = UsefulGradients(most=1000, first=100)
    assert [choice(sure(scale)) for scale in (129.0, 78.0, 130.0, 101.0, 100.0)] == [
        *(100, 100, 130, 130),
        100,
    ]


def test_it_does_not_flap_between_one_and_two() -> None:
    choice = UsefulGradients(most=1000, first=8)
    assert [choice(sure(scale)) for scale in (0.99, 1.01, 0.99, 1.29, 1.3, 1.01)] == [
        *(1, 1, 1, 1),
        *(2, 2),
    ]


def test_it_stays_while_it_is_within_doubt() -> None:
    choice = UsefulGradients(most=1000, first=100)
    assert choice(Noise(signal=0.5, noise=100.0, doubt=0.6)) == 100  # 91 to infinity
    assert choice(Noise(signal=0.5, noise=100.0, doubt=0.1)) == 200


def test_where_noise_hides_the_signal_it_grows_as_doubt_shrinks() -> None:
    choice = UsefulGradients(most=1000, first=8)
    seen = [choice(Noise(-0.2 * doubt, 100.0, doubt)) for doubt in (8.0, 2.0, 1.0, 0.1, 0.01)]
    assert seen == [8, 25, 50, 500, 1000]


def test_it_is_never_below_what_was_asked_for() -> None:
    assert UsefulGradients(most=64, least=4)(sure(1.0)) == 4


@pytest.mark.parametrize("bounds", [{"most": 0}, {"most": 4, "least": 5}, {"most": 4, "first": 9}])
def test_bounds_that_cannot_be_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a choice needs 1 <= least <= first <= most"):
        UsefulGradients(**bounds)


def test_its_state_is_plain() -> None:
    choice = UsefulGradients(most=1000, first=100)
    choice(sure(200.0))
    again = UsefulGradients(most=1000, first=100)
    vars(again).update(vars(choice))
    assert again(None) == 200
    assert {type(value) for value in vars(choice).values()} == {int, float}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_from_a_stream_of_gradients_it_is_found_and_does_not_flap(scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    stream, choice, seen = NoiseStream(), UsefulGradients(most=10_000, first=8), []
    for _ in range(1500):
        gradient = torch.randn(2000, generator=draw) * (scale / 2000) ** 0.5
        gradient[0] += 1
        stream.add(gradient)
        seen.append(choice(stream.measured))
    assert scale / 1.5 <= seen[-1] <= scale * 1.5 + 1
    assert len({*seen[500:]}) <= 3
    assert sum(before != after for before, after in pairwise(seen)) <= 8


def test_the_noise_of_a_gradient_is_that_of_its_samples_and_never_negative() -> None:
    assert of_gradients(Noise(1.0, 50.0, 0.1), samples=10) == (1.0, 5.0)
    assert of_gradients(Noise(-0.5, 50.0, 1.0), samples=10) == (0.0, 5.0)
    assert of_gradients(Noise(1.0, -0.1, 1.0), samples=10) == (1.0, 0.0)
    assert of_gradients(None, samples=nan) == (0.0, 1.0)
