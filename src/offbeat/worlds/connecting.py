"""How workers connect each two of them, when all attach: see mesh.py.

Every worker says in the store where it can be called, calls those below it, and is called by those
above. A worker may end in the middle of that. Who calls it is refused; who waits to be called by it
knocks at its door now and then, and is refused, too. So the others have all connections but those,
and know who is missing.

A worker may also have ended before it could say that, between two attached blocks. So a block's
connections are kept until the next one has its own: nothing is said by them any more, but they end
with their processes. Not longer than the process group, in which a rank is one worker's: in the
next one it may be another's.

    worker 0   leaves the block ─── attaches again, waits for 1 and 2 ─────┐ goes on with 1
    worker 1   leaves the block ──────────────────── attaches again ───────┐ goes on with 0
    worker 2   leaves the block ─────────────✗ killed: its connections end
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from offbeat.worlds.peers import CONNECT_S, Door, call, knock

_COME_S = 1800.0  # how long others may take to attach
_LOOK_S = 0.1
_KNOCK_S = 0.5
_kept: dict[int, socket.socket | None] = {}
"""By rank, the connections of the block before; None where it has ended."""


def keep(peers: dict[int, socket.socket], ended: Iterable[int]) -> None:
    """A block is over: have these connections until the next one is complete."""
    _kept.update(dict.fromkeys(ended))
    _kept.update(peers)


def forget() -> None:
    """Let go of the connections of the block before."""
    while _kept:
        if (before := _kept.popitem()[1]) is not None:
            before.close()


def connected(
    door: Door, client: Any, rank: int, members: tuple[int, ...]
) -> dict[int, socket.socket]:
    """Connections to all other members, but for those who have ended meanwhile."""
    members = _come(client, members)
    peers: dict[int, socket.socket] = {}
    for each in (each for each in members if each < rank):
        with suppress(ConnectionError):  # it has ended
            peers[each] = call(client, each, rank)
    above, until = {each for each in members if each > rank}, time.monotonic() + CONNECT_S
    door.server.settimeout(_KNOCK_S)
    while above - peers.keys():
        try:
            peer = door.server.accept()[0]
        except TimeoutError:
            if time.monotonic() > until:
                raise
            above -= knock(client, above - peers.keys(), _LOOK_S)[1]
            continue
        peer.settimeout(CONNECT_S)
        caller = None
        with suppress(OSError):  # it has ended, too
            caller = door.asked_by(peer)
        if caller is None:
            peer.close()
        else:
            peers[caller] = peer
    forget()
    return peers


def _come(client: Any, members: tuple[int, ...]) -> tuple[int, ...]:
    """Wait until all have said where they can be called, but for those who have ended; who has."""
    until, pause_s = time.monotonic() + _COME_S, 1e-3
    while not client.check([f"mesh/{each}" for each in members]):
        # Looked for once more: who has connected to all lets go of the connections before.
        ended = [each for each in members if _is_over(each) and not client.check([f"mesh/{each}"])]
        members = tuple(each for each in members if each not in ended)
        if time.monotonic() > until:
            raise TimeoutError(f"after {_COME_S:g} s some of {members} have not attached yet")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_S)
    return members


def _is_over(rank: int) -> bool:
    """Whether a connection to this worker was kept, and has ended with its process."""
    if (peer := _kept.get(rank)) is None:
        return rank in _kept
    with suppress(ConnectionError):
        try:
            while peer.recv(4096):  # the last beats, and its goodbye
                pass
        except BlockingIOError:
            return False
    return True
