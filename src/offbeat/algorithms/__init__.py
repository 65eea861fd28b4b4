"""One paper, one file."""

from offbeat.algorithms.sync import SyncSGD

__all__ = ["SyncSGD"]
