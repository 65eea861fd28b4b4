"""How a loss is noticed. *Slow and failed are different.*

A worker that is stopped, swapping or stuck in a long step keeps its sockets, one that has died does
not. So every worker keeps a receive posted to its successor on a group made for that alone. The
receive ends in one of two ways:

    the successor says goodbye      it closes, as everybody does, or it was told of a loss
    the connection breaks           it is gone: its rank goes into the store, first writer wins

A second thread of every worker waits for that entry, the *verdict*. When it comes, the worker cuts
the connections of all its groups (which ends the collectives that it or others are blocked in) and
ends every wait for a key of its own. From then on each verb raises `WorkerLostError` with the rank.
At last it says goodbye to its predecessor. Measured with 6 workers: all are told within 30 ms, all
blocked collectives have ended within 60 ms.

The end. When all have come to the last barrier the verdict is "closed", and a worker that ends
from then on takes nobody with it. Whoever hosts the store must be the last to stop using it: so
everyone writes that it departs, before it says goodbye, and a worker whose successor ends without
a goodbye writes it for the successor. Watches go on until the goodbye, however late that is.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from offbeat.errors import ClosedError, WorkerLostError
from offbeat.worlds.base import Activity
from offbeat.worlds.checked import fatal
from offbeat.worlds.gloo import Groups, wait_for_c10d
from offbeat.worlds.store import LONG, Clients
from offbeat.worlds.threads import within

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_VERDICT_S = 10.0
_CLOSED = b"closed"
_RAISED = "raised"
_DEPART = timedelta(seconds=60)
_GOODBYE = timedelta(seconds=5)


class Liveness:
    """One worker's watch over its successor, and over the verdict."""

    def __init__(self, world: RealWorld, clients: Clients) -> None:
        self._world = world
        self._clients = clients
        self._told = threading.Event()
        self._goodbye_said = threading.Lock()
        self._closing = False
        self.groups = Groups(world, "liveness", world.members, LONG)
        self._watches: list[Activity] = []

    def watch(self) -> None:
        """Begin; every worker does."""
        try:
            self.groups.on("cpu")
        except RuntimeError as error:
            raise WorkerLostError(
                f"worker {self._world.rank} could not connect to all of the "
                f"{self._world.size} workers: {error}"
            ) from error
        self._watches = [
            self._world.spawn("watch-neighbour", self._watch_neighbour),
            self._world.spawn("watch-lost", self._watch_lost),
        ]

    def report(self, error: BaseException, of_script: bool = False) -> None:
        """This worker ends with an error, which its script may have raised: propose that."""
        self._propose(self._world.rank, f"{type(error).__name__}: {error}", of_script)

    def _propose(self, rank: int, reason: str, raised: bool = False) -> None:
        """Propose a verdict; the first one stands."""
        mine = f"{rank}:{_RAISED if raised else ''}:{reason}"
        with suppress(RuntimeError):  # the store went with the worker; the watch sees that too
            verdict = self._clients.mine().compare_set("lost", "", mine)
            if bytes(verdict) == _CLOSED:
                self._departs(rank)

    def wait_for_verdict(self, epoch: int | None = None) -> None:
        """Something has broken: give the news of it time to come."""
        within(_VERDICT_S, self._told.wait)

    def close(self) -> None:
        """All have come to the end: let the others go, and wait until they are gone."""
        self._closing = True
        with suppress(RuntimeError):
            self._clients.mine().compare_set("lost", "", _CLOSED.decode())
            self._departs(self._world.rank)
        self.say_goodbye()
        for watch in self._watches:
            watch.join()
        if self._world.rank == 0:
            everyone = [f"departed/{rank}" for rank in self._world.members]
            with suppress(RuntimeError):  # two that were neighbours ended: nobody wrote for one
                self._clients.mine().wait(everyone, _DEPART)

    def stop(self) -> None:
        """This worker has failed; what it says of itself ends its watches."""

    def _departs(self, rank: int) -> None:
        self._clients.mine().set(f"departed/{rank}", b"1")

    def say_goodbye(self) -> None:
        """Release the predecessor's watch; once.

        It may be the one that was lost. When Gloo fails to write it forgets to tell whoever waits
        for that, so the wait has a limit, and nobody else waits for it. Who gets no goodbye finds
        the connection ended instead, and what it then reports comes after the verdict.
        """
        if not self._goodbye_said.acquire(blocking=False):
            return
        predecessor = self._neighbour(-1)
        with suppress(RuntimeError):
            group, place = self.groups.on("cpu"), self._world.members.index(predecessor)
            wait_for_c10d(group.send([torch.zeros(1)], place, 0), _GOODBYE)

    def _neighbour(self, by: int) -> int:
        members = self._world.members
        return members[(members.index(self._world.rank) + by) % len(members)]

    def _watch_neighbour(self) -> None:
        successor = self._neighbour(1)
        place = self._world.members.index(successor)
        try:
            wait_for_c10d(self.groups.on("cpu").recv([torch.empty(1)], place, 0), LONG)
        except RuntimeError:
            self._propose(successor, "its connection broke: the process has ended")

    def _watch_lost(self) -> None:
        try:
            verdict = self._clients.get("lost")
        except (RuntimeError, ClosedError) as error:
            verdict = b"-1::the job's store does not answer any more: " + str(error)[:200].encode()
        lost = verdict != _CLOSED and not self._closing
        if lost:
            rank, raised, reason = verdict.decode().split(":", 2)
            words = f"worker {rank} was lost ({reason}); "
            words += f"seen by worker {self._world.rank} of {self._world.size}"
            self._world.failed(fatal(words, int(rank), raised == _RAISED))
        self._told.set()
        if lost:
            self.say_goodbye()
