"""Who may go on when the network is split: at most one part of it."""

from __future__ import annotations

import errno
import itertools
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat import launched
from offbeat.worlds.failover import Part
from offbeat.worlds.peers import has_said_all, send, unanswered_s
from offbeat.worlds.pool import STANDBY, Pool, StoreMovedError
from offbeat.worlds.sockets import cut_towards
from offbeat.worlds.store import Control


def _subsets(of: range) -> Iterator[set[int]]:
    for size in range(len(of) + 1):
        yield from map(set, itertools.combinations(of, size))


@pytest.mark.parametrize("workers", range(2, 7))
def test_of_two_parts_of_a_split_network_at_most_one_goes_on(workers: int) -> None:
    everyone = set(range(workers))
    for here in _subsets(range(workers)):
        # Of those who have ended, one side may know and the other one not.
        for ended in _subsets(range(workers)):
            with_store = Part(here - ended, [everyone], ended)
            without = Part(everyone - here - ended, [everyone], set())
            both = with_store.may_go_on(has_store=True) and without.may_go_on(has_store=False)
            assert not both or not without.left or not with_store.left


def test_a_half_goes_on_with_the_store_and_not_without() -> None:
    half = Part({0, 1}, [range(4)], set())
    assert half.may_go_on(has_store=True)
    assert not half.may_go_on(has_store=False)
    assert Part({0, 1}, [range(4)], {3}).may_go_on(has_store=False)  # 2 of 3 that may be alive
    assert not Part({0}, [range(3)], set()).may_go_on(has_store=True)


def test_who_has_left_for_another_part_does_not_count_though_an_epoch_named_it() -> None:
    # Of 0 to 4, epoch 1 was to be 0 1 2 without 3 and 4; but 2 has gone over to them.
    assert Part({0, 1}, [(0, 1, 2)], set()).may_go_on(has_store=True)
    assert not Part({0, 1}, [(0, 1, 2), range(5)], set()).may_go_on(has_store=True)
    assert Part({2, 3, 4}, [range(5)], set()).may_go_on(has_store=False)


def test_who_waits_on_a_connection_that_is_cut_comes_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, server.accept()[0] as other:
            cut_towards({"127.0.0.2"}, port)
            other.send(b"x")
            assert one.recv(1) == b"x"
            cut_towards({"127.0.0.1"}, port)
            assert one.recv(1) == b""


def test_a_host_that_answers_is_not_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, server.accept()[0]:
            one.send(b"x")
            assert unanswered_s(one) < 1.0


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells")
def test_a_connection_that_the_kernel_has_given_up_counts_as_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one:
            other = server.accept()[0]
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()  # by a reset
            with pytest.raises(ConnectionResetError):
                one.recv(1)
            assert unanswered_s(one) == math.inf


@pytest.mark.parametrize(
    ("number", "ended"),
    [(errno.ETIMEDOUT, False), (errno.EHOSTUNREACH, False), (errno.EPIPE, True)],
)
def test_why_a_connection_broke_is_kept_when_a_beat_has_heard_it(number: int, ended: bool) -> None:
    """The kernel tells it once, and after that only that there is nothing left to read."""

    class Broken(socket.socket):
        def send(self, *_: Any) -> int:
            raise OSError(number, os.strerror(number))

    with Broken() as one:
        send(one, b".")
        assert has_said_all(one) == ended


class Door:
    """A port of this host that leads to a store: for those who are let in."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pairs: list[socket.socket] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.server.getsockname())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.server, *self._pairs):
            with each, suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def let_in(self) -> None:
        """Whoever comes next."""

        def pump(one: socket.socket, other: socket.socket) -> None:
            with suppress(OSError):
                while said := one.recv(4096):
                    other.sendall(said)
            with suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)

        caller, called = (
            self.server.accept()[0],
            socket.create_connection(("127.0.0.1", self._port)),
        )
        self._pairs += [caller, called]
        for pair in ((caller, called), (called, caller)):
            threading.Thread(target=pump, args=pair, daemon=True).start()

    def pool(self, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Pool:
        """One that has this store as its standby, and one of its own as the job's."""
        own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: own)
        monkeypatch.setenv(launched.STANDBY, self.address)
        passing = threads.submit(self.let_in)
        pool = Pool()
        pool.open()
        passing.result()
        return pool

    def let_in_all(self) -> None:
        """Who come from now on."""

        def serve() -> None:
            with suppress(OSError):  # the door is closed
                while True:
                    self.let_in()

        threading.Thread(target=serve, daemon=True).start()


def test_who_connects_to_a_store_that_is_frozen_comes_out_when_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor() as threads, Door(store.port) as door:
        pool = door.pool(threads, monkeypatch)
        borrowing = threads.submit(pool.borrow, STANDBY)
        assert select.select([door.server], [], [], 60)[0]  # it connects, and nobody answers
        pool.drop_standby()
        with pytest.raises(StoreMovedError):
            borrowing.result(60)
        left = [each for each in threading.enumerate() if "connect-standby" in each.name]
        assert any(each.is_alive() for each in left)  # it still tries, and nobody waits for it
        door.let_in_all()  # so that it ends before this process does
        for each in left:
            each.join(60)
            assert not each.is_alive()


def test_who_waits_long_for_a_connection_tries_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor() as threads, Door(store.port) as door:
        pool = door.pool(threads, monkeypatch)
        borrowing = threads.submit(pool.borrow, STANDBY)
        with door.server.accept()[0]:  # which nobody answers
            door.let_in_all()
            client = borrowing.result(20)  # that would be given up after 30
            client.set("key", b"value")
            assert store.get("key") == b"value"


def test_what_is_kept_is_in_the_store_if_a_thread_cannot_get_to_the_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standby is lost before it was noticed, and a thread has no client of it yet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    standby = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool = Pool()
    pool._note(STANDBY, standby)

    class Place:
        epoch = 0

        def check(self) -> None: ...

        def mine(self, epoch: int | None = None) -> Any:
            return store

        def standby(self) -> Any:
            raise StoreMovedError("the job's standby is lost")

    place: Any = Place()
    monkeypatch.setattr("offbeat.worlds.store.pool", pool)
    kept = Control(place, place).kept()
    kept.set("one", b"1")
    assert kept.set_once("two", b"2") == b"2"
    assert store.get("key/one") == b"1"
    assert not pool.has_standby
