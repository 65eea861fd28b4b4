"""How a loss is noticed where it is survived. *Slow and failed are different.*

Between each two workers there is a connection of our own, from the first epoch to the last. One
thread of every worker listens to all of them:

    "B"              the other side says goodbye: it closes, or it has said itself that it failed
    "E"              the members have changed: look into the store
    "S"              the store is lost, and this worker has come to its standby (failover.py)
    "J"              the same, because the other side joins: there is time until a round has ended
    "."              a beat, every so often. Nobody answers: that is the kernel's business
    "A"              the first thing that a worker hears which has called, to join; or has knocked
    the end of it    the process has ended, without a goodbye

A process that is stopped or swapping keeps its connections, and its kernel answers. A machine that
lost its power or its network does not: its beats stay unacknowledged, and after `OFFBEAT_LOST_S`
seconds (3) the kernel ends the connection.

A worker that joins (entrance.py) calls everybody, and is heard from then on. With `freeze_s`, who
is silent for so long, though its host answers, is expelled. Its connections stay: when it wakes up,
it hears that the members have changed, finds itself not among them, and raises. A worker that has
been frozen, or starved, itself has not heard the others either, and does not judge them for that.

Whoever notices a loss proposes the next epoch (epochs.py), and tells the others, who look for it.

A child that is forked lets go of its copies of these connections (sockets.py).
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from offbeat.errors import WorkerLostError
from offbeat.worlds.base import Activity
from offbeat.worlds.connecting import connected, keep
from offbeat.worlds.entrance import Entrance, nobody_to_join
from offbeat.worlds.epochs import Epochs
from offbeat.worlds.failover import StoreWatch
from offbeat.worlds.membership import FREEZE_S
from offbeat.worlds.peers import HERE, Door, has_ended, has_said_all, prepare, send, unanswered_s
from offbeat.worlds.pool import STANDBY, STORE, Store, StoreMovedError, pool
from offbeat.worlds.sockets import leave_alone, noting
from offbeat.worlds.store import Clients

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_VERDICT_S = 10.0
_BEAT_S = 0.25
_DEPART = timedelta(seconds=60)


class Mesh(Epochs):
    """One worker's connections to all others, and what it hears by them."""

    def __init__(self, world: RealWorld, clients: Clients) -> None:
        super().__init__(world, clients)
        self._closed = self._stopped = self._enters = False
        self._beat_s = min(_BEAT_S, self._limit_s / 4, (world.freeze_s or FREEZE_S) / 4)
        self._heard_s: dict[int, float] = {}
        self._beats_at = self._looked_s = 0.0
        self._to_do: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._activity: Activity | None = None

    def watch(self, alone: bool = False) -> None:
        """Connect to everybody, if not alone yet, and begin to listen; every worker does."""
        with noting():
            self._here, self._there = socket.socketpair()
            self._door = Door(backlog=self._world.size)
            self._server = self._door.server
            try:
                # Connected now: that may take seconds, in which this worker would be silent; and
                # minutes once the store's host is cut off.
                clients = self._clients.borrowed()
                if not alone:
                    self._publish()
                    everyone = self._world.rank, self._world.members
                    self._peers = connected(self._door, self._client, *everyone)
                    self._ended |= {*everyone[1]} - {*self._peers, self._world.rank}
                    self._server.setblocking(False)
            except (OSError, RuntimeError) as error:
                raise WorkerLostError(
                    f"worker {self._world.rank} could not connect to all of the "
                    f"{self._world.size} workers: {error}"
                ) from error
        self._stores = StoreWatch(self._limit_s, self._world.stuck_s, self.lose)
        self._activity = self._world.spawn("watch-members", lambda: self._listen(clients))

    def join(self, words: str, entrance: Entrance) -> None:
        """Become a member of the job that runs; returns when this worker's world knows."""
        self._publish()
        self._server.setblocking(False)
        self._enters = True
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

    def has_joined(self) -> None:
        """This worker has what the others have: from here on they do not end without it."""
        self._enters = False

    def report(self, error: BaseException, of_script: bool = False) -> None:
        """This worker ends with an error: have the others go on; wait until they know."""
        if self._stopped:  # they do
            return
        told = threading.Event()

        def judge() -> None:
            try:
                self._judge(self._world.rank, f"{type(error).__name__}: {error}")
            finally:
                told.set()

        self._have_done(judge)
        told.wait(_VERDICT_S)

    def wait_for_verdict(self, epoch: int | None = None) -> None:
        """Something has broken: give the news of it time to come."""
        world = self._world
        if epoch is not None:
            with suppress(WorkerLostError), world.connecting:
                until = world.now() + _VERDICT_S + self._limit_s
                world.connecting.wait_for(lambda: world.epoch > epoch, until)

    def close(self, members: tuple[int, ...]) -> None:
        """These have come to the end: say goodbye, and wait until they have, if need be."""
        self._closing = True
        rank = self._world.rank
        if self._is_member:
            with suppress(RuntimeError):
                self._clients.mine().compare_set(f"departed/{rank}", "", "1")  # there on return
            self._have_done(self.say_goodbye)
        # Worker 0 may host the store; the launcher that has the standby ends after its workers.
        if (rank == 0 or pool.place == STANDBY) and self._is_member:
            everyone = [f"departed/{rank}" for rank in members]
            with suppress(RuntimeError):
                self._clients.mine().wait(everyone, _DEPART)
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
            send(peer, b"B")

    # --- connecting ------------------------------------------------------------------------

    def _publish(self) -> None:
        """Say where this worker can be called."""
        self._client.delete_key(f"departed/{self._world.rank}")
        self._client.set(f"mesh/{self._world.rank}", self._door.place)

    def _open_again(self) -> None:
        self._publish()
        if self._world.said_attached:
            self._world.let_in()

    def _listen_to(self, rank: int, peer: socket.socket) -> None:
        leave_alone(peer)
        prepare(peer, self._limit_s - self._beat_s)  # since a beat was sent
        self._heard_s[rank] = time.monotonic()
        self._selector.register(peer, selectors.EVENT_READ, rank)

    def _answer(self) -> None:
        """Somebody knocks; or calls, to join: it is a peer from here on, if its rank is free."""
        with suppress(OSError), noting():
            caller = self._server.accept()[0]
            caller.settimeout(self._beat_s)  # it says at once who it is; this worker must beat
            # Who is on its way in has the rank of a lost one, and must not pass for it.
            rank = self._door.asked_by(caller) if self._is_member else None
            free = {*range(self._world.size)}.difference(self._world.members)
            if rank is None or rank not in free or self._closing:
                caller.close()  # it calls again; if its rank was lost, this worker knows by then
                return
            if (before := self._peers.pop(rank, None)) is not None:
                self._selector.unregister(before)
                before.close()
            self._departed.discard(rank)
            self._ended.discard(rank)
            self._peers[rank] = caller
            self._listen_to(rank, caller)
            send(caller, HERE)

    # --- listening -------------------------------------------------------------------------

    def _have_done(self, call: Callable[[], None]) -> None:
        """Have the thread that listens do something."""
        self._to_do.put(call)
        with suppress(OSError):
            self._here.send(b"!")

    def _listen(self, clients: dict[str, Store]) -> None:
        self._clients.use(clients)
        try:
            with selectors.DefaultSelector() as self._selector:
                self._selector.register(self._there, selectors.EVENT_READ, -1)
                self._selector.register(self._server, selectors.EVENT_READ, -2)
                for rank, peer in self._peers.items():
                    self._listen_to(rank, peer)
                self._judge_missing()
                while not self._closed:
                    rest_s = max(self._beats_at - time.monotonic(), 0.0)
                    place = pool.place
                    try:
                        self._hear(self._selector.select(rest_s))
                    except RuntimeError as error:
                        if not isinstance(error, StoreMovedError):
                            self.lose(place, str(error).partition("\n")[0][:200])
        except OSError as error:
            self._fail(str(error))
        finally:
            self._stores.close()
            lets_go = [self._here, self._there, self._server]
            if self._closing and not self._stopped:
                keep(self._peers, self._ended)
            else:
                lets_go += self._peers.values()
            for each in lets_go:
                each.close()

    def _hear(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        now = time.monotonic()
        if now >= self._beats_at:
            self._beats_at = now + self._beat_s
            for peer in self._peers.values():
                send(peer, b".")
        for key, _ in events:
            if key.data == -1:
                self._there.recv(4096)
            elif key.data == -2:
                self._answer()
            elif key.data in self._peers:
                self._heard_s[key.data] = now
                self._read(key.data)
        if self._world.freeze_s is not None:
            self._see_who_is_silent(self._world.freeze_s, now)
        if self._moving is not None:
            self._agree()
        with suppress(Empty):
            while not self._closed:
                self._to_do.get_nowait()()

    def _see_who_is_silent(self, limit_s: float, now: float) -> None:
        looked_s, self._looked_s = self._looked_s, now
        if now - looked_s > limit_s / 2:  # this worker was frozen itself
            self._heard_s = dict.fromkeys(self._peers, now)
        for rank in list(self._peers):
            silent_s = now - self._heard_s.get(rank, now)
            counts = rank in self._world.members and rank not in self._departed
            # A frozen worker's host answers; if not, the kernel says when it is lost.
            if silent_s > limit_s and counts and unanswered_s(self._peers[rank]) < limit_s / 2:
                self._judge(rank, f"silent for {silent_s:.2f} s, and freeze_s is {limit_s:g}")

    def _read(self, rank: int) -> None:
        try:
            said = self._peers[rank].recv(4096)
            ended = has_said_all(self._peers[rank])
        except BlockingIOError:
            return
        except OSError as error:
            said, ended = b"", has_ended(error)
        if b"B" in said:
            self._departed.add(rank)
            self._comes_too_late(rank)
        if b"S" in said:
            self._come.add(rank)
            self.lose(STORE, f"worker {rank} has no answer")
        if b"E" in said:
            self._look()
        elif b"J" in said:
            self._world.change_between_rounds(lambda: self._have_done(self._look))
        if not said:
            self._selector.unregister(self._peers[rank])
            self._peers.pop(rank).close()
            if ended:
                self._ended.add(rank)
            if self._closing:
                self._client.set(f"departed/{rank}", b"1")
            elif rank not in self._departed and not self._has_departed(rank):
                self._look()  # who has proposed itself may have ended before it could say so
                self._judge_gone(rank)
            else:
                self._comes_too_late(rank)

    def _comes_too_late(self, rank: int) -> None:
        """A worker has ended, together with all others: not with one that is on its way in."""
        if self._enters and rank in self._world.members:
            self._world.failed(nobody_to_join(self._world.rank))

    def _end(self) -> None:
        self._closed = True
