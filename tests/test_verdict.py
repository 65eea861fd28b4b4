"""What a race says in the end: what its seeds support, and no more."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from offbeat import report
from offbeat.lab import verdict
from offbeat.lab.race import Race
from offbeat.lab.results import Result, end_line
from offbeat.records import Line
from offbeat.report import spread

CLUSTER = "two-slow-of-eight"


def result(label: str, seed: int, seconds: float | None, **figures: Any) -> Result:
    figures = {
        "seconds": seconds or 50.0,
        "samples_to_target": None if seconds is None else 1000.0,
        "rounds": 100,
        "samples": 1000.0,
        "dropped_samples": 0.0,
        "utilization": 0.5,
        "waited_s": 1.0,
        "final_accuracy": 0.95,
        "mean_staleness_rounds": 0.0,
        "max_staleness_rounds": 0,
        **figures,
    }
    about = (label, label, {}, "virtual", "c", "digits", seed, "accuracy=0.95", 1.0)
    return Result(*about, seconds_to_target=seconds, **figures)  # type: ignore[arg-type]


def runs(label: str, *seconds: float | None, **figures: Any) -> list[Result]:
    return [result(label, seed, each, **figures) for seed, each in enumerate(seconds)]


def said(*results: Result) -> str:
    return verdict.sentence(Race.of(["sync"], cluster=CLUSTER), results)


def test_the_fastest_is_recommended_with_its_interval_and_its_price() -> None:
    fast = {"utilization": 0.9, "dropped_samples": 250.0, "max_staleness_rounds": 3}
    text = said(*runs("sync", 20.0, 22.0, 18.0, 20.0, 21.0), *runs("fast", *[10.0] * 5, **fast))
    assert text.startswith("Use fast here: it reaches accuracy=0.95 in 10.0 virtual s (median of 5")
    assert "2.00 times as fast as synchronous SGD (95 % interval 1.80 to 2.20)" in text
    assert "compute 90% of their time instead of 50%" in text
    assert "25% of the samples dropped" in text
    assert "at most 3 rounds stale" in text
    assert "too few" not in text


def test_the_gain_is_split_into_throughput_and_samples_needed() -> None:
    text = said(
        *runs("sync", *[20.0] * 5, samples_to_target=1000.0),
        *runs("fast", *[10.0] * 5, samples_to_target=1250.0),
    )
    assert "2.00 times as fast" in text
    assert "which is 2.50 in samples a virtual second times 0.80 in samples needed" in text


def test_factors_whose_product_is_not_the_speed_up_are_called_about() -> None:
    factors = [(1.0, 3.0), (2.0, 1.0), (6.0, 0.25), (2.0, 2.0), (3.0, 1.0)]  # medians: 2 and 1
    fast = [
        result("fast", seed, 20.0 / (more * fewer), samples_to_target=1000.0 / fewer)
        for seed, (more, fewer) in enumerate(factors)
    ]
    text = said(*runs("sync", *[20.0] * 5), *fast)
    assert "3.00 times as fast" in text  # the median of 3, 2, 1.5, 4 and 3
    assert "about 2.00 in samples a virtual second times 1.00 in samples needed" in text


def test_a_score_where_a_run_stopped_is_no_price() -> None:
    """Each stops soon after its target: one evaluation there tells nothing of a method."""
    sync = runs("sync", *[20.0] * 5, final_accuracy=0.97)
    fast = runs("fast", *[10.0] * 5, final_accuracy=0.96, max_staleness_rounds=1)
    assert said(*sync, *fast).endswith("The price: gradients at most 1 round stale.")
    timed = Race.of(["sync"], cluster=CLUSTER, until="60s")
    assert "final accuracy 96.0% against 97.0%" in verdict.sentence(timed, [*sync, *fast])
    assert "The price" not in said(*sync, *runs("fast", *[10.0] * 5))


def test_a_gain_over_a_baseline_that_was_not_tuned_to_its_end_is_doubted() -> None:
    sync = runs("sync", *[20.0] * 5, edge="higher lr")
    text = said(*sync, *runs("fast", *[10.0] * 5))
    doubt = (
        "That may be too much: sync was best at the edge of what was tried (not tried: higher lr)"
    )
    assert doubt in text
    assert "too much" not in said(*runs("sync", *[20.0] * 5), *runs("fast", *[10.0] * 5, edge="x"))


def test_a_difference_within_the_spread_is_called_that() -> None:
    text = said(*runs("sync", *[10.0] * 5), *runs("other", 9.0, 9.5, 11.0, 9.2, 10.5))
    assert text.startswith("Use sync here: other reaches accuracy=0.95 1.05 times as fast")
    assert "as fast, within the spread" in text


def test_those_as_fast_as_the_best_are_named() -> None:
    text = said(
        *runs("sync", *[20.0] * 5),
        *runs("fast", *[10.0] * 5),
        *runs("near", 9.5, 10.5, 10.2, 9.8, 10.1),
        *runs("slower", *[12.0] * 5),
    )
    assert text.startswith("Use fast here")
    assert "As fast, within the spread: near." in text


@pytest.mark.parametrize(("count", "words"), [(1, "One seed is"), (3, "3 seeds are")])
def test_few_seeds_support_no_claim(count: int, words: str) -> None:
    text = said(*runs("sync", *[20.0] * count), *runs("fast", *[10.0] * count))
    assert text.startswith("Probably fast here")
    assert f"{words} too few for an interval: --seeds 5 gives one." in text


def test_a_target_that_nobody_reached_is_said() -> None:
    text = said(
        result("sync", 0, None, final_accuracy=0.9), result("b", 0, None, final_accuracy=0.8)
    )
    assert text.startswith("Nobody reached accuracy=0.95 within")
    assert "nearest was sync, with 90.0%" in text


def test_a_run_that_never_arrived_is_a_long_one_and_not_left_out() -> None:
    """Its three quick runs would make it the best, if the others were left out."""
    text = said(*runs("sync", *[10.0] * 5), *runs("b", 1.0, 1.0, 1.0, None, None))
    assert text.startswith("Use sync here: b reaches accuracy=0.95 10.00 times as fast")
    assert "0.00 to 10.00" in text
    assert said(*runs("sync", *[10.0] * 5), *runs("b", 1.0, 1.0, None, None, None)).startswith(
        "Use sync here: nothing was faster"
    )
    assert "which synchronous SGD does not" in said(
        *runs("sync", *[None] * 5), *runs("b", *[1.0] * 5)
    )


# ---------------------------------------------------------------- intervals


def test_an_interval_holds_its_median_and_is_the_same_every_time() -> None:
    values = [1.0, 3.0, 2.0, 5.0, 4.0, 7.0, 6.0, 9.0, 8.0, 10.0]
    found = spread.interval(values)
    assert found is not None
    assert found == spread.interval(reversed(values))
    assert found.median == 5.5
    assert 1.0 < found.low < 5.5 < found.high < 10.0


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw, inside = random.Random(1), 0
    for _ in range(200):
        found = spread.interval(draw.gauss(0.0, 1.0) for _ in range(10))
        assert found is not None
        inside += found.low <= 0.0 <= found.high
    assert 0.88 < inside / 200 <= 1.0


def test_infinite_times_have_an_interval_too() -> None:
    found = spread.interval([1.0, 2.0, 3.0, math.inf, math.inf])
    assert found == (3.0, 1.0, math.inf, 5)
    assert spread.interval([]) is None
    assert spread.speed_ups([1.0, math.inf, math.inf], [2.0, 2.0, math.inf]) == [2.0, 0.0, 1.0]


# ---------------------------------------------------------------- the table


def shown(*results: Result) -> str:
    lines: list[Line] = []
    for each in results:
        about = {"label": each.label, "seed": each.seed, "target": each.target, "rate": 1.0}
        about |= {"algorithm": "SyncSGD()" if each.label == "sync" else each.label}
        lines += {"kind": "run", **about, "tuned": {"steps": 8}}, end_line(each)
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(report.table(report.measured(lines)))
    return captured.get()


def test_the_table_shows_intervals_and_the_two_factors_in_100_columns() -> None:
    text = shown(
        *runs("sync", 20.0, 22.0, 18.0, 20.0, 21.0),
        *runs("a-name:of=many,letters=in,it=all", *[10.0] * 5, samples_to_target=1250.0),
    )
    assert "2.00 (1.80–2.20)  2.50× 0.80×" in text
    assert "20.0 (18.0–22.0)" in text
    assert "steps=8" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text


def test_the_table_says_how_many_never_arrived_and_why() -> None:
    b = [*runs("b", 1.0, 1.0, 2.0, None), result("b", 4, None, diverged=True)]
    text = shown(*runs("sync", *[10.0] * 5), *(replace(each, budget_s=50.0) for each in b))
    assert "2.0 (1.0–>50.0), 1" in text
    assert "diverged, 1 never" in " ".join(text.split())
    none = shown(*runs("sync", *[None] * 5), *runs("b", *[None] * 5, diverged=True))
    assert re.search(r"^sync, steps=8 +×1 +not reached +– +– +–", none, re.MULTILINE)
    assert re.search(r"^b, steps=8 +×1 +diverged +– +– +–", none, re.MULTILINE)
