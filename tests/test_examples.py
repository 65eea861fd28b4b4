"""The examples beyond the first: they learn, in virtual time and on two real processes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pool import Pool

from offbeat.clusters import Cluster
from offbeat.lab.campaign_file import Settings
from offbeat.lab.simulate import simulate

EXAMPLES = Path(__file__).parents[1] / "examples"
LEARNT = {  # the last figure that it prints, at least or at most
    "05_gan.py": (0.0, 1.5),  # it was 4.2 from the centre
    "06_variable_length.py": (0.0, 1.0),  # ln 32 is 3.5
    "08_own_algorithm.py": (85.0, 100.0),
}


def figure(printed: str, workers: int) -> float:
    found = re.search(rf"^workers {workers} .* (\S+?)%?$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNT)
def test_an_example_learns_on_virtual_workers(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulation = simulate(EXAMPLES / name, Cluster.load("half-speed-4").resized(2))
    assert simulation.error is None
    low, high = LEARNT[name]
    assert low <= figure(capsys.readouterr().out, workers=2) <= high


def resumed(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    simulation = simulate(
        EXAMPLES / "07_checkpoint.py",
        Cluster.load("half-speed-4").resized(2),
        arguments=["--folder", str(folder), *arguments],
    )
    assert simulation.error is None
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_checkpoints_of_the_example_are_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = resumed(tmp_path, capsys, "--epochs", "1")
    assert (tmp_path / "best.pt").exists()
    second = resumed(tmp_path, capsys, "--epochs", "3", "--resume")
    assert "epochs 1 to 3" in second
    assert figure(second, 2) >= max(figure(first, 2), 80.0)


def _example(path: str, *arguments: str) -> str:
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as started:
        yield started


@pytest.mark.real
@pytest.mark.parametrize("name", ["05_gan.py", "07_checkpoint.py"])  # more than a plain loop
def test_an_example_runs_on_two_processes(name: str, pool: Pool, tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path), "--epochs", "1") if "checkpoint" in name else ()
    ended = pool.run(_example, str(EXAMPLES / name), *folder, limit_s=90.0, after_error_s=5.0)
    for one in ended:
        assert not one.error, one.words
        assert not one.hung, one.stacks
    figure(ended[0].result, workers=2)
    assert not ended[1].result


@pytest.mark.slow
def test_the_notebook_shows_a_race_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "10_race.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert 'rates="1",' in sources[1]
    sources[1] = sources[1].replace('rates="1",', 'rates="1", seeds=1,')  # not five: it is a test
    names: dict[str, Any] = {}
    for source in sources[:-1]:
        exec(source, names)
    shown = eval(sources[-1], names)._repr_html_()  # as Jupyter does with a cell's last line
    assert "eager" in capsys.readouterr().out
    frame = ElementTree.fromstring(shown)
    assert frame.tag == "iframe"
    assert "waitfree" in frame.attrib["srcdoc"]


def test_the_campaign_of_the_example_can_be_read() -> None:
    assert len(Settings.load(EXAMPLES / "09_campaign.toml").races()) == 2
