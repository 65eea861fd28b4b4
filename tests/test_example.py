"""The first example: short, and one script for one process, for torchrun and for a simulation."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat.lab import digits

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/01_train.py"
OFFBEAT = str(Path(sys.executable).with_name("offbeat"))


def output(*command: str) -> str:
    """What a command prints; it and all that it started end within 100 s."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out


def learnt(printed: str, workers: int) -> bool:
    found = re.search(rf"^workers {workers} .* test accuracy (\S+)%$", printed, re.MULTILINE)
    assert found is not None, printed
    return float(found[1]) > 95


def test_the_example_is_under_40_lines_and_says_how_to_run_it() -> None:
    text = (ROOT / EXAMPLE).read_text()
    assert len(text.splitlines()) < 40
    for command in ("python", "torchrun --nproc-per-node 2", "offbeat simulate"):
        assert f"\n{command} {EXAMPLE}" in text


@pytest.mark.slow
def test_the_example_learns_in_one_process() -> None:
    assert learnt(output(sys.executable, EXAMPLE), workers=1)


@pytest.mark.real
def test_the_example_learns_under_torchrun() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--master-port", port)
    assert learnt(output(*torchrun, "--nproc-per-node", "2", EXAMPLE), workers=2)


@pytest.mark.slow
def test_the_example_learns_on_64_virtual_workers() -> None:
    printed = output(OFFBEAT, "simulate", EXAMPLE, "--cluster", "uniform-8", "--workers", "64")
    assert learnt(printed, workers=64)
    assert "virtual seconds" in printed


def test_digits_are_the_whole_set_scaled_to_1() -> None:
    images, labels = digits.load()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_split_into_two_parts_by_the_seed_alone() -> None:
    train_x, train_y, test_x, test_y = first = digits.split(seed=1)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, digits.split(seed=1), strict=True))
    assert not torch.equal(test_y, digits.split(seed=2)[3])
    assert (len(train_x), len(train_y), len(test_x), len(test_y)) == (1438, 1438, 359, 359)
    rows = torch.cat([train_x, test_x]).tolist()
    assert sorted(rows) == sorted(digits.load()[0].tolist())


def test_a_caller_may_change_the_digits_it_has_loaded() -> None:
    digits.load()[0].zero_()
    assert digits.load()[0].any()
