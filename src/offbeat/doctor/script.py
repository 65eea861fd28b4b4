"""A whole script under the eyes of a doctor."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.doctor.doctor import Doctor
from offbeat.doctor.report import Diagnosis, diagnose
from offbeat.worlds.real import under_torchrun

_WAIT_S = 60.0
_ended: list[Any] = []
"""What scripts have left behind, which lives as long as the process, as it would without us.

To let go of a model in DistributedDataParallel right after its last backward pass may hang: its
reducer, freed under the GIL, joins a thread of Gloo that waits for the GIL (seen with torch 2.13).
"""


def examine(script: Path, arguments: Sequence[str]) -> Diagnosis | None:
    """Run a script as `python` would; on worker 0, return what all of them have seen.

    A script that fails raises here, on the worker where it fails.
    """
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    doctor = Doctor()
    try:
        _ended.append(runpy.run_path(str(script), run_name="__main__"))
    except SystemExit as ended:
        _ended.append(ended)
        if ended.code:
            raise
    finally:
        doctor.close()
        sys.argv, sys.path[:] = argv, path
    return _compared(doctor.notes())


def _compared(mine: str) -> Diagnosis | None:
    """Tell worker 0, by the store that torchrun keeps until the last worker has ended."""
    if not under_torchrun():
        return diagnose([mine])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=_WAIT_S),
    )
    store.set(f"offbeat-doctor/{rank}", mine)
    if rank != 0:
        return None
    return diagnose([store.get(f"offbeat-doctor/{each}").decode() for each in range(size)])
