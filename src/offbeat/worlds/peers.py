"""One worker's connections to the others, on which it hears of losses: see mesh.py."""

from __future__ import annotations

import errno
import math
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, cast
from weakref import WeakSet

from offbeat.worlds.sockets import own_address

_ENDS = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
# Of Linux's tcp_info: the state, how many packets are unacknowledged, and since when (in ms) there
# was no answer.
_TCP_INFO = struct.Struct("=B7x 4x4x4x4x I 4x4x4x4x 4x4x4x I")
_OPEN = (1, 8)  # established, or ended by the other side
CONNECT_S = 60.0
HERE = b"A"
"""What a worker answers to whom it knows."""
_HELLO = struct.Struct("!iQ")
"""What is said first by whoever calls: its rank, and by which word that worker can be called."""
_KNOCKS = -1
"""In place of the rank: it only wants to know whether that worker is there."""


class Door:
    """Where a worker can be called: a port, and a word that is nobody else's.

    When the worker has ended, another process may have its port: of another job, or another worker
    of this one, even the one that calls.
    """

    def __init__(self, backlog: int) -> None:
        self.server = socket.create_server((own_address(), 0), backlog=backlog)
        self._word = secrets.randbits(64)

    @property
    def place(self) -> str:
        """What others must know to call."""
        host, port = self.server.getsockname()[:2]
        return f"{host} {port} {self._word}"

    def asked_by(self, caller: socket.socket) -> int | None:
        """The rank of who calls; None if it has knocked, which is answered, or is a stranger."""
        hello = caller.recv(_HELLO.size, socket.MSG_WAITALL)
        rank, word = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (_KNOCKS, None)
        if word == self._word and rank == _KNOCKS:
            caller.sendall(HERE)
        return None if word != self._word or rank == _KNOCKS else rank


def call(client: Any, rank: int, me: int, patience_s: float = CONNECT_S) -> socket.socket:
    """Connect to a worker, where it has said in the store that it can be called; say who calls."""
    address, word = _place(client, rank)
    peer = socket.create_connection(address, timeout=patience_s)
    try:
        peer.sendall(_HELLO.pack(me, word))
    except OSError:
        peer.close()
        raise
    return peer


def knock(client: Any, ranks: Iterable[int], patience_s: float) -> tuple[set[int], set[int]]:
    """Knock at these workers' doors, all at a time: who answers, and who has ended, and refuses.

    Who does neither within the patience may be slow, frozen or cut off; or have ended, and another
    process has its port; or it has not said yet where its door is.
    """
    there: set[int] = set()
    ended: set[int] = set()
    with ExitStack() as opened, selectors.DefaultSelector() as doors:
        for rank in (rank for rank in ranks if client.check([f"mesh/{rank}"])):
            address, word = _place(client, rank)
            door = opened.enter_context(socket.socket())
            door.setblocking(False)
            if door.connect_ex(address) == errno.ECONNREFUSED:
                ended.add(rank)
            else:
                doors.register(door, selectors.EVENT_WRITE, (rank, _HELLO.pack(_KNOCKS, word)))
        until = time.monotonic() + patience_s
        while doors.get_map() and (rest_s := until - time.monotonic()) > 0:
            for key, _ in doors.select(rest_s):
                (rank, hello), door = key.data, cast(socket.socket, key.fileobj)
                doors.unregister(door)
                code = door.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                with suppress(OSError):
                    if code == errno.ECONNREFUSED:
                        ended.add(rank)
                    elif code == 0 and hello:
                        door.sendall(hello)
                        doors.register(door, selectors.EVENT_READ, (rank, b""))
                    elif code == 0 and door.recv(1) == HERE:
                        there.add(rank)
    return there, ended


def _place(client: Any, rank: int) -> tuple[tuple[str, int], int]:
    """Where a worker can be called, as it has said: its address, and its word."""
    host, port, word = bytes(client.get(f"mesh/{rank}")).decode().split()
    return (host, int(port)), int(word)


def prepare(peer: socket.socket, limit_s: float) -> None:
    """Have the kernel end the connection if what is sent stays without an answer for so long."""
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limit_s))


_given_up: WeakSet[socket.socket] = WeakSet()


def send(peer: socket.socket, byte: bytes) -> None:
    """Say something to a worker, if it is there.

    If it is gone, that is noticed where it is listened to. But the kernel tells only once why.
    """
    try:
        peer.send(byte)
    except BlockingIOError:
        pass
    except OSError as error:
        if not has_ended(error):
            _given_up.add(peer)


def has_said_all(peer: socket.socket) -> bool:
    """Whether a connection with nothing left to read was ended by its other side."""
    return peer not in _given_up


def has_ended(error: OSError) -> bool:
    """Whether a connection broke because the process on its other side is no more.

    Otherwise nobody answers: its host is down, or cannot be reached and goes on without this one.
    """
    return error.errno in _ENDS


def unanswered_s(peer: socket.socket) -> float:
    """For how long the host of a worker has not acknowledged what was sent; 0 where unknown.

    If the kernel has given it up already, for ever.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    told = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(told) < _TCP_INFO.size:
        return 0.0
    state, unacknowledged, since_ms = _TCP_INFO.unpack(told)
    if state not in _OPEN:
        return math.inf
    return float(since_ms) / 1000 if unacknowledged else 0.0
