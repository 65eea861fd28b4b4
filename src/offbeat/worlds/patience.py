"""How long a program waits for others before it warns."""

from __future__ import annotations

import os


def stuck_s() -> float:
    """Return after how many seconds of waiting for others a program warns."""
    text = os.environ.get("OFFBEAT_STUCK_S", "") or "300"
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise ValueError(f"OFFBEAT_STUCK_S must be a number of seconds above 0, got {text!r}")
    return limit
