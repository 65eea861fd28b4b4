"""What a cluster file has in store for a real worker that is paced by it: a crash, freezes, a join.

A worker that joins is a process from the start, and comes to the others at its moment.

A process cannot stop itself and go on later: a second process, which does nothing else, sends it
SIGSTOP and SIGCONT. It ends when the pipe to it does, and so with its worker at the latest.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from offbeat.clusters import Cluster
from offbeat.worlds.store import Clients

BEGAN = "began"
"""The key by which those who are there from the start say that they are."""

_FREEZE = """
import contextlib, os, select, signal, sys, time
worker, *moments = map(float, sys.argv[1:])
for at, until in zip(moments[::2], moments[1::2]):
    for moment, sent in (at, signal.SIGSTOP), (until, signal.SIGCONT):
        if select.select([0], [], [], max(moment - time.monotonic(), 0.0))[0]:
            sys.exit()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker), sent)
"""


def comes(at_s: float, clients: Clients) -> float:
    """Wait until a worker that joins is to come; when the others began, by the monotonic clock."""
    clients.get(BEGAN)
    began = time.monotonic()
    time.sleep(at_s)
    return began


class Scripted:
    """One worker's crash and freezes, from when its world begins until it is let go of."""

    def __init__(self, cluster: Cluster | None, rank: int) -> None:
        self._crash_s = None if cluster is None else cluster.crash_at(rank)
        self._freezes = [] if cluster is None else cluster.freezes(rank)
        self._timer: threading.Timer | None = None
        self._freezer: subprocess.Popen[bytes] | None = None

    def begin(self, began_s: float) -> None:
        """Moments count from this one, of the monotonic clock; what has passed does not happen."""
        now = time.monotonic()
        if self._crash_s is not None and began_s + self._crash_s >= now:
            left_s = began_s + self._crash_s - now
            self._timer = threading.Timer(left_s, lambda: os.kill(os.getpid(), signal.SIGKILL))
            self._timer.daemon = True
            self._timer.start()
        ahead = [(at_s, for_s) for at_s, for_s in self._freezes if began_s + at_s >= now]
        if ahead:
            moments = [began_s + each for at_s, for_s in ahead for each in (at_s, at_s + for_s)]
            code = [sys.executable, "-I", "-c", _FREEZE, str(os.getpid())]
            self._freezer = subprocess.Popen([*code, *map(repr, moments)], stdin=subprocess.PIPE)

    def cancel(self) -> None:
        """Nothing of it happens any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._freezer is not None:
            freezer, self._freezer = self._freezer, None
            freezer.communicate()
