"""Processes on one host or several: how they are started, watched and ended.

One supervisor for all that starts workers: `offbeat launch`, `offbeat race --world real` and
`offbeat.testing.processes`. They differ in what a worker runs and in what a loss means.
"""

from offbeat.launch.job import Slot, host_store, slots, variables
from offbeat.launch.supervisor import Supervisor, Worker, how

__all__ = ["Slot", "Supervisor", "Worker", "host_store", "how", "slots", "variables"]
