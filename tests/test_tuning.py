"""Fair settings: as many tries for everybody, and a best that others surround."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from offbeat.errors import NonFiniteGradientError
from offbeat.lab import contestants
from offbeat.lab.goals import Target
from offbeat.lab.progress import Lines
from offbeat.lab.race import Race
from offbeat.lab.sizes import SIZES, Sizes
from offbeat.lab.train import WorkerFailed
from offbeat.lab.tuning import Point, Search
from offbeat.lab.watching import Outcome

CLUSTER = "two-slow-of-eight"
TARGET = Target("accuracy", 0.95)


def outcome(reached_s: float, score: float = 0.5, loss: float = 1.0) -> Outcome:
    lines = [{"at_s": 1.0, "accuracy": score, "loss": loss}]
    ended_s = reached_s + 2.0 if reached_s < math.inf else 50.0
    return Outcome(
        0, ended_s, 1, 1.0, 0.0, 1.0, 0.0, 0.0, 0, True, evaluations=lines, reached_s=reached_s
    )


class Landscape:
    """Seconds to the target by point; remembers what was tried."""

    def __init__(self, seconds: Callable[[float, int], float]) -> None:
        self.seconds = seconds
        self.tried: list[Point] = []
        self.limits: list[float] = []

    def __call__(self, point: Point, limit_s: float) -> list[Outcome]:
        self.tried.append(point)
        self.limits.append(limit_s)
        return [outcome(self.seconds(*point))]


def bowl(rate: float, size: int, best_rate: float, best_size: int = 0) -> float:
    return 10.0 + 3 * abs(math.log2(rate / best_rate)) + 2 * abs(size - best_size)


def test_the_grid_grows_until_the_best_is_inside() -> None:
    for best in (0.25, 1.0, 2.0, 16.0):
        search = Search((1.0, 2.0, 4.0), TARGET, trials=10)
        landscape = Landscape(lambda rate, size, best=best: bowl(rate, size, best))
        assert search.run(landscape) == (best, 0)
        assert search.edge == ""
        assert {best / 2, best * 2} <= {rate for rate, _ in landscape.tried}


def test_a_best_at_the_edge_is_said_when_the_tries_are_used_up() -> None:
    search = Search((1.0, 2.0, 4.0), TARGET, trials=5)
    assert search.run(Landscape(lambda rate, size: bowl(rate, size, 64.0))) == (16.0, 0)
    assert search.edge == "higher lr"
    search = Search((1.0, 2.0, 4.0), TARGET, trials=3, sizes=4, start=1)
    assert search.run(Landscape(lambda rate, size: bowl(rate, size, 2.0, 3))) == (2.0, 1)
    assert search.edge == "larger size, smaller size"


def test_the_size_is_searched_beside_the_rate() -> None:
    search = Search((1.0, 2.0, 4.0), TARGET, trials=12, sizes=5, start=1)
    assert search.run(Landscape(lambda rate, size: bowl(rate, size, 4.0, 3))) == (4.0, 3)
    assert search.edge == ""


def test_larger_rounds_are_tried_with_a_larger_rate_too() -> None:
    """Where neither alone is better."""

    def seconds(rate: float, size: int) -> float:
        return 10.0 if (rate, size) == (4.0, 2) else bowl(rate, size, 2.0, 1) + 1.0

    assert Search((1.0, 2.0, 4.0), TARGET, trials=12, sizes=5, start=1).run(Landscape(seconds)) == (
        4.0,
        2,
    )


@pytest.mark.parametrize("sizes", [1, 5])
@pytest.mark.parametrize("best", [1.0, 2.0, 8.0])
def test_nobody_has_more_tries_than_another_and_none_is_made_twice(sizes: int, best: float) -> None:
    landscape = Landscape(lambda rate, size: bowl(rate, size, best, sizes - 1))
    Search((1.0, 2.0, 4.0), TARGET, trials=8, sizes=sizes).run(landscape)
    assert len(landscape.tried) == len(set(landscape.tried)) <= 8
    if sizes == 1:  # what is left goes into a finer rate
        assert len(landscape.tried) >= 5


def test_a_try_is_given_up_when_another_was_long_faster() -> None:
    landscape = Landscape(lambda rate, _: {1.0: 8.0, 2.0: 4.0}.get(rate, math.inf))
    search = Search((1.0, 2.0, 4.0), TARGET, trials=3)
    assert search.run(landscape) == (2.0, 0)
    assert landscape.limits == [math.inf, 1.25 * 10.0, 1.25 * 6.0]
    assert list(search.words.values()) == ["8.0", "4.0", "slower"]


def test_who_diverges_has_lost_and_the_nearest_wins_if_none_arrives() -> None:
    def trial(point: Point, limit_s: float) -> list[Outcome]:
        rate, _ = point
        if rate >= 4.0:
            raise WorkerFailed("NaN") from NonFiniteGradientError("NaN")
        return [outcome(math.inf, 0.5 + rate / 10, math.nan if rate == 3.0 else 1.0)]

    search = Search((1.0, 2.0, 3.0, 4.0), TARGET, trials=4)
    assert search.run(trial) == (2.0, 0)
    assert [*search.words.values()] == ["not reached"] * 3 + ["diverged"]


def test_a_single_rate_is_raced_with_as_it_is() -> None:
    landscape = Landscape(lambda rate, size: 1.0)
    assert Search((4.0,), TARGET, trials=8).run(landscape) == (4.0, 0)
    assert landscape.tried == []


@pytest.mark.parametrize("text", ["", "0", "-1,2", "fast", "1,,2", "inf", "nan"])
def test_rates_that_cannot_be_meant_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rates must be factors such as 0\.5,1,2"):
        Race.of(["sync"], cluster=CLUSTER, rates=text)


def test_a_grid_that_cannot_have_its_best_inside_is_refused() -> None:
    words = "with 2 trials and 2 rates the best is always at the edge .* at least --trials 3"
    with pytest.raises(ValueError, match=words):
        Race.of(["sync"], cluster=CLUSTER, rates="1,2", trials=2)
    with pytest.raises(ValueError, match="give at least --trials 4"):
        Race.of(["sync"], cluster=CLUSTER, rates="1,2,4,8", trials=3)
    with pytest.raises(ValueError, match="rates must differ"):
        Race.of(["sync"], cluster=CLUSTER, rates="1,2,2")


# ---------------------------------------------------------------- sizes


def test_every_declared_size_is_a_setting_of_its_algorithm() -> None:
    known = contestants.algorithms()
    for name, (setting, _) in SIZES.items():
        contestant = contestants.parse(name)
        sizes = Sizes.of(contestant, 8, 48.0)
        assert sizes.setting == setting
        assert len(sizes.values) > 1
        for number, value in enumerate(sizes.values):
            put = sizes.put(contestant, number)
            assert isinstance(put.algorithm, known[name])
            put.algorithm.check(8)
            assert put.tuned == {setting: value}


def test_the_search_begins_at_the_algorithms_own_size() -> None:
    def first(spec: str) -> object:
        sizes = Sizes.of(contestants.parse(spec), 8, 48.0)
        return sizes.values[sizes.start]

    assert first("sync") == 1
    assert first("local") == 8
    assert first("eager") == 4  # half of the workers
    assert first("msync") == 6
    assert first("abs") == 0.0


@pytest.mark.parametrize("spec", ["local:steps=4", "eager:quorum=solo", "ddp", "dpsgd"])
def test_a_size_that_is_named_is_held_and_some_have_none(spec: str) -> None:
    contestant = contestants.parse(spec)
    sizes = Sizes.of(contestant, 8, 48.0)
    assert (sizes.setting, sizes.values) == ("", (None,))
    assert sizes.put(contestant, 0) == contestant


def test_only_sizes_that_the_other_settings_allow_are_tried() -> None:
    sizes = Sizes.of(contestants.parse("dasgd:delay=4"), 8, 48.0)
    assert sizes.values == (4, 8, 16, 32, 64)


# ---------------------------------------------------------------- in a race


@pytest.mark.slow
def test_every_contestant_races_with_its_own_best_and_that_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"cluster": "half-speed-4", "task": "quadratic", "seeds": 1}
    race = Race.of(["local", "ddp"], rates="1,2", trials=4, **settings)  # type: ignore[arg-type]
    with Lines(Console(stderr=True, width=200), ["local", "ddp"], 1, "virtual s", 4) as show:
        local, ddp = race.run(show).results
    said = capsys.readouterr().err.splitlines()
    assert ddp.tuned == {}
    assert set(local.tuned) == {"steps"}
    steps = local.tuned["steps"]
    assert re.match(rf"tuned local: lr ×{local.rate:.3g}, steps={steps}(;|$)", said[0])
    assert re.match(rf"tuned ddp: lr ×{ddp.rate:.3g}(;|$)", said[1])
    assert said[2].startswith("1/2 local, seed 0: loss=0.01 after")
    assert said[2].endswith("s left")
    held = Race.of([f"local:steps={steps}"], rates=str(local.rate), **settings)  # type: ignore[arg-type]
    assert held.run().results[0].seconds_to_target == local.seconds_to_target
