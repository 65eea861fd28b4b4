"""The devices of Gloo: threads and ports, which all groups of a process share."""

from __future__ import annotations

import ctypes
import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offbeat.worlds.sockets import listening_ports, noting

CONNECT_S = 60.0
"""How long members may take to connect, once all are there to do it."""
_Gloo: Any = dist.ProcessGroupGloo
_devices: list[Any] = []
ports: set[int] = set()
"""At which they listen."""
_making_devices = threading.Lock()


def options() -> Any:
    """As Gloo's own, but with the devices that all groups of this process share.

    A device is a thread and a port. To end one takes 10 to 20 ms, so they stay for the next group,
    to the end of the process.
    """
    with _making_devices:
        if not _devices:
            with noting() as sockets:
                _devices.extend(_new_devices())
            ports.update(listening_ports(sockets))
    options = _Gloo._Options()
    options._devices = list(_devices)
    options._threads = 2 * len(_devices)
    options._timeout = timedelta(seconds=CONNECT_S)
    return options


def _new_devices() -> list[Any]:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        devices = [_Gloo.create_device(interface=each) for each in interfaces.split(",")]
    else:
        devices = [_Gloo.create_default_device()]
    for device in devices:  # never ended: a forked child, which has no such thread, would wait
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
    return devices


def _forget_in_child() -> None:
    """A forked child has no part in the job, and no such threads."""
    _devices.clear()
    ports.clear()


os.register_at_fork(after_in_child=_forget_in_child)
