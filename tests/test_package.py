"""The package as its users have it: built, installed without developers' tools, and typed.

`make test-package` builds the wheel, installs it into an environment of its own, and names the
Python there in OFFBEAT_INSTALLED. Without that, these tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offbeat

ROOT = Path(__file__).parents[1]
USER = Path(__file__).parent / "user"
PYTHON = os.environ.get("OFFBEAT_INSTALLED", "")

pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(not PYTHON, reason="make test-package installs the package first"),
]


def said(folder: Path, *command: str | Path, code: int = 0) -> str:
    """What a command prints, where nothing of the checkout can be imported."""
    hidden = ("PYTHONPATH", "MYPYPATH")
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=110,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "NumPy" not in done.stderr  # torch warns in every process where there is none
    return done.stdout


def python(folder: Path, code: str) -> str:
    return said(folder, PYTHON, "-c", code)


@pytest.fixture(scope="module")
def settings() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return found


def test_it_is_installed_from_the_wheel_without_developers_tools(
    tmp_path: Path, settings: dict[str, list[str]]
) -> None:
    code = "import offbeat; print(offbeat.__version__, offbeat.__file__)"
    version, file = python(tmp_path, code).splitlines()[-1].split()
    assert version == offbeat.__version__
    assert "site-packages" in file
    code = "from importlib import metadata as m; print(*(d.name for d in m.distributions()))"
    there = {name.lower() for name in python(tmp_path, code).split()}
    tools = {re.split(r"[^\w.-]", each)[0].lower() for each in settings["dev"]}
    assert "torch" in there
    assert not there & tools


def test_every_module_imports_or_names_the_extra_that_it_needs(
    tmp_path: Path, settings: dict[str, list[str]]
) -> None:
    code = """
import importlib, pkgutil, offbeat
for each in pkgutil.walk_packages(offbeat.__path__, "offbeat."):
    if each.name == "offbeat.__main__":
        continue
    try:
        importlib.import_module(each.name)
    except ImportError as error:
        print(f"{each.name}: {error}")
"""
    lines = [line for line in python(tmp_path, code).splitlines() if line.startswith("offbeat.")]
    names = [line.split(":")[0].rpartition(".")[2] for line in lines]
    assert sorted(names) == ["accelerate", "flower", "lightning", "transformers"]
    for line, name in zip(lines, names, strict=True):
        assert f"pip install 'offbeat[{name}]'" in line
        assert name in settings


def test_the_wheel_offers_every_extra_and_its_types(
    tmp_path: Path, settings: dict[str, list[str]]
) -> None:
    code = """
from importlib import metadata, resources
print(*metadata.metadata("offbeat").get_all("Provides-Extra"))
assert resources.files("offbeat").joinpath("py.typed").is_file()
"""
    assert set(python(tmp_path, code).split()) == set(settings)


def test_the_command_says_what_it_can_do(tmp_path: Path) -> None:
    words = said(tmp_path, Path(PYTHON).with_name("offbeat"), "--help")
    for command in ("race", "simulate", "launch", "doctor", "campaign", "profile"):
        assert re.search(rf"\b{command}\b", words)


def test_an_example_trains_in_a_simulation_and_on_processes(tmp_path: Path) -> None:
    example = ROOT / "examples/01_train.py"
    command = Path(PYTHON).with_name("offbeat")
    words = said(tmp_path, command, "simulate", example, "--cluster", "uniform-8", "--workers", "2")
    assert re.search(r"workers 2 .* test accuracy 9\d\.\d%", words)
    words = said(tmp_path, command, "launch", "--nproc-per-node", "2", example)
    assert re.search(r"workers 2 .* test accuracy 9\d\.\d%", words)


def test_a_race_has_its_data_and_draws_its_report(tmp_path: Path) -> None:
    command = Path(PYTHON).with_name("offbeat")
    race = ("race", "sync", "eager", "--task", "quadratic", "--cluster", "half-speed-4")
    said(tmp_path, command, *race, "--seeds", "1", "--trials", "3", "--report", "report.html")
    assert "echarts" in (tmp_path / "report.html").read_text()


def checked(folder: Path, script: str, code: int) -> list[str]:
    """What mypy says, from outside of the environment that it looks at."""
    options = ("--strict", "--config-file=", "--cache-dir", folder / "cache")
    command = (sys.executable, "-m", "mypy", *options, "--python-executable", PYTHON)
    return said(folder, *command, USER / script, code=code).splitlines()


def test_a_users_script_passes_a_strict_type_checker_and_runs(tmp_path: Path) -> None:
    assert checked(tmp_path, "right.py", code=0)[-1].startswith("Success: no issues found")
    assert "worker 0 of 1" in said(tmp_path, PYTHON, USER / "right.py")


def test_a_type_checker_finds_every_mistake_of_a_users_script(tmp_path: Path) -> None:
    lines = checked(tmp_path, "wrong.py", code=1)
    found = [re.search(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]$", line) for line in lines]
    text = (USER / "wrong.py").read_text().splitlines()
    wrong = [(number, re.search(r"# wrong: (.+)$", line)) for number, line in enumerate(text, 1)]
    expected = [(number, match[1]) for number, match in wrong if match]
    assert [(int(match[1]), match[2]) for match in found if match] == expected
