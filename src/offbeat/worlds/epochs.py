"""How the members change: whoever notices a loss proposes the next epoch, and all adopt it.

One key of the store for each epoch: the first proposal stands, for everybody. Whoever has noticed a
loss that it does not see proposes another one. If the store itself is lost, all come to its standby
and agree there (failover.py).
"""

from __future__ import annotations

import json
import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from offbeat.errors import WorkerLostError
from offbeat.worlds.failover import Moving, Part, refusal
from offbeat.worlds.patience import lost_s
from offbeat.worlds.peers import send, unanswered_s
from offbeat.worlds.pool import Store, pool
from offbeat.worlds.store import Clients

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_ENDED = "its connection broke: the process has ended"
_SILENT = "its host does not answer"


class Epochs(ABC):
    """One worker's part in the changes of the members; in the thread that listens to the others."""

    def __init__(self, world: RealWorld, clients: Clients) -> None:
        self._world = world
        self._clients = clients
        self._limit_s = lost_s()
        self._peers: dict[int, socket.socket] = {}
        self._departed: set[int] = set()
        self._ended: set[int] = set()  # for certain
        self._come: set[int] = set()  # to the standby
        self._before: list[tuple[float, tuple[int, ...]]] = []  # until when they matter; members
        self._moving: Moving | None = None
        self._why = ""
        self._closing = False

    @abstractmethod
    def _have_done(self, call: Callable[[], None]) -> None:
        """Have the thread that listens do something."""

    @abstractmethod
    def _comes_too_late(self, rank: int) -> None:
        """This worker has ended: see whether that is with this one, too."""

    @abstractmethod
    def _open_again(self) -> None:
        """The standby is in use: have those find this worker there who come back."""

    @property
    def _is_member(self) -> bool:
        """Whether this worker has a part in the job: not before it has joined."""
        return self._world.epoch >= 0

    @property
    def _client(self) -> Store:
        """A client of the store that this epoch has begun with; raises if that is lost."""
        return self._clients.mine(self._world.epoch if self._is_member else None)

    def lose(self, place: str, why: str) -> None:
        """A store does not answer: do without it. Does not wait; any thread may call this."""
        if place == pool.place:
            self._why = self._why or why
            self._have_done(self._move if pool.move(place) else lambda: self._fail(why))
        else:
            pool.drop_standby()

    # --- a worker is lost ------------------------------------------------------------------

    def _judge_gone(self, rank: int) -> None:
        """The connection to a worker is no more."""
        self._judge(rank, _ENDED if rank in self._ended else _SILENT)

    def _judge(self, rank: int, reason: str) -> None:
        """Propose epochs until there is one without that worker."""
        words = f"worker {rank} was lost ({reason})"
        while rank in self._world.members and self._is_member and not self._closing:
            members = [each for each in self._world.members if each != rank]
            part = self._part({each for each in members if self._answers(each)})
            certain = rank in self._ended or rank == self._world.rank
            if not certain and not part.may_go_on(has_store=True):
                return self._world.failed(refusal(words, part))
            proposal = json.dumps({"members": members, "words": words, "rank": rank})
            epoch = self._world.epoch + 1
            stands = bytes(self._client.compare_set(f"epoch/{epoch}", "", proposal))
            if not self._adopt(epoch, json.loads(stands)):
                return None
        return None

    def _part(self, left: set[int]) -> Part:
        """Those who can be reached, as a part of all who may be alive."""
        now = time.monotonic()
        self._before = [each for each in self._before if each[0] > now]
        epochs = [self._world.members, *(members for _, members in self._before)]
        return Part(left, epochs, self._ended | self._departed)

    def _answers(self, rank: int) -> bool:
        """Whether a worker can be reached, or is this one: its host answers."""
        peer = self._peers.get(rank)
        if peer is None:
            return rank == self._world.rank
        return unanswered_s(peer) < self._limit_s / 2

    def _look(self) -> None:
        """Somebody says that the members have changed."""
        if self._moving is not None:
            return self._agree()
        if self._closing:  # those who have come to the end with this worker do not change any more
            return None
        while self._is_member and self._client.check(
            [key := f"epoch/{(epoch := self._world.epoch + 1)}"]
        ):
            if not self._adopt(epoch, json.loads(bytes(self._client.get(key)))):
                return None
        return self._judge_missing()

    def _judge_missing(self) -> None:
        """Some may have ended before this worker was connected, or heard that they had joined."""
        for rank in set(self._world.members) - {*self._peers, self._world.rank} - self._departed:
            if self._has_departed(rank):
                self._comes_too_late(rank)
            else:
                self._judge_gone(rank)

    def _has_departed(self, rank: int) -> bool:
        """Whether its goodbye was lost with its connection."""
        return bool(self._client.check([f"departed/{rank}"]))

    def _adopt(self, epoch: int, told: dict[str, Any]) -> bool:
        # Somebody may not have heard of this epoch yet, who belongs to the one before.
        self._before.append((time.monotonic() + 3 * self._limit_s, self._world.members))
        goes_on = self._world.begin_epoch(
            epoch, tuple(told["members"]), told["words"], told["rank"], told.get("joins", False)
        )
        mine = told.get("joins", False) and told["rank"] == self._world.rank
        for peer in self._peers.values():
            send(peer, b"J" if mine else b"E")
        return goes_on

    # --- the store is lost -----------------------------------------------------------------

    def _move(self) -> None:
        """The store is lost: come to its standby, and tell the others."""
        if not self._is_member:
            return self._fail(self._why)
        if self._moving is None and pool.since == math.inf and not self._closing:
            self._moving = Moving(self._world, self._clients, self._limit_s, self._why)
            self._moving.come(self._part(set()).epochs)
            for peer in self._peers.values():
                send(peer, b"S")
            self._agree()
        return None

    def _agree(self) -> None:
        """Begin the epoch that all have agreed on who have come to the standby, if they have."""
        assert self._moving is not None
        ended = self._ended | self._departed
        try:
            told = self._moving.agreed(self._come, ended, self._answers)
        except WorkerLostError as error:
            self._moving = None
            return self._world.failed(error)
        if told is not None:
            self._moving = None
            pool.begin(told["epoch"])
            if self._adopt(told["epoch"], told):
                self._open_again()
                self._look()
        return None

    def _fail(self, why: str) -> None:
        """There is no store any more, for this worker."""
        pool.cut(pool.place)
        words = (
            "and there is no standby to go on with: with the store the others are. Start again "
            "from a checkpoint"
            if self._is_member
            else "while this worker joined. The others go on with its standby, if there is one, "
            "and without this worker"
        )
        if not self._closing:
            self._world.failed(WorkerLostError(f"the job's store was lost ({why}), {words}"))
