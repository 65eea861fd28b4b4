"""Data-parallel training that does not wait for the slowest worker."""

from offbeat import errors, theory
from offbeat.algorithm import Algorithm
from offbeat.algorithms import (
    ABSSGD,
    ASGD,
    DPSGD,
    EDM,
    LBBSP,
    WAGMASGD,
    DaSGD,
    DecentLaM,
    DiLoCo,
    DmSGD,
    DropCompute,
    EagerSGD,
    LocalSGD,
    MomentumTracking,
    MSyncSGD,
    NonblockingSGD,
    RennalaSGD,
    RescaledASGD,
    RingleaderASGD,
    RingmasterASGD,
    SyncSGD,
    WaitFreeLocalSGD,
)
from offbeat.attach import Attachment, attach
from offbeat.clusters import Cluster
from offbeat.codecs import GlobalQSGD, Half, Int4, Int8
from offbeat.data import Deal, DealShards, Survivors
from offbeat.replica import Stats
from offbeat.rounds import Partial, Round, partial_all_reduce
from offbeat.worlds import Run, rank, run, world_size

__version__ = "0.1.0"

__all__ = [
    "ABSSGD",
    "ASGD",
    "DPSGD",
    "EDM",
    "LBBSP",
    "WAGMASGD",
    "Algorithm",
    "Attachment",
    "Cluster",
    "DaSGD",
    "Deal",
    "DealShards",
    "DecentLaM",
    "DiLoCo",
    "DmSGD",
    "DropCompute",
    "EagerSGD",
    "GlobalQSGD",
    "Half",
    "Int4",
    "Int8",
    "LocalSGD",
    "MSyncSGD",
    "MomentumTracking",
    "NonblockingSGD",
    "Partial",
    "RennalaSGD",
    "RescaledASGD",
    "RingleaderASGD",
    "RingmasterASGD",
    "Round",
    "Run",
    "Stats",
    "Survivors",
    "SyncSGD",
    "WaitFreeLocalSGD",
    "attach",
    "errors",
    "partial_all_reduce",
    "rank",
    "run",
    "theory",
    "world_size",
]
