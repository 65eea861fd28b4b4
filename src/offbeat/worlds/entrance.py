"""How a worker becomes a member of a job that runs.

    entrance/<rank>    written by every member when it is attached: what it has attached, and so on
    mesh/<rank>        where its mesh can be called; a joiner writes its own
    through/...        written by every member when it is through with a change of the members

If the store is lost, and the standby in use, all members write the first two anew, there.

A joiner compares itself with the members, calls each of them, and is a *peer* of all when each has
answered. Then it proposes the next epoch itself: the members, and it. If another proposal was
quicker, because a worker was lost or another one has joined, it looks who the members are now, and
tries again. So nobody has a part in it but by hearing that the members have changed.

If all members were killed, nobody has said so. So while it waits, it knocks at their doors now and
then: all of them refuse. A door may be another one's by then, which does not know the word by which
the member can be called (peers.py); and a host that is off says nothing. So members are there only
for as long as one of them answers now and then.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from offbeat.errors import DisagreementError, NobodyToJoinError
from offbeat.worlds.checked import first_difference
from offbeat.worlds.membership import THROUGH
from offbeat.worlds.peers import HERE, call, knock
from offbeat.worlds.sockets import noting
from offbeat.worlds.store import Clients
from offbeat.worlds.too_late import end_in_a_sentence

_ANSWER_S = 5.0
_AGAIN_S = 0.02
_KNOCK_S, _HEAR_S = 0.5, 1.0
_IN_VAIN = 60
"""So often in a row nobody answers a knock, until nobody is taken to be there: a minute or so. Not
by the clock, since a joiner that was stopped itself has not knocked."""
_ENDED = "their processes have ended without a goodbye"
_SILENT = "none of them answers any more"
MOVED = "moved"
"""In the standby of the store, the epoch that all have begun with there (failover.py)."""
REFUSES = "refuses"
"""Among what a worker says of what it has attached: why nobody can join that, if so."""
_Peers = dict[int, socket.socket]


class Entrance:
    """One joiner on its way in."""

    def __init__(self, rank: int, clients: Clients, check: Callable[[], None]) -> None:
        self._rank = rank
        self._clients = clients
        self._check = check
        end_in_a_sentence()
        self._knocks_at = time.monotonic() + _KNOCK_S
        self._in_vain = 0
        self.peers: _Peers = {}
        """Members that have answered."""

    def others(self) -> dict[str, Any]:
        """Wait until all members are attached; what the first of them says of itself."""
        while True:
            members, _ = self.newest()
            keys = [f"entrance/{rank}" for rank in members if rank != self._rank]
            if not keys:
                raise nobody_to_join(self._rank)
            if self._clients.mine().check(keys):
                return dict(json.loads(bytes(self._clients.mine().get(keys[0]))))
            self._pause(members)

    def newest(self) -> tuple[list[int], int]:
        """The members of the newest epoch, and its number."""
        client, key, epoch = self._clients.mine(), "members", 0
        if client.check([MOVED]):  # the standby knows nothing of the epochs before
            key, epoch = MOVED, int(json.loads(bytes(client.get(MOVED)))["epoch"])
        while client.check([f"epoch/{epoch + 1}"]):
            epoch += 1
            key = f"epoch/{epoch}"
        told = json.loads(bytes(client.get(key)))
        return (told["members"] if epoch else told), epoch

    def enter(self, words: str) -> tuple[int, dict[str, Any]]:
        """Call everybody, and propose the epoch that this worker is a member of; that."""
        client = self._clients.mine()
        while True:
            members, epoch = self.newest()
            may_enter = self._rank not in members and self._are_through(members, epoch)
            if may_enter and self._has_called(members):
                told = {"members": sorted([*members, self._rank]), "words": words}
                proposal = json.dumps({**told, "rank": self._rank, "joins": True})
                stands = bytes(client.compare_set(f"epoch/{epoch + 1}", "", proposal)).decode()
                if stands == proposal:
                    return epoch + 1, dict(json.loads(proposal))
            else:
                self._pause(members)

    def _are_through(self, members: list[int], epoch: int) -> bool:
        """Whether the members have counted what was lost with the last change."""
        keys = [f"through/{what}/{rank}/{epoch}" for what in THROUGH for rank in members]
        return not epoch or bool(self._clients.mine().check(keys))

    def _has_called(self, members: list[int]) -> bool:
        for rank in list(self.peers):
            if rank not in members:
                self.peers.pop(rank).close()
        return all(rank in self.peers or self._call(rank) for rank in members)

    def _call(self, rank: int) -> bool:
        """Connect to a member; False if it does not answer, perhaps not any more, or not yet."""
        with suppress(OSError), noting():
            peer = call(self._clients.mine(), rank, self._rank, _ANSWER_S)
            if peer.recv(1) == HERE:
                self.peers[rank] = peer
                return True
            peer.close()
        return False

    def _pause(self, members: list[int]) -> None:
        self._check()
        self._hear_goodbyes(members[:1])
        if time.monotonic() > self._knocks_at:
            self._knock(members)
            self._knocks_at = time.monotonic() + _KNOCK_S
        time.sleep(_AGAIN_S)

    def _knock(self, members: list[int]) -> None:
        """Raise if none of these is there, unless another one has joined them meanwhile."""
        others = [rank for rank in members if rank != self._rank]
        there, ended = knock(self._clients.mine(), others, _HEAR_S)
        self._in_vain = 0 if there else self._in_vain + 1
        if (all_ended := ended.issuperset(others)) or self._in_vain >= _IN_VAIN:
            if self.newest()[0] != members:
                self._in_vain = 0
                return
            self._hear_goodbyes(others)  # they may have ended well since this was last asked
            raise nobody_to_join(self._rank, _ENDED if all_ended else _SILENT)

    def _hear_goodbyes(self, members: list[int]) -> None:
        """Raise if one of these has come to the end: all others have, too."""
        if any(self._clients.mine().check([f"departed/{rank}"]) for rank in members):
            raise nobody_to_join(self._rank)


def nobody_to_join(rank: int, why: str = "they have ended their training") -> NobodyToJoinError:
    """What a worker raises that comes too late."""
    return NobodyToJoinError(
        f"worker {rank} was to join the others, but {why}: there is nobody left to join"
    )


def check_all_alike(rank: int, theirs: Sequence[Any], mine: Sequence[Any]) -> None:
    """Raise if a joiner has attached something else than the others, and say what."""
    for each, its in zip(theirs, mine, strict=False):
        check_alike(rank, each, json.loads(json.dumps(its)))


def check_alike(rank: int, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """The same, of one thing that is attached."""
    if theirs[REFUSES]:
        raise _refused(f"worker {rank} cannot join: the others take in nobody {theirs[REFUSES]}")
    if (found := first_difference(theirs, mine)) is not None:
        what, value, other = found
        raise _refused(
            f"worker {rank} cannot join: the others have {value} as {what}, this worker has "
            f"{other}. Start it with the same script, settings and version of offbeat; they go on "
            "without it"
        )


def _refused(words: str) -> DisagreementError:
    error = DisagreementError(words)
    error.everywhere = False  # the others do not hear of it
    return error
