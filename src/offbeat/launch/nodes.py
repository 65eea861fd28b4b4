"""Several nodes: their launchers find each other over the store of node 0, and hear of each other.

    offbeat/launch/node/<n>    what node n brings, written once
    offbeat/launch/beat/<n>    grows while its launcher lives
    offbeat/launch/end/<n>     its workers have ended: `well`, or else why not
    offbeat/launch/stop        the job is over for all, and why

A call of a store whose host is frozen does not come back. So after the start a thread makes them,
and the launcher, which must hear signals, only looks at what it has found.
"""

from __future__ import annotations

import fcntl
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from offbeat import launched
from offbeat.launch.job import LaunchError, Store, reach_store

_PREFIX = "offbeat/launch"
BEAT_S = 0.25
SILENCE_S = 10.0
"""A node whose launcher has said nothing for so long counts as lost."""
WELL = "well"
Pause = Callable[[float], None]
"""Sleeps, and raises when the launcher is told to end meanwhile."""


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


class Nodes:
    """What one launcher knows of the others."""

    def __init__(self, store: Store, node: int, nodes: int) -> None:
        self._store: Any = store
        self.node = node
        self.nodes = nodes
        self.survives = False
        self.joined: set[int] = set()
        self.joiners: set[int] = set()
        """Ids of workers that were started again here; the thread asks whether they have joined."""
        self.ended: dict[int, str] = {}
        """Nodes whose workers have ended: `WELL`, or why."""
        self.stop = ""
        self._beats: dict[int, tuple[int, float]] = {}
        self._looked = threading.Condition()
        self._asked = 0
        self._served = 0.0
        self._answered = time.monotonic()
        self._to_say: list[tuple[str, str]] = []
        self._closing = False
        self._gone = False
        self._thread: threading.Thread | None = None

    def meet(self, workers: int, patience_s: float, pause: Pause) -> list[int]:
        """Say how many workers this node brings; return how many each one brings."""
        brings = json.dumps({"workers": workers, "nodes": self.nodes, "at": time.time_ns()})
        try:
            stands = bytes(self._store.compare_set(f"{_PREFIX}/node/{self.node}", "", brings))
            if stands.decode() != brings:
                raise LaunchError(
                    f"a launcher with --node-rank {self.node} is in this job already: give every "
                    f"node another number below {self.nodes}"
                )
            return self._met(time.monotonic() + patience_s, pause)
        except RuntimeError as error:
            raise LaunchError(f"the launcher of node 0 has gone: {error}") from None

    def _met(self, deadline: float, pause: Pause) -> list[int]:
        found: list[int] = []
        while len(found) < self.nodes:
            if self._store.check([f"{_PREFIX}/node/{len(found)}"]):
                said = json.loads(bytes(self._store.get(f"{_PREFIX}/node/{len(found)}")))
                self._check(len(found), said["nodes"])
                found.append(said["workers"])
            elif time.monotonic() > deadline:
                raise LaunchError(
                    f"node {len(found)} of {self.nodes} has not come in time: start its launcher, "
                    "or lower --nnodes"
                )
            else:
                pause(0.05)
        return found

    def _check(self, node: int, nodes: int) -> None:
        if nodes != self.nodes:
            raise LaunchError(
                f"node {node} was started with --nnodes {nodes}, this one with {self.nodes}: "
                "give all the same"
            )

    def watch(self, wake: Callable[[], None]) -> None:
        """Begin to look, and to call `wake` when something has changed."""
        self._thread = threading.Thread(target=self._watch, args=(wake,), daemon=True)
        self._thread.start()

    def look(self, patience_s: float = 2.0) -> None:
        """Wait until everything has been looked at anew; not for long."""
        with self._looked:
            self._asked += 1
            wanted = self._asked
            self._looked.notify_all()
            self._looked.wait_for(lambda: self._served >= wanted, patience_s)

    def say_end(self, why: str) -> None:
        """Tell the others that no worker runs here any more."""
        self._say(f"{_PREFIX}/end/{self.node}", why)

    def say_stop(self, why: str) -> None:
        """Tell the others to end their workers."""
        self._say(f"{_PREFIX}/stop", why)

    def others_running(self) -> bool:
        """Say whether some other node has workers, as far as is known."""
        return len({*self.ended, self.node}) < self.nodes

    def close(self) -> None:
        """Stop looking."""
        with self._looked:
            self._closing = True
            self._looked.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=0.5)

    def _say(self, key: str, value: str) -> None:
        with self._looked:
            self._to_say.append((key, value))
        self.look()

    def _watch(self, wake: Callable[[], None]) -> None:
        if self.nodes > 1:
            threading.Thread(target=self._watch_silence, args=(wake,), daemon=True).start()
        while not self._closing and not self._gone:
            before, serving = self._known(), self._asked
            try:
                self._look_once()
            except RuntimeError as error:
                self._gone = True
                self.stop = f"the store of node 0 is gone ({str(error).splitlines()[0]})"
            self._answered = time.monotonic()
            if self._known() != before:
                wake()
            with self._looked:
                self._served = math.inf if self._gone else serving
                self._looked.notify_all()
                often = self.nodes > 1 or self.joiners - self.joined
                self._looked.wait_for(self._is_wanted, BEAT_S if often else None)

    def _is_wanted(self) -> bool:
        return self._closing or self._asked > self._served

    def _watch_silence(self, wake: Callable[[], None]) -> None:
        while not self._closing and not self.stop:
            time.sleep(BEAT_S)
            if time.monotonic() - self._answered > SILENCE_S:
                self.stop = f"the store of node 0 has not answered for {SILENCE_S:g} s"
                wake()

    def _known(self) -> tuple[object, ...]:
        return self.survives, self.stop, len(self.ended), len(self.joined)

    def _look_once(self) -> None:
        with self._looked:
            saying, self._to_say = self._to_say, []
        for key, value in saying:
            self._store.compare_set(key, "", value)
        self.survives = self._store.check([launched.SURVIVE_KEY])
        for worker in self.joiners - self.joined:
            if self._store.check([launched.joined_key(worker)]):
                self.joined.add(worker)
        if self.nodes > 1:
            self._look_at_nodes()

    def _look_at_nodes(self) -> None:
        self._store.add(f"{_PREFIX}/beat/{self.node}", 1)
        if self._store.check([f"{_PREFIX}/stop"]):
            self.stop = bytes(self._store.get(f"{_PREFIX}/stop")).decode()
        now = time.monotonic()
        for node in set(range(self.nodes)) - {self.node, *self.ended}:
            beats = self._store.add(f"{_PREFIX}/beat/{node}", 0)
            if self._beats.get(node, (-1, now))[0] != beats:
                self._beats[node] = beats, now
            if self._store.check([f"{_PREFIX}/end/{node}"]):
                self.ended[node] = bytes(self._store.get(f"{_PREFIX}/end/{node}")).decode()
            elif now - self._beats[node][1] > SILENCE_S:
                self.ended[node] = f"its launcher has said nothing for {SILENCE_S:g} s"
