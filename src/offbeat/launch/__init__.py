"""Processes on one host or several: how they are started, watched and ended.

One supervisor for all that starts workers: `offbeat launch`, `offbeat race --world real` and
`offbeat.testing.processes`. They differ in what a worker runs and in what a loss means.
"""

from offbeat.launch.functions import Function, end_with_parent
from offbeat.launch.job import LaunchError, Slot, host_store, join_variables, slots, variables
from offbeat.launch.supervisor import Supervisor, Worker, how

__all__ = [
    "Function",
    "LaunchError",
    "Slot",
    "Supervisor",
    "Worker",
    "end_with_parent",
    "host_store",
    "how",
    "join_variables",
    "slots",
    "variables",
]
