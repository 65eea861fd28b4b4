"""One worker's connections to the others, on which it hears of losses: see mesh.py."""

from __future__ import annotations

import errno
import math
import socket
import struct
from typing import Any
from weakref import WeakSet

_ENDS = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)
# Of Linux's tcp_info: the state, how many packets are unacknowledged, and since when (in ms) there
# was no answer.
_TCP_INFO = struct.Struct("=B7x 4x4x4x4x I 4x4x4x4x 4x4x4x I")
_OPEN = (1, 8)  # established, or ended by the other side
HELLO = struct.Struct("!i")
"""What a worker says first that calls another one: its rank."""
CONNECT_S = 60.0


def call(client: Any, rank: int, patience_s: float = CONNECT_S) -> socket.socket:
    """Connect to a worker, where it has said in the store that it can be called."""
    host, port = bytes(client.get(f"mesh/{rank}")).decode().split()
    return socket.create_connection((host, int(port)), timeout=patience_s)


def is_there(client: Any, rank: int, patience_s: float = CONNECT_S) -> bool:
    """Knock: a worker that has ended refuses."""
    try:
        call(client, rank, patience_s).close()
    except ConnectionError:
        return False
    except OSError:  # no answer is none
        return True
    return True


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
