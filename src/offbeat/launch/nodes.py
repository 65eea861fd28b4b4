"""Several nodes: their launchers find each other over the store of node 0, and hear of each other.

    offbeat/launch/node/<n>    what node n brings, written once
    offbeat/launch/beat/<n>    grows while its launcher lives
    offbeat/launch/end/<n>     its workers have ended: `well`, or else why not
    offbeat/launch/stop        the job is over for all, and why

Node 1 hosts the standby of that store. If node 0 is lost, or says nothing for long, and the job
survives losses, launchers go on there. Workers do so by themselves, and often sooner; they leave
word in the standby, and launchers follow. So what a launcher has to say of its end it says to both.

A call of a store whose host is frozen does not come back. So after the start one thread calls the
store, another one the standby, a third one looks how long the first has waited, and the launcher,
which must hear signals, only looks at what they have found.

    calls the store    waits for an answer of node 0 ─────────────────┐ error: uses the standby
    calls the standby  ───────────────── "the workers have moved" ─ cuts the connection
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from offbeat import launched
from offbeat.launch.hosts import Pause, silence_s
from offbeat.launch.job import LaunchError, Store, reach_store
from offbeat.launch.streams import say
from offbeat.worlds.sockets import addresses, cut_towards

_PREFIX = "offbeat/launch"
BEAT_S = 0.25
_FOLLOW_S = 1.0
"""So long after the workers have moved, the store may still say by an error that it is gone."""
WELL = "well"


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
        self.standby = ""
        """Host and port of the standby; empty if there is none."""
        self.host = 0
        """The node whose launcher has the store."""
        self._spare: Any = None
        self._silence_s = silence_s()
        self._beats: dict[int, tuple[int, float]] = {}
        """Of each node: how many it has made, and for how long it has made none."""
        self._looked_at = time.monotonic()
        self._looked = threading.Condition()
        self._asked = 0
        self._served = 0.0
        self._served_there = math.inf
        self._answers = 0
        self._to_say: list[tuple[str, str]] = []
        self._to_say_there: list[tuple[str, str]] = []
        self._closing = False
        self._gone = False
        self._silent = ""
        self._moved = False
        self._cut = False
        self._threads: list[threading.Thread] = []

    def meet(
        self, workers: int, patience_s: float, pause: Pause, standby: tuple[str, Store] | None
    ) -> list[int]:
        """Say how many workers this node brings, and what else; return how many each one brings."""
        told: dict[str, Any] = {"workers": workers, "nodes": self.nodes, "at": time.time_ns()}
        if standby is not None:
            address, self._spare = standby
            told["standby"] = f"{address}:{self._spare.port}"
        brings = json.dumps(told)
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
                self.standby = self.standby or said.get("standby", "")
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

    def reach_standby(self) -> None:
        """Connect to the standby, if there is one; all nodes are there."""
        if self.standby and self._spare is None:
            address, _, port = self.standby.rpartition(":")
            try:
                self._spare = reach_store(address, int(port))
            except LaunchError as error:
                say(f"there is no standby of the store for this node: {error}")
                self.standby = ""

    def watch(self, wake: Callable[[], None]) -> None:
        """Begin to look, and to call `wake` when something has changed."""
        self._start(self._watch, wake)
        if self.nodes > 1:
            self._start(self._watch_silence, wake)
        if self._spare is not None:
            self._served_there = 0.0
            self._start(self._watch_standby, wake)

    def _start(self, run: Callable[[Callable[[], None]], None], wake: Callable[[], None]) -> None:
        name = f"offbeat-nodes-{len(self._threads)}"
        thread = threading.Thread(target=run, args=(wake,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def look(self, patience_s: float = 2.0) -> None:
        """Wait until everything has been looked at anew; not for long."""
        with self._looked:
            self._asked += 1
            wanted = self._asked
            self._looked.notify_all()
            self._looked.wait_for(
                lambda: min(self._served, self._served_there) >= wanted, patience_s
            )

    def say_end(self, why: str) -> None:
        """Tell the others that no worker runs here any more."""
        self._say(f"{_PREFIX}/end/{self.node}", why)

    def say_stop(self, why: str) -> None:
        """Tell the others to end their workers."""
        self._say(f"{_PREFIX}/stop", why)

    def others_running(self) -> bool:
        """Say whether some other node has workers, as far as is known."""
        return len({*self.ended, self.node}) < self.nodes

    @property
    def has_moved(self) -> bool:
        """Whether the standby is in use, by the workers at least."""
        return self._moved or self.host > 0

    @property
    def keeps_store(self) -> bool:
        """Whether this launcher has the store that workers use, of other nodes too."""
        return self.node == (1 if self.has_moved else 0)

    def close(self) -> None:
        """Stop looking."""
        with self._looked:
            self._closing = True
            self._looked.notify_all()
        for thread in self._threads:
            thread.join(timeout=0.5)
        if any(thread.is_alive() for thread in self._threads):
            # In the middle of a call: who comes out of one while Python ends, aborts the process.
            for store in (self._store, self._spare):
                if store is not None:
                    cut_towards(addresses(store.host), store.port)
            for thread in self._threads:
                thread.join(timeout=0.5)

    def _say(self, key: str, value: str) -> None:
        with self._looked:
            self._to_say.append((key, value))
            self._to_say_there.append((key, value))
        self.look()

    # --- in threads of their own -----------------------------------------------------------

    def _watch(self, wake: Callable[[], None]) -> None:
        while not self._closing and not self._gone:
            before, serving = self._known(), self._asked
            try:
                self._look_once()
                if self._moved and not self.host:
                    self._use_standby()
            except RuntimeError as error:
                self._lose_store(f"the store of node 0 is gone ({str(error).splitlines()[0]})")
            self._answers += 1
            if self._known() != before:
                wake()
            with self._looked:
                self._served = math.inf if self._gone else serving
                self._looked.notify_all()
                often = self.nodes > 1 or self.joiners - self.joined
                self._looked.wait_for(self._is_wanted, BEAT_S if often else None)

    def _lose_store(self, why: str) -> None:
        """Go on with the standby, if the workers do."""
        why = self._silent or why
        if self._closing:
            return
        if self.host or self.node == 0 or not self._survives_there():
            self._gone, self.stop = True, why
            return
        ended = self._silent or not self._cut  # else it may only have been slow, and follow
        self._use_standby()
        if ended:
            self.ended[0] = f"{why}; its standby is in use"

    def _survives_there(self) -> bool:
        """Whether there is a standby, and the workers go on with it."""
        try:
            # They may have said so since the last look.
            spare = self._spare
            return spare is not None and (self.survives or spare.check([launched.SURVIVE_KEY]))
        except RuntimeError:
            return False

    def _use_standby(self) -> None:
        with self._looked:
            self.survives = True
            if self._spare is None:  # lost in this moment
                self._gone, self.stop = True, "the standby of the store is gone as well"
                return
            self._store, self.host = self._spare, 1
        self._silent = ""
        self._beats.clear()

    def _is_wanted(self) -> bool:
        following = self._moved and not self.host
        return self._closing or following or self._asked > self._served

    def _cut_store(self) -> None:
        """Have whoever waits for the store come out; not if that has been done already."""
        with self._looked:
            if not self.host and self.node != 0:
                self._cut = True
                cut_towards(addresses(self._store.host), self._store.port)

    def _watch_silence(self, wake: Callable[[], None]) -> None:
        """Looks are counted: a launcher that was frozen itself has not looked."""
        answers, looks = -1, 0
        while not self._closing and not self.stop:
            time.sleep(BEAT_S)
            looks = looks + 1 if answers == self._answers else 0
            answers = self._answers
            if looks * BEAT_S < self._silence_s:
                continue
            looks = 0
            silent = f"the store of node {self.host} has not answered for {self._silence_s:g} s"
            if self._silent or self.host or self._spare is None:
                self.stop = silent
                wake()
            else:
                self._silent = silent
                self._cut_store()

    def _watch_standby(self, wake: Callable[[], None]) -> None:
        """Say there what is to be said, and follow the workers if they have moved there."""
        try:
            client: Any = self._spare.clone() if hasattr(self._spare, "clone") else self._spare
            while not self._closing:
                serving = self._asked
                while self._to_say_there:
                    client.compare_set(self._to_say_there[0][0], "", self._to_say_there[0][1])
                    self._to_say_there.pop(0)
                if not self._moved and client.check([launched.MOVED_KEY]):
                    self._follow()
                with self._looked:
                    self._served_there = serving
                    self._looked.notify_all()
                    self._looked.wait_for(self._is_wanted_there, BEAT_S)
        except RuntimeError:
            with self._looked:
                if not self.host:  # else it is noticed where it is used
                    self._spare = None
        with self._looked:
            self._served_there = math.inf
            self._looked.notify_all()

    def _is_wanted_there(self) -> bool:
        return self._closing or self._asked > self._served_there

    def _follow(self) -> None:
        """The workers have moved: look at the store once more, and leave it."""
        with self._looked:
            self._moved = True
            self._looked.notify_all()
            self._looked.wait_for(lambda: self._closing or self.host, _FOLLOW_S)
        self._cut_store()

    def _known(self) -> tuple[object, ...]:
        return self.survives, self.stop, len(self.ended), len(self.joined)

    def _look_once(self) -> None:
        while self._to_say:
            self._store.compare_set(self._to_say[0][0], "", self._to_say[0][1])
            self._to_say.pop(0)
        self.survives = self.host > 0 or self._store.check([launched.SURVIVE_KEY])
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
        # A launcher that was frozen itself has not looked.
        passed_s = min(now - self._looked_at, 2 * BEAT_S)
        self._looked_at = now
        for node in set(range(self.nodes)) - {self.node, *self.ended}:
            beats = self._store.add(f"{_PREFIX}/beat/{node}", 0)
            before, silent_s = self._beats.get(node, (-1, 0.0))
            silent_s = silent_s + passed_s if beats == before else 0.0
            self._beats[node] = beats, silent_s
            if self._store.check([f"{_PREFIX}/end/{node}"]):
                self.ended[node] = bytes(self._store.get(f"{_PREFIX}/end/{node}")).decode()
            elif silent_s > self._silence_s:
                self.ended[node] = f"its launcher has said nothing for {self._silence_s:g} s"
