"""How long workers wait for each other, as the environment says."""

from __future__ import annotations

import os


def stuck_s() -> float:
    """Return after how many seconds of waiting for others a program warns."""
    return _seconds("OFFBEAT_STUCK_S", "300")


def lost_s() -> float:
    """Return after how many seconds without an answer from its host a worker is lost."""
    return _seconds("OFFBEAT_LOST_S", "3", below=1e6)


def _seconds(name: str, usual: str, below: float | None = None) -> float:
    text = os.environ.get(name, "") or usual
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit > 0 or (below is not None and limit >= below):
        raise ValueError(f"{name} must be a number of seconds above 0, got {text!r}")
    return limit
