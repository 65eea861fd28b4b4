"""Cluster files: how fast the workers are, how their speed varies, and what connects them.

A cluster is read from TOML and answers three questions, each without hidden state: what a
micro-batch costs on a worker (`Cluster.device`), what a message or a collective costs
(`Cluster.network`), and who crashes, leaves or joins when. docs/clusters.md lists every key.

    model.py    Cluster: the file as a whole, loading, resizing, describing
    device.py   what a micro-batch costs on one worker
    noise.py    what makes the same micro-batch take longer now and then
    events.py   scripted changes: slow, crash, leave, join, freeze
    network.py  what communication costs
    sharing.py  what each of several transfers gets of a link
    overhead.py what the host costs beyond both
    draws.py    random numbers as a pure function of (seed, rank, step)
    tables.py   what every table of the file has in common; TOML and CSV in, clear errors out
    write.py    a cluster as TOML text again
"""

from offbeat.clusters.device import Device
from offbeat.clusters.model import Cluster, named
from offbeat.clusters.network import Network

__all__ = ["Cluster", "Device", "Network", "named"]
