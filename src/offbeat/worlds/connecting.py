"""How workers connect each two of them, when all attach: see mesh.py.

Every worker says in the store where it can be called, calls those below it, and is called by those
above. A worker may end in the middle of that. Who calls it is refused; who waits to be called by it
knocks at its door now and then, and is refused, too. So the others have all connections but those,
and know who is missing.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from offbeat.worlds.entrance import HELLO

_COME = timedelta(minutes=30)  # how long others may take to attach
_CONNECT_S = 60.0
_KNOCK_S = 0.5


def connected(
    server: socket.socket, client: Any, rank: int, members: tuple[int, ...]
) -> dict[int, socket.socket]:
    """Connections to all other members, but for those who have ended meanwhile."""
    client.wait([f"mesh/{each}" for each in members], _COME)
    peers: dict[int, socket.socket] = {}
    for each in (each for each in members if each < rank):
        with suppress(ConnectionError):  # it has ended
            peer = _call(client, each)
            peer.sendall(HELLO.pack(rank))
            peers[each] = peer
    above, until = {each for each in members if each > rank}, time.monotonic() + _CONNECT_S
    server.settimeout(_KNOCK_S)
    while above - peers.keys():
        try:
            peer = server.accept()[0]
        except TimeoutError:
            if time.monotonic() > until:
                raise
            above = {each for each in above if each in peers or _is_there(client, each)}
            continue
        peer.settimeout(_CONNECT_S)
        hello = peer.recv(HELLO.size, socket.MSG_WAITALL)
        if len(hello) == HELLO.size:
            peers[HELLO.unpack(hello)[0]] = peer
        else:  # it has only knocked
            peer.close()
    return peers


def _call(client: Any, rank: int) -> socket.socket:
    host, port = bytes(client.get(f"mesh/{rank}")).decode().split()
    return socket.create_connection((host, int(port)), timeout=_CONNECT_S)


def _is_there(client: Any, rank: int) -> bool:
    """Knock: a worker that has ended refuses."""
    try:
        _call(client, rank).close()
    except ConnectionError:
        return False
    except OSError:  # no answer is none
        return True
    return True
