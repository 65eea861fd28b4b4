"""One paper, one file."""

from offbeat.algorithms.abs import ABSSGD
from offbeat.algorithms.asgd import ASGD
from offbeat.algorithms.dasgd import DaSGD
from offbeat.algorithms.decentlam import DecentLaM
from offbeat.algorithms.diloco import DiLoCo
from offbeat.algorithms.dmsgd import DmSGD
from offbeat.algorithms.dpsgd import DPSGD
from offbeat.algorithms.dropcompute import DropCompute
from offbeat.algorithms.eager import EagerSGD
from offbeat.algorithms.edm import EDM
from offbeat.algorithms.lbbsp import LBBSP
from offbeat.algorithms.local import LocalSGD
from offbeat.algorithms.msync import MSyncSGD
from offbeat.algorithms.nonblocking import NonblockingSGD
from offbeat.algorithms.rennala import RennalaSGD
from offbeat.algorithms.rescaled import RescaledASGD
from offbeat.algorithms.ringleader import RingleaderASGD
from offbeat.algorithms.ringmaster import RingmasterASGD
from offbeat.algorithms.sync import SyncSGD
from offbeat.algorithms.tracking import MomentumTracking
from offbeat.algorithms.wagma import WAGMASGD
from offbeat.algorithms.waitfree import WaitFreeLocalSGD

__all__ = [
    "ABSSGD",
    "ASGD",
    "DPSGD",
    "EDM",
    "LBBSP",
    "WAGMASGD",
    "DaSGD",
    "DecentLaM",
    "DiLoCo",
    "DmSGD",
    "DropCompute",
    "EagerSGD",
    "LocalSGD",
    "MSyncSGD",
    "MomentumTracking",
    "NonblockingSGD",
    "RennalaSGD",
    "RescaledASGD",
    "RingleaderASGD",
    "RingmasterASGD",
    "SyncSGD",
    "WaitFreeLocalSGD",
]
