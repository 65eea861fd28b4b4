"""The examples of frameworks: short, and they learn on two workers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
Run = Callable[..., list[Any]]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_under_80_lines_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 80
    command = rf"\n(torchrun --nproc-per-node 2|python) examples/{re.escape(path.name)}\n"
    assert re.search(command, text)


def _example(path: str) -> str:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # as torchrun does
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.real
@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("framework", "name", "learnt"),
    [
        ("lightning", "02_lightning.py", lambda accuracy: accuracy > 90),
        ("transformers", "03_transformers.py", lambda loss: loss < 1.0),
        ("accelerate", "04_accelerate.py", lambda accuracy: accuracy > 90),
    ],
)
def test_an_example_learns_on_two_workers(
    framework: str,
    name: str,
    learnt: Callable[[float], bool],
    framework_workers: Run,
) -> None:
    pytest.importorskip(framework)
    zero, one = framework_workers(_example, str(EXAMPLES / name))
    found = re.search(r"^workers 2 .* (\S+?)%?$", zero, re.MULTILINE)
    assert found is not None, zero
    assert learnt(float(found[1]))
    assert "workers 2" not in one


@pytest.mark.real  # a process of its own: what frameworks keep is the whole process's
@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("framework", "name", "learnt"),
    [
        ("lightning", "02_lightning.py", lambda accuracy: accuracy > 90),
        ("transformers", "03_transformers.py", lambda loss: loss < 1.0),
        ("accelerate", "04_accelerate.py", lambda accuracy: accuracy > 80),  # four: fewer rounds
    ],
)
def test_an_example_learns_on_virtual_workers(
    framework: str, name: str, learnt: Callable[[float], bool], tmp_path: Path
) -> None:
    pytest.importorskip(framework)
    command = [sys.executable, "-m", "offbeat", "simulate", str(EXAMPLES / name)]
    done = subprocess.run(
        [*command, "--cluster", "half-speed-4"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^workers 4 .* (\S+?)%?$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert learnt(float(found[1]))
