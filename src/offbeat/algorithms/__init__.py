"""One paper, one file."""

from offbeat.algorithms.abs import ABSSGD
from offbeat.algorithms.dasgd import DaSGD
from offbeat.algorithms.diloco import DiLoCo
from offbeat.algorithms.dropcompute import DropCompute
from offbeat.algorithms.eager import EagerSGD
from offbeat.algorithms.lbbsp import LBBSP
from offbeat.algorithms.local import LocalSGD
from offbeat.algorithms.msync import MSyncSGD
from offbeat.algorithms.nonblocking import NonblockingSGD
from offbeat.algorithms.sync import SyncSGD
from offbeat.algorithms.wagma import WAGMASGD
from offbeat.algorithms.waitfree import WaitFreeLocalSGD

__all__ = [
    "ABSSGD",
    "LBBSP",
    "WAGMASGD",
    "DaSGD",
    "DiLoCo",
    "DropCompute",
    "EagerSGD",
    "LocalSGD",
    "MSyncSGD",
    "NonblockingSGD",
    "SyncSGD",
    "WaitFreeLocalSGD",
]
