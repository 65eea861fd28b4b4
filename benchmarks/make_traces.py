"""Make the CSV files of the clusters that ship with offbeat from published recordings.

python benchmarks/make_traces.py FOLDER

FOLDER holds `bytedance_llm_straggler_ops.npz` (operation times of ByteDance-Seed/StragglerAnalysis,
axes: step, data-parallel rank, pipeline stage, micro-batch) and
`ucf101_video_lengths_10fps.csv.gz` (split, class, video, frames at 10 per second). The cluster
files beside the results say where the data come from, and what is measured and what assumed.
"""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import numpy as np

NAMED = Path(__file__).parents[1] / "src" / "offbeat" / "clusters" / "named"
NATIVE = 2.5  # UCF101 has 25 frames a second, the listing 10


def bytedance(folder: Path) -> None:
    """One row per micro-batch, one column per data-parallel rank: forward and backward seconds."""
    with np.load(folder / "bytedance_llm_straggler_ops.npz") as ops:
        first_stage = (ops["SE_fwd"] + ops["SE_bwd"])[:, :, 0, :]
    steps, ranks, micro_batches = first_stage.shape
    rows = first_stage.transpose(0, 2, 1).reshape(steps * micro_batches, ranks)
    lines = [
        f"# {steps} sampled steps of {micro_batches} micro-batches each; see bytedance-32.toml",
        ",".join(f"rank{rank}" for rank in range(ranks)),
        *(",".join(f"{seconds:.4f}" for seconds in row) for row in rows),
    ]
    (NAMED / "bytedance-32.csv").write_text("\n".join(lines) + "\n")


def ucf101(folder: Path) -> None:
    """One row per training video: its frames."""
    with gzip.open(folder / "ucf101_video_lengths_10fps.csv.gz", "rt") as listing:
        frames = sorted(NATIVE * float(row[3]) for row in csv.reader(listing) if row[0] == "train")
    lines = ["# the training videos of UCF101; see ucf101-8.toml", "frames"]
    lines += [f"{count:g}" for count in frames]
    (NAMED / "ucf101-8.csv").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    bytedance(Path(sys.argv[1]))
    ucf101(Path(sys.argv[1]))
