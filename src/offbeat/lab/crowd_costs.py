"""What a job costs where there is a server: the worker's computing, and two messages.

The server is where worker 0 is, so that its own messages are free. A gradient that goes up costs
what the network says of one message. What goes down because of one gradient leaves over the
server's link, one message after the other: the parameters, or, to a worker that has the newest
already, a word. Nobody begins before it has heard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf

import torch
from torch import Tensor

from offbeat.clusters import Cluster
from offbeat.clusters.device import Device
from offbeat.clusters.network import Network

Seconds = Callable[[Tensor, Tensor], Tensor] | Sequence[float]
"""Of many jobs at once, from their workers and their numbers; or by worker, always the same."""

SERVER = 0
_WORD_BYTES = 0


class Costs:
    """When jobs end that begin now."""

    def __init__(
        self,
        seconds: Seconds | Cluster,
        size: int,
        network: Network | None,
        model_bytes: int,
        samples: float,
        seed: int,
    ) -> None:
        self._gone_s: dict[int, float] = {}
        self._devices: list[Device] = []
        if isinstance(seconds, Cluster):
            cluster = seconds.resized(size)
            network = cluster.network if network is None else network
            self._gone_s = _gone_s(cluster)
            self._devices = [cluster.device(rank, seed) for rank in range(size)]
        elif not callable(seconds) and len(seconds) != size:
            raise ValueError(f"seconds are of {len(seconds)} workers, but there are {size}")
        self._seconds = seconds
        self._samples = samples
        self._model_bytes = model_bytes
        self._network = None if network is None or _is_free(network) else network
        if self._network is not None:
            up_s = self._network.point_to_point_s
            self._up_s = [up_s(rank, SERVER, model_bytes) for rank in range(size)]

    def ends_s(
        self, workers: Sequence[int], jobs: Sequence[int], now_s: float, sent: Collection[int]
    ) -> list[float]:
        """When the server has the gradients of these jobs, of workers of which some are sent to."""
        begin_s = [now_s] * len(workers)
        if self._network is not None:
            has = set(sent)
            told = {each: self._model_bytes if each in has else _WORD_BYTES for each in workers}
            begin_s = [now_s + s for s in self._network.messages_s(SERVER, told).values()]
        takes_s = self._takes_s(workers, jobs, begin_s)
        ends_s = [begin + takes for begin, takes in zip(begin_s, takes_s, strict=True)]
        if self._network is not None:
            ends_s = [end + self._up_s[each] for end, each in zip(ends_s, workers, strict=True)]
        if self._gone_s:
            ends_s = [
                end if end <= self._gone_s.get(each, inf) else inf
                for end, each in zip(ends_s, workers, strict=True)
            ]
        return ends_s

    def _takes_s(
        self, workers: Sequence[int], jobs: Sequence[int], at_s: Sequence[float]
    ) -> list[float]:
        if isinstance(self._seconds, Cluster):
            return [
                self._devices[each].seconds(job, self._samples, begin)
                for each, job, begin in zip(workers, jobs, at_s, strict=True)
            ]
        if callable(self._seconds):
            found: list[float] = self._seconds(torch.tensor(workers), torch.tensor(jobs)).tolist()
            return found
        return [self._seconds[each] for each in workers]


def _is_free(network: Network) -> bool:
    special = network.links or network.zones
    return not special and network.latency_s == 0 and network.bandwidth_bytes_per_s == inf


def _gone_s(cluster: Cluster) -> dict[int, float]:
    """From when on nothing comes from a worker that crashes or leaves."""
    gone_s = {}
    for rank in range(cluster.workers):
        if cluster.join_at(rank):
            raise ValueError(f"{cluster.name}: worker {rank} joins later, but a crowd is all there")
        if cluster.freezes(rank):
            raise ValueError(f"{cluster.name}: worker {rank} freezes, which nobody does in a crowd")
        moments = [at for at in (cluster.crash_at(rank), cluster.leave_at(rank)) if at is not None]
        if moments:
            gone_s[rank] = min(moments)
    return gone_s
