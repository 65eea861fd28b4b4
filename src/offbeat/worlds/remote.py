"""The job's store, for a process that is no worker: one that a worker's DataLoader has started.

It was forked, and its copies of the worker's connections are not its to use; or it was spawned, and
knows only what it was sent. So it needs the address of the store, which can be sent, and makes a
connection of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.errors import WorldError
from offbeat.worlds import base
from offbeat.worlds.real import under_torchrun


@dataclass(frozen=True)
class JobStore:
    """Where the store of a job is, and which worker of it this process belongs to."""

    host: str
    port: int
    attempt: str
    rank: int
    size: int

    @classmethod
    def here(cls) -> JobStore | None:
        """That of the job which this process is a worker of, or was forked from; None if alone."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if dist.is_available() and dist.is_initialized():
            store: Any = dist.distributed_c10d._get_default_store()
            server = getattr(store, "_underlying_non_prefix_store", store)
            if not isinstance(server, TCPStore):
                raise WorldError(
                    f"the job's store is a {type(server).__name__}, which other processes cannot "
                    "reach: start the job with torchrun, or init_process_group by TCP"
                )
            place = server.host, server.port
            return cls(*place, attempt, dist.get_rank(), dist.get_world_size())
        if not under_torchrun():
            return None
        variables = os.environ
        place = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        return cls(*place, attempt, int(variables["RANK"]), int(variables["WORLD_SIZE"]))

    def control(self) -> base.Control:
        """Connect; once in every process."""
        place = os.getpid(), self
        if place not in _connected:  # a forked process finds those of its parent, and lets them be
            _connected[place] = _Control(self)
        return _connected[place]


_connected: dict[tuple[int, JobStore], _Control] = {}


class _Control(base.Control):
    """Values beside those of the job's worlds, which its processes share from first to last."""

    def __init__(self, store: JobStore) -> None:
        self._where = f"{store.host}:{store.port}"
        client = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        self._client: Any = PrefixStore(f"offbeat/remote/{store.attempt}", client)

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            yield self._client
        except RuntimeError as error:
            words = str(error).partition("\n")[0][:200]
            raise WorldError(
                f"the job's store at {self._where} does not answer the reader of shards any more: "
                f"{words}. If it is lost, DealShards does not go on with its standby: start again "
                "from a checkpoint"
            ) from error

    def set(self, key: str, value: bytes) -> None:
        with self._asking() as client:
            client.set(key, value)

    def get(self, key: str) -> bytes:
        with self._asking() as client:
            return bytes(client.get(key))

    def wait(self, key: str) -> None:
        self.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._asking() as client:
            return int(client.add(key, amount))

    def set_once(self, key: str, value: bytes) -> bytes:
        with self._asking() as client:
            return bytes(client.compare_set(key, "", value.decode()))

    def delete(self, key: str) -> None:
        with self._asking() as client:
            client.delete_key(key)
