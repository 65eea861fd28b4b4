"""Clients of the job's store and of its standby, used again from one world to the next.

A new one is a new connection, and torch looks up the name of its other end: where no name
server answers, that takes 5 seconds.

Under `offbeat launch` on several nodes, the store lives in the launcher of node 0, and its
*standby*, which is empty at first, in that of node 1. When the store is lost, all *move* to the
standby (failover.py). Whoever is in the middle of a call of the store comes out of it, with an
error: its connection is cut. What belongs to an epoch from before the move does not reach the
standby by mistake: half of it would be there, and half of it lost.

**Connecting cannot be interrupted.** c10d's client tries again until its time is over, also when
its connection was cut:

    thread that needs a client   connects ── the store freezes ── waits for its answer ─────────
    whoever notices              ────────────────────────────── cuts ─┐
    the client                   ─────────────────────────────────────┘ connects again, and waits

So a thread of its own connects, and whoever needs the client leaves it behind. And it first asks
something by a connection that is there, which ends when that is cut: few threads are left behind
(left_behind.py: what becomes of those).

**torch's own client belongs to the program**, which may wait in it for hours, for a key of another
worker's: whoever asked something by it would stand in line. So it is copied, and not asked.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from offbeat import launched
from offbeat.worlds.sockets import addresses, cut_towards, is_connected_to, note_store

# poll(2) counts milliseconds in 31 bits; a wait that outlives this begins again.
LONG = timedelta(days=10)
_CONNECT = timedelta(seconds=30)
_PATIENCE_S = (0.1, 0.3, None)
"""How long to wait for a connection before another one is tried."""
STORE, STANDBY = "store", "standby"
Store = Any  # c10d's stores; torch's stubs know neither clone nor values of bytes
logger = logging.getLogger("offbeat")


class StoreMovedError(RuntimeError):
    """The store that an epoch has begun with is lost."""


class Pool:
    """The clients of this process that nobody uses at the moment, and which store is in use."""

    def __init__(self) -> None:
        self._first: dict[str, Store] = {}  # of each place; of the store's, it is torch's own
        self._models: dict[str, Store] = {}  # what the others are copies of; never lent
        self._addresses: dict[str, tuple[set[str], int]] = {}
        self._free: dict[str, list[Store]] = {STORE: [], STANDBY: []}
        self._lost: set[str] = set()
        self._is_another = True  # torch's store, than that of the latest world
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self.place = STORE
        """Which of both is in use."""
        self.since = -math.inf
        """The first epoch that uses it; for as long as all are moving, none."""

    # --- where --------------------------------------------------------------------------------

    @property
    def has_standby(self) -> bool:
        """Whether there is one that all could move to."""
        return self.place == STORE and STANDBY in self._first

    def open(self) -> bool:
        """Find both for a world that begins; whether torch has another process group by now.

        A rank is another worker's then.
        """
        self.since = -math.inf
        self._lost.discard(self.place)  # if it is there again, an attachment that failed is over
        self._first_of(STORE)
        is_another, self._is_another = self._is_another, False
        self._open_standby()
        return is_another

    def _open_standby(self) -> None:
        place = launched.standby()
        if self.place != STORE or STANDBY in self._first or place is None:
            return
        try:
            client = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=_CONNECT)
        except RuntimeError as error:
            words = "the standby of the job's store, at %s:%d, does not answer: %s"
            logger.warning(words, *place, str(error).splitlines()[0])
            return
        self._note(STANDBY, client)
        self._models[STANDBY] = client

    def move(self, place: str) -> bool:
        """This place is lost: use the other one from now on. False if there is none."""
        with self._lock:
            moves = place == self.place and STANDBY in self._first and place == STORE
            if moves:
                self.since, self.place = math.inf, STANDBY
        if moves:
            self.cut(STORE)
        return self.place != place

    def begin(self, epoch: int) -> None:
        """All have moved, and begin this epoch."""
        self.since = epoch

    def drop_standby(self) -> None:
        """It is lost before anybody needs it."""
        with self._lock:
            if self.place != STORE or self._first.pop(STANDBY, None) is None:
                return
            self._free[STANDBY] = []
        self.cut(STANDBY)
        logger.warning("the standby of the job's store is lost: now the store must not be")

    def cut(self, place: str) -> None:
        """A place is lost: end every connection to it, and with it the calls under way."""
        with self._changed:
            self._lost.add(place)
            self._changed.notify_all()
        if (address := self._addresses.get(place)) is not None:
            cut_towards(*address)

    # --- clients ------------------------------------------------------------------------------

    def borrow(self, place: str) -> Store:
        """Return a client that nobody else uses; raises if the place is lost meanwhile.

        torch asks for the name of the other end of every connection that it makes. A question to a
        name server that is lost is asked again after 5 seconds: so who waits for long connects once
        more, and takes what comes first.
        """
        self._first_of(place)
        made: list[Store | RuntimeError] = []
        with self._changed:
            if self._free[place]:
                return self._free[place].pop()
            for patience_s in _PATIENCE_S:
                if made or place in self._lost:
                    break
                name = f"offbeat-connect-{place}"
                run = threading.Thread(target=self._connect, args=(place, made), name=name)
                run.daemon = True
                run.start()
                self._changed.wait_for(lambda: made or place in self._lost, patience_s)
            if place in self._lost:
                # A connection from after the cut would be one that nobody cuts.
                moved = self.place != place or place == STANDBY
                raise (StoreMovedError if moved else RuntimeError)(f"the job's {place} is lost")
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]

    def _connect(self, place: str, made: list[Store | RuntimeError]) -> None:
        try:
            model = self._model_of(place)
            model.check(["offbeat"])
            client = _copy(model)
            client.set_timeout(LONG)
            result: Store | RuntimeError = client
        except RuntimeError as error:
            result = error
        with self._changed:
            made.append(result)
            self._changed.notify_all()

    def _model_of(self, place: str) -> Store:
        """A client that does not try to connect for long; its copies do not either."""
        first = self._first_of(place)
        model = self._models.get(place)
        if model is None:
            if not self._is_there(place):  # a copy would try for 30 minutes to connect
                first.check(["offbeat"])  # raises if it is dead
            model = _copy(first)
            model.set_timeout(_CONNECT)
            with self._lock:
                if self._first.get(place) is first:
                    self._models.setdefault(place, model)
        return model

    def _is_there(self, place: str) -> bool:
        """Whether the store at that place has surely not ended."""
        address = self._addresses.get(place)
        return address is not None and is_connected_to(*address)

    def give_back(self, place: str, client: Store) -> None:
        """Have another one use it."""
        with self._lock:
            if place == self.place or (place == STANDBY and place in self._first):
                self._free[place].append(client)

    def close(self) -> None:
        """The process ends."""
        self._first.pop(STORE, None)
        self._models.pop(STORE, None)
        self._free[STORE] = []

    def _first_of(self, place: str) -> Store:
        if place == STANDBY:
            with suppress(KeyError):
                return self._first[STANDBY]
            raise StoreMovedError("the standby of the job's store is lost")
        store: Store = dist.distributed_c10d._get_default_store()  # whoever has initialised it
        if store is not self._first.get(STORE):
            self._note(STORE, store)
        return store

    def _note(self, place: str, store: Store) -> None:
        with self._lock:
            self._first[place], self._free[place] = store, []
            self._models.pop(place, None)
            self._addresses.pop(place, None)
            self._is_another = self._is_another or place == STORE
        server = _without_prefix(store)
        if isinstance(server, TCPStore):
            note_store(server.port)
            self._addresses[place] = addresses(server.host), server.port


def _without_prefix(store: Store) -> Store:
    return getattr(store, "_underlying_non_prefix_store", store)


def _copy(store: Store) -> Store:
    """One more client of the same store."""
    if hasattr(store, "clone"):
        return store.clone()
    server: Any = _without_prefix(store)
    client = TCPStore(server.host, server.port, is_master=False, timeout=_CONNECT)
    if server is store:
        return client
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a torch before `clone`
    return PrefixStore(f"attempt-{attempt}", client)


pool = Pool()
