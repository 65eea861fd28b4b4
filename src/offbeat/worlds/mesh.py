"""How a loss is noticed where it is survived. *Slow and failed are different.*

Between each two workers there is a connection of our own, from the first epoch to the last. One
thread of every worker listens to all of them:

    "B"              the other side says goodbye: it closes, or it has said itself that it failed
    "E"              the members have changed: look into the store
    "."              a beat, every so often. Nobody answers: that is the kernel's business
    "A"              the first thing that a worker hears which has called, to join
    the end of it    the process has ended, without a goodbye

A process that is stopped or swapping keeps its connections, and its kernel answers. A machine that
lost its power or its network does not: its beats stay unacknowledged, and after `OFFBEAT_LOST_S`
seconds (3) the kernel ends the connection.

A worker that joins (entrance.py) calls everybody, and is heard from then on. With `freeze_s`, who
is silent for so long is expelled. Its connections stay: when it wakes up, it hears that the members
have changed, finds itself not among them, and raises. A worker that has been frozen, or starved,
itself has not heard the others either, and does not judge them for that.

Whoever notices a loss proposes the next epoch: its members, under one key of the store. The first
proposal stands, for everybody. It tells the others, who look for it; and proposes another epoch if
that one does not see the loss yet.

A child that is forked lets go of its copies of these connections (sockets.py).
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from offbeat.errors import WorkerLostError
from offbeat.worlds.base import Activity
from offbeat.worlds.entrance import HELLO, Entrance
from offbeat.worlds.sockets import noting, own_address
from offbeat.worlds.store import Clients

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_VERDICT_S = 10.0
_CONNECT_S = 60.0
_COME = timedelta(minutes=30)  # how long others may take to attach
_BEAT_S = 0.25
_DEPART = timedelta(seconds=60)
_HELLO_S = 1.0  # a caller says at once who it is
_ENDED = "its connection broke: the process has ended"


def lost_s() -> float:
    """Return after how many seconds without an answer from its host a worker is lost."""
    text = os.environ.get("OFFBEAT_LOST_S", "") or "3"
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < 1e6:
        raise ValueError(f"OFFBEAT_LOST_S must be a number of seconds above 0, got {text!r}")
    return limit


class Mesh:
    """One worker's connections to all others, and what it hears by them."""

    def __init__(self, world: RealWorld, clients: Clients) -> None:
        self._world = world
        self._clients = clients
        self._limit_s = lost_s()
        self._peers: dict[int, socket.socket] = {}
        self._departed: set[int] = set()
        self._closing = self._closed = self._stopped = False
        self._freeze_s = world.freeze_s
        self._beat_s = min(_BEAT_S, self._limit_s / 4, (self._freeze_s or 4.0) / 4)
        self._heard_s: dict[int, float] = {}
        self._beats_at = self._looked_s = 0.0
        self._to_do: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._activity: Activity | None = None

    def watch(self, alone: bool = False) -> None:
        """Connect to everybody, if not alone yet, and begin to listen; every worker does."""
        with noting():
            self._here, self._there = socket.socketpair()
            self._server = socket.create_server((own_address(), 0), backlog=self._world.size)
            try:
                if not alone:
                    self._publish()
                    self._connect()
                    self._server.setblocking(False)
            except (OSError, RuntimeError) as error:
                raise WorkerLostError(
                    f"worker {self._world.rank} could not connect to all of the "
                    f"{self._world.size} workers: {error}"
                ) from error
        self._activity = self._world.spawn("watch-members", self._listen)

    def join(self, words: str, entrance: Entrance) -> None:
        """Become a member of the job that runs; returns when this worker's world knows."""
        self._publish()
        self._server.setblocking(False)
        told, entered = threading.Event(), entrance.enter(words)

        def adopt() -> None:
            self._peers |= entrance.peers
            for rank, peer in entrance.peers.items():
                self._listen_to(rank, peer)
            self._adopt(*entered)
            self._look()
            told.set()

        self._have_done(adopt)
        while not told.wait(1.0):
            self._world.check()

    def report(self, rank: int, reason: str) -> None:
        """Have the others go on without a worker, which may be this one; wait until they know."""
        if self._stopped:  # they do
            return
        told = threading.Event()

        def judge() -> None:
            self._judge(rank, reason)
            told.set()

        self._have_done(judge)
        told.wait(_VERDICT_S)

    def wait_for_verdict(self, epoch: int | None = None) -> None:
        """Something has broken: give the news of it time to come."""
        world = self._world
        if epoch is not None:
            with suppress(WorkerLostError), world.connecting:
                world.connecting.wait_for(lambda: world.epoch > epoch, world.now() + _VERDICT_S)

    def close(self) -> None:
        """All have come to the end: say goodbye, and wait until the others have, if need be."""
        self._closing = True
        rank, client = self._world.rank, self._clients.mine()
        if self._is_member:
            with suppress(RuntimeError):
                client.set(f"departed/{rank}", b"1")
            self._have_done(self.say_goodbye)
        if rank == 0 and self._is_member:  # it may host the store
            everyone = [f"departed/{rank}" for rank in self._world.members]
            with suppress(RuntimeError):
                client.wait(everyone, _DEPART)
        self._have_done(self._end)
        if self._activity is not None:
            self._activity.join()

    def stop(self) -> None:
        """This worker has failed: listen no more."""
        self._stopped = True
        self._have_done(self._end)

    def say_goodbye(self) -> None:
        """Tell everybody that the end of this worker's connections means nothing."""
        for peer in self._peers.values():
            _send(peer, b"B")

    # --- connecting ------------------------------------------------------------------------

    @property
    def _is_member(self) -> bool:
        """Whether this worker has a part in the job: not before it has joined."""
        return self._world.epoch >= 0

    def _publish(self) -> None:
        """Say where this worker can be called."""
        host, port = self._server.getsockname()[:2]
        self._clients.mine().delete_key(f"departed/{self._world.rank}")
        self._clients.mine().set(f"mesh/{self._world.rank}", f"{host} {port}")

    def _connect(self) -> None:
        """Every worker calls those below it, and is called by those above."""
        world, client = self._world, self._clients.mine()
        everyone = [f"mesh/{rank}" for rank in world.members]
        self._server.settimeout(_CONNECT_S)
        client.wait(everyone, _COME)
        for rank in (each for each in world.members if each < world.rank):
            host, port = bytes(client.get(f"mesh/{rank}")).decode().split()
            peer = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
            peer.sendall(HELLO.pack(world.rank))
            self._peers[rank] = peer
        while len(self._peers) < len(world.members) - 1:
            peer = self._server.accept()[0]
            peer.settimeout(_CONNECT_S)
            (rank,) = HELLO.unpack(peer.recv(4, socket.MSG_WAITALL))
            self._peers[rank] = peer

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            limit = int(1000 * (self._limit_s - self._beat_s))  # since a beat was sent
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        self._heard_s[rank] = time.monotonic()
        self._selector.register(peer, selectors.EVENT_READ, rank)

    def _answer(self) -> None:
        """Somebody calls, to join: it is a peer from here on, if its rank is free."""
        with suppress(OSError), noting():
            caller = self._server.accept()[0]
            caller.settimeout(_HELLO_S)
            hello = caller.recv(HELLO.size, socket.MSG_WAITALL)
            (rank,) = HELLO.unpack(hello) if len(hello) == HELLO.size else (-1,)
            if not 0 <= rank < self._world.size or rank in self._world.members or self._closing:
                caller.close()  # it calls again; if its rank was lost, this worker knows by then
                return
            if (before := self._peers.pop(rank, None)) is not None:
                self._selector.unregister(before)
                before.close()
            self._departed.discard(rank)
            self._peers[rank] = caller
            self._listen_to(rank, caller)
            _send(caller, b"A")

    # --- listening -------------------------------------------------------------------------

    def _have_done(self, call: Callable[[], None]) -> None:
        """Have the thread that listens do something."""
        self._to_do.put(call)
        with suppress(OSError):
            self._here.send(b"!")

    def _listen(self) -> None:
        try:
            with selectors.DefaultSelector() as self._selector:
                self._selector.register(self._there, selectors.EVENT_READ, -1)
                self._selector.register(self._server, selectors.EVENT_READ, -2)
                for rank, peer in self._peers.items():
                    self._listen_to(rank, peer)
                while not self._closed:
                    rest_s = max(self._beats_at - time.monotonic(), 0.0)
                    self._hear(self._selector.select(rest_s))
        except (RuntimeError, OSError) as error:
            self._world.failed(
                WorkerLostError(f"the job's store does not answer any more: {str(error)[:200]}")
            )
        finally:
            for peer in (*self._peers.values(), self._here, self._there, self._server):
                peer.close()

    def _hear(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        now = time.monotonic()
        if now >= self._beats_at:
            self._beats_at = now + self._beat_s
            for peer in self._peers.values():
                _send(peer, b".")
        for key, _ in events:
            if key.data == -1:
                self._there.recv(4096)
            elif key.data == -2:
                self._answer()
            elif key.data in self._peers:
                self._heard_s[key.data] = now
                self._read(key.data)
        if self._freeze_s is not None:
            self._see_who_is_silent(self._freeze_s, now)
        with suppress(Empty):
            while not self._closed:
                self._to_do.get_nowait()()

    def _see_who_is_silent(self, limit_s: float, now: float) -> None:
        looked_s, self._looked_s = self._looked_s, now
        if now - looked_s > limit_s / 2:  # this worker was frozen itself
            self._heard_s = dict.fromkeys(self._peers, now)
        for rank in list(self._peers):
            silent_s = now - self._heard_s.get(rank, now)
            if silent_s > limit_s and rank in self._world.members and rank not in self._departed:
                self._judge(rank, f"silent for {silent_s:.2f} s, and freeze_s is {limit_s:g}")

    def _read(self, rank: int) -> None:
        try:
            said = self._peers[rank].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if b"B" in said:
            self._departed.add(rank)
        if b"E" in said:
            self._look()
        if not said:
            self._selector.unregister(self._peers[rank])
            self._peers.pop(rank).close()
            if self._closing:
                self._clients.mine().set(f"departed/{rank}", b"1")
            elif rank not in self._departed and not self._has_departed(rank):
                self._look()  # who has proposed itself may have ended before it could say so
                self._judge(rank, _ENDED)

    def _has_departed(self, rank: int) -> bool:
        """Whether its goodbye was lost with its connection."""
        return bool(self._clients.mine().check([f"departed/{rank}"]))

    def _judge(self, rank: int, reason: str) -> None:
        """Propose epochs until there is one without that worker."""
        words = f"worker {rank} was lost ({reason})"
        while rank in self._world.members and self._is_member and not self._closing:
            members = [each for each in self._world.members if each != rank]
            proposal = json.dumps({"members": members, "words": words, "rank": rank})
            epoch = self._world.epoch + 1
            stands = bytes(self._clients.mine().compare_set(f"epoch/{epoch}", "", proposal))
            if not self._adopt(epoch, json.loads(stands)):
                return

    def _look(self) -> None:
        """Somebody says that the members have changed."""
        while self._is_member and self._clients.mine().check(
            [key := f"epoch/{(epoch := self._world.epoch + 1)}"]
        ):
            if not self._adopt(epoch, json.loads(bytes(self._clients.mine().get(key)))):
                return
        for rank in set(self._world.members) - {*self._peers, self._world.rank} - self._departed:
            if not self._has_departed(rank):
                self._judge(rank, _ENDED)  # it ended before this worker heard that it had joined

    def _adopt(self, epoch: int, told: dict[str, Any]) -> bool:
        goes_on = self._world.begin_epoch(
            epoch, tuple(told["members"]), told["words"], told["rank"], told.get("joins", False)
        )
        for peer in self._peers.values():
            _send(peer, b"E")
        return goes_on

    def _end(self) -> None:
        self._closed = True


def _send(peer: socket.socket, byte: bytes) -> None:
    with suppress(OSError):  # it is gone, which is noticed where it is listened to
        peer.send(byte)
