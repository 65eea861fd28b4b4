"""The clusters that are made from published recordings hold what their files say."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median, pstdev, quantiles

import pytest
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.clusters import Cluster
from offbeat.clusters.device import ListedLength

NAMED = Path(__file__).parents[1] / "src" / "offbeat" / "clusters" / "named"
MICRO_BATCHES, STEPS = 8, 43


def steps_s(cluster: Cluster) -> list[list[float]]:
    """Seconds of every worker in every step of 8 micro-batches."""
    devices = [cluster.device(rank, seed=0) for rank in range(cluster.workers)]
    return [
        [
            sum(device.seconds(MICRO_BATCHES * step + number, 1, 0.0) for number in range(8))
            for device in devices
        ]
        for step in range(STEPS)
    ]


def imbalances(cluster: Cluster) -> list[float]:
    return [max(step) / mean(step) for step in steps_s(cluster)]


def test_bytedance_s_slowest_rank_takes_as_much_longer_as_recorded() -> None:
    found = imbalances(Cluster.load("bytedance-32"))
    assert median(found) == pytest.approx(1.355, abs=0.002)
    assert quantiles(found, n=20, method="inclusive")[-1] == pytest.approx(1.573, abs=0.002)


def test_bytedance_s_ranks_are_equally_fast_in_the_long_run() -> None:
    totals = [sum(rank) for rank in zip(*steps_s(Cluster.load("bytedance-32")), strict=True)]
    assert len(totals) == 32
    assert max(totals) / mean(totals) < 1.06


def test_a_larger_bytedance_has_no_twins_and_waits_longer() -> None:
    cluster = Cluster.load("bytedance-32")
    larger = cluster.resized(96)
    first = [larger.device(rank, seed=0).seconds(0, 1, 0.0) for rank in (5, 37, 69)]
    assert len(set(first)) == 3
    assert median(imbalances(larger)) > median(imbalances(cluster)) + 0.02
    assert median(imbalances(cluster.resized(8))) < median(imbalances(cluster)) - 0.05


def test_ucf101_s_lengths_are_those_of_the_training_videos() -> None:
    length = Cluster.load("ucf101-8").compute.length
    assert isinstance(length, ListedLength)
    frames = length.values
    assert len(frames) == 9537
    assert (min(frames), max(frames)) == (27.5, 1777.5)
    assert mean(frames) == pytest.approx(182.5, abs=0.1)
    assert pstdev(frames) / mean(frames) == pytest.approx(0.51, abs=0.005)


def test_ucf101_s_micro_batches_take_as_long_as_in_the_paper() -> None:
    cluster = Cluster.load("ucf101-8")
    devices = [cluster.device(rank, seed=0) for rank in range(8)]
    steps = [[device.seconds(step, 1, 0.0) for device in devices] for step in range(2000)]
    assert mean(map(mean, steps)) == pytest.approx(1.235, rel=0.02)
    slowest_s = mean(map(max, steps))
    assert slowest_s == pytest.approx(2.24, rel=0.02)
    reduced_s = cluster.network.all_reduce_s(range(8), 4 * 34_663_525)
    assert slowest_s + reduced_s == pytest.approx(9227 / (50 * 9537 / 128), rel=0.12)


@pytest.mark.parametrize("name", ["bytedance-32", "ucf101-8"])
def test_a_recording_names_its_source_its_licence_and_what_is_assumed(name: str) -> None:
    text = (NAMED / f"{name}.toml").read_text()
    top = text[: text.index("description")]
    for word in ("Measured: ", "ssumed", "arXiv ", f"{name}.csv"):
        assert word in top
    assert "Apache-2.0" in top or "MIT" in top
    assert (NAMED / f"{name}.csv").stat().st_size < 100_000


@pytest.mark.parametrize(
    ("name", "words"),
    [("bytedance-32", "344 rows, 32 columns"), ("ucf101-8", "s per unit of a listed length")],
)
def test_a_recording_is_described(name: str, words: str) -> None:
    result = CliRunner().invoke(app, ["clusters", name])
    assert result.exit_code == 0
    assert words in result.stdout
    assert "Measured" in result.stdout
