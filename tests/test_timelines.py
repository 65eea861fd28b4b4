"""The pictures and tables of the docs are of today's code and results."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import offbeat

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import choosing  # noqa: E402
import timelines  # noqa: E402

pytestmark = pytest.mark.slow


def test_the_timelines_are_drawn_from_the_algorithms_as_they_are() -> None:
    torch.set_num_threads(1)
    drawn = dict(timelines.pictures())
    there = {file.name: file.read_text() for file in timelines.FOLDER.glob("*.svg")}
    differ = sorted(
        name for name in drawn.keys() | there.keys() if drawn.get(name) != there.get(name)
    )
    assert not differ, "run: python benchmarks/timelines.py"


def test_every_algorithm_has_its_timeline() -> None:
    drawn = {type(algorithm).__name__ for algorithm in timelines.ALGORITHMS.values()}
    known = {name for name in offbeat.__all__ if isinstance(vars(offbeat)[name], type)}
    assert drawn == {
        name
        for name in known
        if issubclass(vars(offbeat)[name], offbeat.Algorithm) and name != "Algorithm"
    }


@pytest.mark.parametrize("file", sorted(timelines.FOLDER.glob("*.svg")), ids=lambda file: file.name)
def test_a_timeline_is_an_svg_with_a_title_for_light_and_dark(file: Path) -> None:
    root = ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in file.read_text()


def test_the_races_on_the_page_are_those_in_the_results() -> None:
    page = choosing.PAGE.read_text()
    assert choosing.written(page) == page, "run: python benchmarks/choosing.py"
