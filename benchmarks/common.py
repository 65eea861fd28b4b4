"""What every benchmark shares: its options, a place for its result, and medians with spread."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEADY = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "33554432"}
"""For the environment of contestants. glibc gives freed memory back to the system, or not, by what
lies on top of the heap: without these settings whoever was set up last pays for page faults that
the others do not have."""


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="under 60 seconds, less certain")
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser


def spread(values: Sequence[float]) -> str:
    """Say a median with its quartiles."""
    ordered = sorted(values)
    if len(ordered) < 4:
        return f"{statistics.median(ordered):.3f} ({ordered[0]:.3f}..{ordered[-1]:.3f})"
    low, middle, high = statistics.quantiles(ordered, n=4)
    return f"{middle:.3f} (quartiles {low:.3f}..{high:.3f}, n={len(ordered)})"


def ratio_of_means(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return mean over mean, and between which values 90 % of such ratios lie.

    The spread is that over resampled values (a bootstrap): for latencies that differ by design from
    round to round, where a median of ratios would be another quantity than the ratio of means.
    """
    draw = random.Random(0).choices
    drawn = sorted(
        statistics.fmean(draw(above, k=len(above))) / statistics.fmean(draw(below, k=len(below)))
        for _ in range(1000)
    )
    return statistics.fmean(above) / statistics.fmean(below), drawn[50], drawn[950]


def held(path: Path | None) -> list[dict[str, Any]]:
    """The rows that a file of figures has already."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures and where they were measured."""
    if path is None:
        return
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "commit": _commit(),
    }
    path.write_text(json.dumps({**figures, "measured": machine}, indent=2) + "\n")
    print(f"written: {path}")


def torchrun(script: str, processes: int, *arguments: str) -> None:
    """Run a benchmark's own file again, on several processes."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={processes}", script, *arguments),
    ]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **STEADY, **os.environ})


def fashion_folder() -> Path | None:
    """Where Fashion-MNIST is, if it is installed; $OFFBEAT_FASHION_MNIST names another place."""
    default = "/usr/share/datasets/fashion-mnist"
    folder = Path(os.environ.get("OFFBEAT_FASHION_MNIST", default))
    return folder if (folder / "train-images-idx3-ubyte.gz").exists() else None


@cache
def fashion(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Read images and labels; an idx file is a header of 16 or 8 bytes, then bytes."""
    pixels, labels = (
        torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8)
        for path, header in (
            (folder / f"{part}-images-idx3-ubyte.gz", 16),
            (folder / f"{part}-labels-idx1-ubyte.gz", 8),
        )
    )
    return (pixels.view(-1, 1, 28, 28).float() / 255 - 0.286) / 0.353, labels.long()


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"
