"""A whole script under the eyes of a doctor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.doctor.doctor import Doctor
from offbeat.doctor.report import Diagnosis, diagnose
from offbeat.scripts import run_script
from offbeat.worlds.real import under_torchrun

_WAIT_S = 60.0


def examine(script: Path, arguments: Sequence[str]) -> Diagnosis | None:
    """Run a script as `python` would; on worker 0, return what all of them have seen.

    A script that fails raises here, on the worker where it fails.
    """
    doctor = Doctor()
    try:
        run_script(script, arguments)
    finally:
        doctor.close()
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
    key = f"offbeat-doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{{}}".format
    store.set(key(rank), mine)
    if rank != 0:
        return None
    return diagnose([_taken(store, key(each)) for each in range(size)])


def _taken(store: TCPStore, key: str) -> str:
    """What is written there, once: the store may outlive this run, and see the next."""
    words = str(store.get(key).decode())
    store.delete_key(key)
    return words
