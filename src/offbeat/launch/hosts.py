"""Other hosts: their names, the way to node 0, by which interface it leads, and their silence."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from offbeat.launch.job import LaunchError, Store, reach_store
from offbeat.worlds.patience import lost_s

Pause = Callable[[float], None]
"""Sleeps, and raises when the launcher is told to end meanwhile."""


def ask_for_names_briefly() -> None:
    """Have a name server's lost answer hold up this process for 1 s, not for 5.

    c10d asks for the name of whoever connects to a store, on the only thread that serves it. All
    clients wait meanwhile, and after `OFFBEAT_LOST_S` they would take the store for lost. Only C
    sees this variable: it is not in `os.environ`, which is what workers are given.
    """
    os.putenv("RES_OPTIONS", f"timeout:1 {os.environ.get('RES_OPTIONS', '')}".rstrip())


def connect(address: str, port: int, patience_s: float, pause: Pause) -> tuple[Store, str]:
    """Reach the store of node 0 when it is there; with this host's address on the way to it."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0) as connection:
                mine = str(connection.getsockname()[0])
            break
        except socket.gaierror as error:
            raise LaunchError(f"--master-addr {address}: {error.strerror}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no launcher of node 0 was reached at {address}:{port} within "
                    f"{patience_s:g} s ({error.strerror or error}); start it there with "
                    f"--node-rank 0 --master-port {port}, and look at firewalls"
                ) from None
        pause(0.2)
    return reach_store(address, port), mine


def interface_of(address: str) -> str | None:
    """The name of the network interface with this IPv4 address, unless it is a loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asking.fileno(), 0x8915, request)  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return None if address.startswith("127.") else name
    return None


def silence_s() -> float:
    """A node whose launcher has said nothing for so long counts as lost."""
    try:
        return 3 * lost_s() + 1
    except ValueError as error:
        raise LaunchError(str(error)) from None
