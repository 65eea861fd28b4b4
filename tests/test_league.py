"""The league: results of campaigns in; ranks, profiles and a page out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pages import colours, hover, opened
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ReportError
from offbeat.lab import league
from offbeat.lab.campaign import VERSION
from offbeat.lab.contestants import algorithms
from offbeat.lab.families import OTHER, family
from offbeat.lab.results import Result

NASTY = "</script><script>window.broken = true</script>"
SECONDS: dict[str, dict[str, list[float | None]]] = {
    "mixed-4": {
        "sync": [10.0, 11.0, 12.0, 13.0, 14.0],
        "eager": [5.0, 5.5, 6.0, 6.5, 7.0],
        "waitfree": [5.2, 5.4, 6.3, 6.4, 7.2],
        "dpsgd": [None, None, None, 30.0, 31.0],
    },
    "uniform-8": {
        "sync": [4.0, 4.0, 4.0, 4.0, 4.0],
        "eager": [8.0, 8.0, 8.0, 8.0, 8.0],
        "waitfree": [6.0, 6.0, 6.0, 6.0, 6.0],
        "dpsgd": [9.0, 9.0, 9.0, 9.0, None],
    },
}
FAMILIES = ["gradient-synchronous", "quorum", "local and overlapped", "decentralised"]


def result(label: str, cluster: str, seed: int, seconds: float | None) -> Result:
    """A run that needs 100 samples a second of synchronous SGD, and 200 of all others."""
    pace = 100 if label == "sync" else 200
    return Result(
        *(label, label, {}, "virtual", cluster, "noisy", seed, "accuracy=0.9", 2.0),
        tuned={"steps": 8} if label == "waitfree" else {},
        edge="higher lr" if label == "eager" else "",
        seconds_to_target=seconds,
        samples_to_target=None if seconds is None else seconds * pace,
        seconds=40.0,
        samples=4000.0,
        steps=400,
        rounds=50,
        utilization=0.75,
        dropped_samples=400.0 if label == "eager" else 0.0,
        mean_staleness_rounds=1.5,
        max_staleness_rounds=4,
        sent_bytes=4_000_000.0,
    )


def written(path: Path, seconds: dict[str, Any] = SECONDS, clusters: tuple[str, ...] = ()) -> Path:
    """A file as a campaign appends to; clusters beyond those with seconds were not run yet."""
    settings = {"algorithms": list(SECONDS["mixed-4"]), "tasks": ["noisy"], "seeds": 5}
    settings |= {"clusters": [*seconds, *clusters]}
    lines = [{"kind": "campaign", "version": VERSION, "offbeat": "0.2", "settings": settings}]
    for number, (cluster, by_label) in enumerate(seconds.items()):
        for label, times in by_label.items():
            for seed, each in enumerate(times):
                run = {"kind": "run", "race": number, "workers": 4, "task": "noisy"}
                lines.append(run | {"cluster": cluster, "cluster_file": f"# {NASTY}"})
                found = asdict(result(label, cluster, seed, each))
                lines.append({"kind": "result", "race": number, **found})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return written(tmp_path / "league.jsonl", clusters=("half-speed-4",))


# ---------------------------------------------------------------- figures


def test_a_rank_is_a_range_where_the_seeds_cannot_tell(results: Path) -> None:
    mixed, uniform = league.load([results]).cells
    ranks = {each.label: each.rank for each in league.figures.entries(mixed)}
    assert ranks == {"eager": (1, 2), "waitfree": (1, 2), "sync": (3, 3), "dpsgd": (4, 4)}
    ranks = {each.label: each.rank for each in league.figures.entries(uniform)}
    assert ranks == {"sync": (1, 1), "waitfree": (2, 2), "eager": (3, 3), "dpsgd": (4, 4)}


def test_a_speed_up_is_throughput_times_efficiency(results: Path) -> None:
    mixed, _ = league.load([results]).cells
    eager, *_ = league.figures.entries(mixed)
    assert eager.label == "eager"
    assert eager.speed_up is not None
    assert eager.throughput is not None
    assert eager.efficiency is not None
    assert eager.speed_up.median == 2.0
    assert (eager.throughput.median, eager.efficiency.median) == (2.0, 1.0)
    assert (eager.dropped, eager.waited, eager.sent_bytes) == (0.1, 0.25, 10_000.0)


def test_who_mostly_fails_never_arrives_and_is_not_left_out(results: Path) -> None:
    mixed, uniform = league.load([results]).cells
    last = league.figures.entries(mixed)[-1]
    assert (last.label, last.reached, last.behind) == ("dpsgd", 2, math.inf)
    last = league.figures.entries(uniform)[-1]
    assert (last.label, last.reached, last.behind) == ("dpsgd", 4, 2.25)


def test_over_all_races_the_one_that_is_behind_the_least_is_first(results: Path) -> None:
    best, *_, worst = league.figures.of(league.load([results])).overall
    assert (best.label, best.first, best.near, best.never) == ("waitfree", 1, 2, 0)
    assert best.behind == [6.3 / 6.0, 1.5]
    assert (worst.label, worst.first, worst.never) == ("dpsgd", 0, 1)
    assert league.figures.profile(best.behind, [1, 1.1, 2]) == [0, 0.5, 1]


def test_who_has_been_in_few_of_the_races_is_not_ranked_before_those_of_all(
    tmp_path: Path,
) -> None:
    three = dict.fromkeys(("uniform-8", "half-speed-4"), SECONDS["uniform-8"])
    rare = {**SECONDS["mixed-4"], "edm": [1.0, 1.0, 1.0, 1.0, 1.0]}
    path = written(tmp_path / "r.jsonl", {"mixed-4": rare, **three})
    over_all = league.figures.of(league.load([path])).overall
    assert [each.label for each in over_all] == ["sync", "waitfree", "eager", "dpsgd", "edm"]
    assert (over_all[-1].races, over_all[-1].behind) == (1, [1.0])


def test_every_algorithm_has_a_family() -> None:
    assert [name for name in algorithms() if family(name) == OTHER] == []


# ---------------------------------------------------------------- files


def test_a_race_that_was_not_run_is_named_and_one_that_is_not_whole_says_so(tmp_path: Path) -> None:
    fewer = {"mixed-4": {**SECONDS["mixed-4"], "dpsgd": [30.0]}}
    found = league.load([written(tmp_path / "r.jsonl", fewer, ("uniform-8",))])
    assert found.waiting == ["noisy on uniform-8"]
    assert (found.cells[0].runs, found.cells[0].planned) == (16, 20)
    assert "4 of 20 runs are missing: it does not count" in league.page.page(
        found, league.figures.of(found)
    )
    assert league.figures.of(found).overall == []


def test_a_campaign_that_is_being_written_can_be_looked_at(results: Path) -> None:
    with results.open("a") as file:
        file.write('{"kind": "run", "race": 0, "wor')
    assert len(league.load([results]).cells) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "", "not a file of a campaign's results"),
        (lambda text: text.replace('"campaign"', '"run"', 1), "not a file of a campaign's results"),
        (lambda text: text.replace(f'"version": {VERSION}', '"version": 99', 1), "another version"),
        (lambda text: text.replace('"seeds": 5', '"seeds": "x"', 1), "line 1: settings"),
        (lambda text: f"{text}nonsense\n", "not a line of results: take it out"),
        (lambda text: text.replace('"label"', '"lable"'), "not one of ours"),
    ],
)
def test_what_is_not_a_campaigns_results_is_refused(results: Path, change: Any, words: str) -> None:
    results.write_text(change(results.read_text()))
    done = CliRunner().invoke(app, ["league", str(results)])
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_the_same_race_in_two_files_is_refused(results: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.jsonl")
    with pytest.raises(ReportError, match="noisy on mixed-4 is in another of the files"):
        league.load([results, other])
    other = written(tmp_path / "other.jsonl", {"half-speed-4": SECONDS["mixed-4"]})
    both = league.load([results, other])  # what one file waits for, the other has
    assert (len(both.cells), both.waiting) == (3, [])


def test_the_command_shows_a_table_and_writes_a_page(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "league.html"
    done = CliRunner().invoke(app, ["league", str(results), "--report", str(page)])
    assert done.exit_code == 0, done.output
    assert "waitfree is behind the least" in done.stdout
    assert "Not run yet: noisy on half-speed-4." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    text = page.read_text()
    assert text.count('<section class="race"') == 2
    assert "https://" not in text.replace("http://www.w3.org", "").split("<script>")[0]
    missing = CliRunner().invoke(app, ["league", str(results), "--report", str(tmp_path / "a/b")])
    assert (missing.exit_code, "there is no folder" in missing.stderr) == (2, True)


# ---------------------------------------------------------------- the page, in a browser


@pytest.fixture
def page(browser: Any, results: Path, tmp_path: Path) -> Iterator[Any]:
    found = league.load([results])
    league.page.write(found, league.figures.of(found), tmp_path / "league.html")
    yield opened(browser, tmp_path / "league.html")
    assert browser.get_log("browser") == []


def shown(page: Any, selector: str) -> list[str]:
    """The texts of what is not hidden."""
    found = page.find_elements("css selector", selector)
    return [each.text for each in found if each.is_displayed()]


def series(page: Any, chart: str) -> dict[str, int]:
    return page.execute_script(
        "return Object.fromEntries(echarts.getInstanceByDom(document.getElementById(arguments[0]))"
        ".getOption().series.map((series) => [series.name, series.data.length]))",
        chart,
    )


@pytest.mark.slow
def test_both_charts_are_drawn_and_nothing_in_the_files_is_run(page: Any) -> None:
    for chart in ("profiles", "factors"):
        assert colours(page, chart) > 5, chart
    assert set(series(page, "profiles")) == set(SECONDS["mixed-4"])
    assert {name: series(page, "factors")[name] for name in FAMILIES} == dict(
        zip(FAMILIES, (2, 2, 2, 1), strict=True)  # who never arrived has no factors
    )
    assert "within" in hover(page, "profiles", 0.5, 0.5)
    assert page.execute_script("return window.broken") is None


@pytest.mark.slow
def test_races_and_families_can_be_chosen(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    assert shown(page, "#shown") == ["all 2 races"]
    Select(page.find_element("id", "cluster")).select_by_visible_text("uniform-8")
    assert shown(page, ".race h2") == ["noisy on uniform-8"]
    assert shown(page, ".heat tbody th") == ["noisy on uniform-8"]
    assert shown(page, "#shown") == ["1 of 2 races"]
    page.find_element("css selector", 'button[data-family="quorum"]').click()
    names = [text.split("\n")[0] for text in shown(page, ".race tbody th")]
    assert names == ["sync", "waitfree", "dpsgd"]
    assert "eager" not in series(page, "profiles")
    assert series(page, "factors")["decentralised"] == 1


@pytest.mark.slow
def test_a_table_is_sorted_by_any_column_and_never_comes_last(page: Any) -> None:
    def times() -> list[str]:
        page.find_element("xpath", "(//section[@class='race'])[1]//button[.='virtual s']").click()
        found = shown(page, ".race tbody td:nth-child(3)")[:4]
        return [text.split(" ")[0] for text in found]

    assert times() == ["6.0", "6.3", "12.0", "never"]
    assert times() == ["12.0", "6.3", "6.0", "never"]
    sorted_by = page.find_elements("css selector", "th[aria-sort='descending']")
    assert [each.text.split(" ")[0] for each in sorted_by] == ["virtual"]


@pytest.mark.slow
def test_light_and_dark_and_a_telephone(page: Any) -> None:
    now = "return getComputedStyle(document.body).backgroundColor"
    before = page.execute_script(now)
    page.find_element("id", "theme").click()
    assert page.execute_script(now) != before
    metrics = {"width": 375, "height": 812, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        opened(page, Path(page.current_url.removeprefix("file://")))
        assert page.execute_script("return document.documentElement.scrollWidth") == 375
        for chart in ("profiles", "factors"):
            assert colours(page, chart) > 5, chart
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
