"""Launchers of several nodes, each with clients of real stores: who goes on with which."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import until

from offbeat import launched
from offbeat.launch.job import LaunchError, Store, host_store, reach_store
from offbeat.launch.nodes import WELL, Nodes


def _nothing() -> None:
    """Nobody has to be woken."""


class Job:
    """The launchers of two nodes, with what they know of each other; and both stores."""

    def __init__(self) -> None:
        self.store: Store | None = host_store()
        self.standby = host_store()
        port = self.store.port
        self.nodes = [Nodes(reach_store("127.0.0.1", port), node, 2) for node in (0, 1)]
        spare = None, ("127.0.0.1", self.standby)
        with ThreadPoolExecutor() as threads:
            meeting = [
                threads.submit(one.meet, 1, 60.0, time.sleep, there)
                for one, there in zip(self.nodes, spare, strict=True)
            ]
            assert [each.result() for each in meeting] == [[1, 1], [1, 1]]
        for one in self.nodes:
            one.reach_standby()

    def lose_store(self) -> None:
        self.store = None  # its server ends with it


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    for one in job.nodes:
        one.close()


def test_a_launcher_that_has_not_heard_yet_that_losses_are_survived_asks_the_standby(
    job: Job,
) -> None:
    job.standby.set(launched.SURVIVE_KEY, b"1")
    job.lose_store()
    job.nodes[1].watch(_nothing)
    until(lambda: job.nodes[1].host or job.nodes[1].stop, "it notices")
    assert job.nodes[1].host == 1
    assert not job.nodes[1].stop
    assert "the store of node 0 is gone" in job.nodes[1].ended[0]


def test_a_launcher_ends_its_workers_with_the_store_if_losses_are_not_survived(job: Job) -> None:
    job.lose_store()
    job.nodes[1].watch(_nothing)
    until(lambda: job.nodes[1].stop, "it notices")
    assert "the store of node 0 is gone" in job.nodes[1].stop
    assert job.nodes[1].host == 0


def test_launchers_follow_the_workers_to_the_standby(job: Job) -> None:
    for one in job.nodes:
        one.watch(_nothing)
        one.look(60.0)
    assert [one.keeps_store for one in job.nodes] == [True, False]
    launched.say_moved(job.standby)
    until(lambda: all(one.host for one in job.nodes), "they follow")
    assert [one.keeps_store for one in job.nodes] == [False, True]
    assert not any(one.stop or one.ended for one in job.nodes)  # the store was not lost, only left
    job.nodes[0].say_end(WELL)
    until(lambda: job.nodes[1].ended, "the other one hears of its end")
    assert job.nodes[1].ended == {0: WELL}


def test_the_launcher_with_the_standby_knows_at_its_end_that_it_is_in_use(job: Job) -> None:
    job.nodes[1].watch(_nothing)
    job.nodes[1].look(60.0)
    launched.say_moved(job.standby)
    job.nodes[1].look(60.0)  # as it does before it ends
    assert job.nodes[1].keeps_store


def test_what_was_said_is_seen_by_whoever_looks_then() -> None:
    """A `set` alone is seen too late once in some hundred times."""
    store = host_store()
    client = store.clone()
    for _ in range(5000):
        launched.say_moved(store)
        assert client.check([launched.MOVED_KEY])
        client.delete_key(launched.MOVED_KEY)


def _hears(store: Store, address: str) -> bool:
    try:
        reach_store(address, store.port).set("heard", b"1")
    except LaunchError:
        return False
    return store.check(["heard"])


def _is_open(store: Store, address: str) -> bool:
    try:
        socket.create_connection((address, store.port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3"])
def test_a_store_for_an_ipv4_address_hears_ipv4_alone(address: str) -> None:
    """Else clients are ::ffff:127.0.0.1 to it, and it asks a name server for that."""
    store = host_store(address=address)
    assert _hears(store, "127.0.0.1")
    assert not _is_open(store, "::1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_a_store_for_another_address_hears_ipv6_and_ipv4(address: str) -> None:
    store = host_store(address=address)
    assert _hears(store, "::1")
    store.delete_key("heard")
    assert _hears(store, "127.0.0.1")


def test_a_stores_port_is_free_again_when_the_store_has_gone() -> None:
    store = host_store()
    port = store.port
    with pytest.raises(LaunchError, match=f"port {port} of this host is taken"):
        host_store(port)
    del store
    assert _hears(host_store(port), "127.0.0.1")
