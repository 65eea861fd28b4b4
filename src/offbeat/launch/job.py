"""A job as its workers see it: who they are, by torchrun's environment variables, and its store."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat import launched

Store = TCPStore
DEFAULT_PORT = 29500
"""torchrun's, for several nodes. On one node a free port is taken."""


class LaunchError(Exception):
    """Workers cannot be started as asked; the words say what to do."""


@dataclass(frozen=True)
class Slot:
    """One worker's place in a job. A worker that is started again takes the same one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int = 0
    nodes: int = 1

    def worker(self, attempt: int) -> int:
        """The id of the worker in this slot after so many restarts: no other one ever has it."""
        return self.rank + attempt * self.world_size


def slots(per_node: list[int], node: int) -> list[Slot]:
    """The slots of one node, where each node has so many workers."""
    first, count = sum(per_node[:node]), per_node[node]
    return [
        Slot(first + local, sum(per_node), local, count, node, len(per_node))
        for local in range(count)
    ]


def variables(
    slot: Slot, address: str, port: int, run_id: str = "none", role: str = "default"
) -> dict[str, str]:
    """What torchrun tells a worker, whose job's store is served at this address."""
    return {
        "RANK": str(slot.rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": str(slot.world_size),
        "LOCAL_WORLD_SIZE": str(slot.local_world_size),
        "GROUP_RANK": str(slot.node),
        "GROUP_WORLD_SIZE": str(slot.nodes),
        "ROLE_NAME": role,
        "ROLE_RANK": str(slot.rank),
        "ROLE_WORLD_SIZE": str(slot.world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def survival_variables(slot: Slot, attempt: int) -> dict[str, str]:
    """What `offbeat launch` tells a worker besides; see `launched`."""
    wanted = os.environ.get(launched.SURVIVE, "1")
    told = {launched.SURVIVE: wanted, launched.WORKER: str(slot.worker(attempt))}
    return {**told, **join_variables(slot, attempt)} if attempt else told


def join_variables(slot: Slot, attempt: int) -> dict[str, str]:
    """What tells a worker that was started again to join the others."""
    return {launched.WORKER: str(slot.worker(attempt)), launched.JOIN: "1"}


def host_store(port: int = 0, address: str = "127.0.0.1") -> Store:
    """Serve the job's store in this process, so that any worker may die.

    At a socket of our own: torch's hears IPv6, and IPv4 by addresses such as ::ffff:127.0.0.1. The
    thread that serves all clients asks for the name of each that connects. Those are in no hosts
    file, so it waits for a name server: for 5 seconds if an answer is lost.
    """
    listening = _listen(address, port)
    try:
        return TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
    except RuntimeError as error:
        raise LaunchError(f"no port of this host could be opened: {error}") from None


def reach_store(address: str, port: int) -> Store:
    """A client of the store that another process serves."""
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    except RuntimeError as error:
        raise LaunchError(f"what answers at {address}:{port} is no store: {error}") from None


def _listen(address: str, port: int) -> socket.socket:
    """Open a port to all who come by this address of this host: to IPv4 alone, if it is one."""
    both = not _is_ipv4(address) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} of this host is taken: choose another one with --master-port, on all "
                "nodes; on a single node leave it away, and a free one is found"
            ) from None
        raise LaunchError(f"port {port} cannot be opened: {error.strerror}") from None


def _is_ipv4(address: str) -> bool:
    with suppress(OSError):
        socket.inet_pton(socket.AF_INET, address)
        return True
    return False
