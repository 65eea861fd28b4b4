"""One paper, one file."""

from offbeat.algorithms.eager import EagerSGD
from offbeat.algorithms.msync import MSyncSGD
from offbeat.algorithms.sync import SyncSGD

__all__ = ["EagerSGD", "MSyncSGD", "SyncSGD"]
