"""When a target counts as reached: by the trajectory, not by when somebody looked."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from offbeat.lab.goals import Target
from offbeat.lab.race import Race
from offbeat.lab.reaching import Reaching
from offbeat.records import Line

ACCURACY = Target("accuracy", 0.9)
WINDOW = 100.0

Point = tuple[float, float]  # samples, accuracy


def reached(points: Sequence[Point], target: Target = ACCURACY) -> Reaching:
    """A second takes ten samples."""
    found = Reaching(target, WINDOW)
    for samples, value in points:
        accuracy = value if target.metric == "accuracy" else None
        found.add(samples, samples / 10, value, accuracy)
    return found


def noisy(seed: int) -> list[Point]:
    """A learning curve as races have it: it rises to 0.95, and every round jumps by some points."""
    draw, jump = random.Random(seed), 0.0
    points = []
    for samples in range(0, 1600, 2):
        jump = 0.5 * jump + draw.gauss(0.0, 0.02)
        points.append((float(samples), 0.95 - 0.8 * math.exp(-samples / 150) + jump))
    return points


def test_a_curve_that_crosses_has_reached_the_target_where_it_crosses() -> None:
    rising = [(float(x), x / 1000) for x in range(0, 1300, 10)]
    found = reached(rising)
    assert found.samples == pytest.approx(900.0)
    assert found.seconds == pytest.approx(90.0)


def test_a_first_touch_is_not_reached() -> None:
    touches = [(float(x), 0.95 if 300 <= x <= 320 else 0.8) for x in range(0, 1000, 10)]
    assert reached(touches).samples is None


def test_who_falls_back_before_the_second_window_is_over_has_not_reached_it() -> None:
    def curve(falls: float) -> list[Point]:
        return [(float(x), 0.95 if 300 <= x < falls else 0.8) for x in range(0, 1000, 5)]

    assert reached(curve(falls=360.0)).samples is None
    assert reached(curve(falls=500.0)).samples == pytest.approx(315.0, abs=5.0)


def test_the_crossing_after_which_it_stays_is_the_one_that_counts() -> None:
    early = [(float(x), 0.95 if 200 <= x < 260 or x >= 600 else 0.8) for x in range(0, 1000, 5)]
    assert reached(early).samples == pytest.approx(615.0, abs=5.0)


def test_what_comes_after_the_confirmation_is_not_looked_at() -> None:
    rising = [(float(x), x / 1000) for x in range(0, 1020, 10)]
    falls = [*rising, *((float(x), 0.1) for x in range(1020, 2000, 10))]
    assert reached(falls).samples == reached(rising).samples == pytest.approx(900.0)


def test_a_run_that_ends_before_the_confirmation_has_not_reached_it() -> None:
    assert reached([(float(x), x / 1000) for x in range(0, 1000, 10)]).samples is None


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_is_the_trajectorys_whatever_the_cadence(seed: int) -> None:
    trajectory = noisy(seed)
    answers, touches = [], []
    for every in (1, 2, 3, 4):  # 50 to 12 evaluations in a window
        for first in range(every):
            looked = trajectory[first::every]
            found = reached(looked)
            assert found.samples is not None
            answers.append(found.samples)
            touches.append(next(samples for samples, value in looked if value >= 0.9))
    assert spread(answers) < 0.05
    assert max(answers) / min(answers) < 1.2
    assert min(touches) < 0.95 * min(answers)  # luck, which counted once


def test_over_many_trajectories_the_cadence_moves_the_answer_by_a_percent_or_two() -> None:
    """The first touch moves by several times as much."""
    ours, touches = [], []
    for seed in range(20):
        trajectory = noisy(seed)
        looked = [trajectory[first::every] for every in (1, 2, 3, 4) for first in range(every)]
        ours.append(spread([reached(each).samples or math.inf for each in looked]))
        touches.append(spread([next(x for x, value in each if value >= 0.9) for each in looked]))
    assert sum(ours) / 20 < 0.02
    assert sum(touches) / 20 > 2 * sum(ours) / 20


def spread(answers: Sequence[float]) -> float:
    """How far the answers are from the middle one, on average."""
    middle = sorted(answers)[len(answers) // 2]
    return sum(abs(each / middle - 1) for each in answers) / len(answers)


def test_losses_are_averaged_by_their_logarithm() -> None:
    target = Target("loss", 0.01)
    falling = [(float(x), 100 ** (-x / 500)) for x in range(0, 1000, 20)]
    assert reached(falling, target).samples == pytest.approx(500.0)
    at_zero = [*falling[:30], *((float(x), 0.0) for x in range(600, 1000, 20))]
    assert reached(at_zero, target).samples == pytest.approx(500.0)


def test_a_model_that_has_left_the_numbers_has_reached_nothing() -> None:
    gone = [(float(x), 0.95) for x in range(0, 80, 10)]
    gone += [(float(x), math.nan) for x in range(80, 1000, 10)]
    assert reached(gone).samples is None
    assert reached(gone, Target("loss", 1.0)).samples is None


def test_an_evaluation_of_the_same_samples_says_nothing_new() -> None:
    twice = [(float(x), x / 1000) for x in range(0, 1300, 10) for _ in range(2)]
    assert reached(twice).samples == pytest.approx(900.0)


# ---------------------------------------------------------------- in a race


def raced(algorithm: str, **settings: Any) -> tuple[Any, list[Line]]:
    lines: list[Line] = []
    settings = {"cluster": "half-speed-4", "task": "quadratic", "seeds": 1, **settings}
    (result,) = Race.of([algorithm], rates="1", **settings).run(sink=lines.append).results
    assert result.error is None, result.error
    return result, lines


FAMILIES = ("sync", "eager:quorum=solo", "abs", "local:steps=4", "waitfree", "wagma", "dpsgd")


@pytest.mark.parametrize("algorithm", FAMILIES)
def test_to_be_evaluated_changes_nothing_of_a_run(algorithm: str) -> None:
    def happened(every: float) -> list[Line]:
        _, lines = raced(algorithm, until="12rounds", every=every)
        return [line for line in lines if line["kind"] in ("compute", "wait", "round", "end")]

    assert happened(4.0) == happened(16.0)


@pytest.mark.parametrize("algorithm", ["eager:quorum=solo", "waitfree", "dpsgd"])
def test_a_race_has_the_same_answer_whatever_its_cadence(algorithm: str) -> None:
    often, seldom = (raced(algorithm, every=every)[0] for every in (4.0, 16.0))
    assert often.samples_to_target is not None
    assert seldom.samples_to_target == pytest.approx(often.samples_to_target, rel=0.03)
    assert seldom.seconds_to_target == pytest.approx(often.seconds_to_target, rel=0.03)


@pytest.mark.parametrize("algorithm", ["sync", "eager:quorum=solo", "abs", "wagma", "dpsgd"])
def test_evaluations_come_every_so_many_samples(algorithm: str) -> None:
    _, lines = raced(algorithm, every=16.0, until="200samples")
    *looked, last = (line["samples"] for line in lines if line["kind"] == "evaluation")
    assert last >= 200
    assert [samples // 16 for samples in looked[1:10]] == list(range(1, 10))


def test_local_sgd_is_evaluated_on_the_mean_of_all_models_not_on_one_that_has_drifted() -> None:
    """After the round in which models were averaged, every worker would say the same."""
    _, lines = raced("local:steps=8", every=8.0, until="12rounds")
    first, *evaluated, _ = (line for line in lines if line["kind"] == "evaluation")
    assert first["samples"] == 0.0
    rounds = [line["at_s"] for line in lines if line["kind"] == "round"]
    assert len(evaluated) > 8
    assert all(min(abs(line["at_s"] - ended) for ended in rounds) < 1e-3 for line in evaluated)


@pytest.mark.parametrize("algorithm", ["wagma", "dpsgd"])
def test_where_models_differ_their_mean_is_evaluated(algorithm: str) -> None:
    """With no gradient noise to average, the mean of eight models is the better one."""
    result, lines = raced(algorithm, until="400samples")
    *evaluated, last = (line for line in lines if line["kind"] == "evaluation")
    assert last["loss"] == result.final_loss  # after the end, where all have the mean
    assert evaluated[-1]["loss"] == pytest.approx(last["loss"], rel=0.5)


def test_a_cadence_that_leaves_nothing_to_smooth_is_refused() -> None:
    words = r"every must be above 0 and at most 33 samples, got 51: .* needs 12 evaluations"
    with pytest.raises(ValueError, match=words):
        Race.of(["sync"], cluster="two-slow-of-eight", task="quadratic", every=51.0)
    with pytest.raises(ValueError, match="every must be above 0"):
        Race.of(["sync"], cluster="two-slow-of-eight", task="quadratic", every=0.0)
