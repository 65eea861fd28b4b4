"""Federated class-incremental learning: averaging, replay, and sums that hide their parts.

`learn` is one client's program, in every world. The pieces can be used by themselves: partitions
and streams, leverage scores, quotas, losses, secure sums. See docs/federated.md.
"""

from offbeat.federated.averaging import FedAvg
from offbeat.federated.learning import History, Settings, learn
from offbeat.federated.losses import Temperatures, adjusted
from offbeat.federated.methods import (
    EWC,
    FedCBDR,
    Importance,
    Joint,
    LwF,
    Method,
    Uniform,
)
from offbeat.federated.partitions import dirichlet, per_class
from offbeat.federated.quotas import quotas
from offbeat.federated.streams import Stream, class_groups

__all__ = [
    "EWC",
    "FedAvg",
    "FedCBDR",
    "History",
    "Importance",
    "Joint",
    "LwF",
    "Method",
    "Settings",
    "Stream",
    "Temperatures",
    "Uniform",
    "adjusted",
    "class_groups",
    "dirichlet",
    "learn",
    "per_class",
    "quotas",
]
