"""Methods against forgetting, one short file each."""

from offbeat.federated.methods.base import Method
from offbeat.federated.methods.ewc import EWC
from offbeat.federated.methods.fedcbdr import FedCBDR
from offbeat.federated.methods.importance import Importance
from offbeat.federated.methods.joint import Joint
from offbeat.federated.methods.lwf import LwF
from offbeat.federated.methods.uniform import Uniform

__all__ = ["EWC", "FedCBDR", "Importance", "Joint", "LwF", "Method", "Uniform"]
