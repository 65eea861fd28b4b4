"""A worker is killed, and the others train on: real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.errors import NobodyToJoinError
from offbeat.testing import processes
from offbeat.worlds import entrance
from offbeat.worlds.entrance import Entrance
from offbeat.worlds.peers import Door, knock
from offbeat.worlds.pool import Pool

pytestmark = pytest.mark.real

METHODS: list[offbeat.Algorithm] = [
    offbeat.SyncSGD(),
    offbeat.EagerSGD("solo"),
    offbeat.ABSSGD(),
    offbeat.LocalSGD(3),
]
BY_THEMSELVES: list[offbeat.Algorithm] = [
    offbeat.ASGD(),
    offbeat.RingleaderASGD(),
    offbeat.MSyncSGD(2, top_up=True),
]
"""In which every gradient comes by itself."""
AMONG_NEIGHBOURS: list[offbeat.Algorithm] = [
    offbeat.DPSGD("ring"),
    offbeat.EDM("lazy-ring"),
    offbeat.MomentumTracking("exponential"),
]


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 40))


def _dies_in(seconds: float) -> None:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _train(
    algorithm: offbeat.Algorithm, victims: tuple[int, ...], seconds: float, workers: int = 0
) -> dict[str, Any]:
    """Train for a while; a victim is killed somewhere on the way."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 40))
    loader = DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    longest = 0.0
    with offbeat.attach(model, optimizer, algorithm, survive=True, bucket_bytes=2**12) as dp:
        batches = iter(loader)
        next(batches)  # the loader's workers live from here on
        if dp.rank in victims:
            _dies_in(seconds / 3 + 0.01 * dp.rank)
        for _ in dp.until(seconds=seconds):
            began = time.monotonic()
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            time.sleep(0.002 * (1 + dp.rank % 2))
            optimizer.step()
            longest = max(longest, time.monotonic() - began)
    stats = dp.stats()
    return {
        "identical": stats.replicas_identical,
        "lost": stats.computed_samples - stats.applied_samples - stats.dropped_samples,
        "longest_s": longest,
    }


def _check(told: dict[str, Any]) -> None:
    assert told["identical"]
    assert told["lost"] == pytest.approx(0.0)
    assert told["longest_s"] < 5  # a hang would be one of minutes


def _one_after_another(methods: list[offbeat.Algorithm]) -> list[dict[str, Any]]:
    """Each method loses another worker; those who are left attach again."""
    last = int(os.environ["WORLD_SIZE"]) - 1
    return [_train(each, (last - n,), 0.6) for n, each in enumerate(methods)]


@pytest.mark.parametrize(
    "methods",
    [METHODS, BY_THEMSELVES, AMONG_NEIGHBOURS],
    ids=["sums", "by themselves", "among neighbours"],
)
def test_the_others_train_on_after_one_loss_and_the_next(
    methods: list[offbeat.Algorithm],
) -> None:
    ended = processes(_one_after_another, 2 + len(methods), methods, check=False)
    assert [one.exit_code for one in ended[2:]] == [-signal.SIGKILL] * len(methods)
    for one in ended[:2]:
        assert one.error is None, one.error
        for told in one.result:
            _check(told)


def test_two_at_once_may_die_the_first_among_them_and_forked_children_hide_nothing() -> None:
    ended = processes(_train, 4, offbeat.EagerSGD("majority"), (0, 1), 0.8, 1, check=False)
    assert [one.exit_code for one in ended[:2]] == [-signal.SIGKILL] * 2
    for one in ended[2:]:
        assert one.error is None, one.error
        _check(one.result)


def _fails() -> str:
    """Worker 1 raises: it ends with its own error, and the others go on."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(model, optimizer, offbeat.SyncSGD(), survive=True) as dp:
        for step in range(20):
            if dp.rank == 1 and step == 5:
                raise KeyError("a bad batch")
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
    assert dp.stats().replicas_identical
    return "went on"


def test_a_worker_that_raises_is_lost_to_the_others() -> None:
    zero, one, two = processes(_fails, 3, check=False)
    assert isinstance(one.error, KeyError)
    assert zero.result == two.result == "went on"


def _freezes(freeze_s: float) -> str:
    """Worker 1 stops itself, and a child of it wakes it up again, long after."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(
        model, optimizer, offbeat.EagerSGD("majority"), survive=True, freeze_s=freeze_s
    ) as dp:
        if dp.rank == 1:
            me = os.getpid()
            if os.fork() == 0:
                time.sleep(0.1)
                os.kill(me, signal.SIGSTOP)
                time.sleep(3 * freeze_s)
                os.kill(me, signal.SIGCONT)
                os._exit(0)
        for _ in dp.until(seconds=5 * freeze_s):
            model(torch.randn(4, 40)).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
    assert dp.stats().replicas_identical
    return "came back" if dp._world.returns else "went on"


def test_a_frozen_worker_is_expelled_and_joins_again_when_it_wakes_up() -> None:
    told = [each.result for each in processes(_freezes, 3, 0.5)]
    assert told == ["went on", "came back", "went on"]


def _comes_back_to_nobody() -> str:
    """Worker 1 freezes; worker 0 goes on without it, and is killed."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True, freeze_s=0.5) as dp:
        me = os.getpid()
        if dp.rank == 1 and os.fork() == 0:
            time.sleep(0.1)
            os.kill(me, signal.SIGSTOP)
            time.sleep(2.0)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        for _ in dp.until(seconds=20):
            model(torch.randn(4, 40)).square().mean().backward()
            time.sleep(0.005)
            optimizer.step()
            if dp.rank == 0 and dp._world.epoch:
                os.kill(me, signal.SIGKILL)
    return "trained on"


def test_who_comes_back_when_all_others_were_killed_says_so() -> None:
    zero, one = processes(_comes_back_to_nobody, 2, check=False, time_out_s=15)
    assert zero.exit_code == -signal.SIGKILL
    assert isinstance(one.error, NobodyToJoinError), one.error


class Street:
    """A job's store, and what a joiner finds where workers have said that they can be called."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.heard: list[int | None] = []
        self._sockets: list[socket.socket] = []

    def silent(self, rank: int) -> Door:
        """Another process has the port, and says nothing."""
        door = Door(backlog=8)
        self.store.set(f"mesh/{rank}", door.place)
        self._sockets.append(door.server)
        return door

    def answers(self, rank: int) -> None:
        """The worker itself."""
        door = self.silent(rank)

        def answer() -> None:
            with suppress(OSError):
                while True:
                    with door.server.accept()[0] as caller:
                        self.heard.append(door.asked_by(caller))

        threading.Thread(target=answer, daemon=True).start()

    def of_another(self, rank: int) -> None:
        """Another worker has the port by now, and answers who means it."""
        self.answers(rank)
        host, port, word = bytes(self.store.get(f"mesh/{rank}")).decode().split()
        self.store.set(f"mesh/{rank}", f"{host} {port} {int(word) ^ 1}")

    def off(self, rank: int) -> None:
        """Its host is off: nobody answers, not even a kernel."""
        door = self.silent(rank)
        door.server.listen(0)
        for _ in range(4):  # no more fit in, and are not heard
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(door.server.getsockname())
            self._sockets.append(one)

    def joiner(self, members: list[int], check: Callable[[], None] = lambda: None) -> Entrance:
        self.store.set("members", json.dumps(members))
        clients: Any = SimpleNamespace(mine=lambda: self.store)
        return Entrance(9, clients, check)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # whoever accepts comes out
            each.close()


class EndsAsOneKnocks(HashStore):  # type: ignore[misc]
    """The store of a job whose workers end well just when a joiner looks where their doors are."""

    def check(self, keys: list[str]) -> bool:
        if keys == ["mesh/1"]:
            for rank in range(2):
                self.set(f"departed/{rank}", "1")
        return bool(super().check(keys))


@pytest.fixture
def street(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Street]:
    monkeypatch.setattr(entrance, "end_in_a_sentence", lambda: None)
    monkeypatch.setattr(entrance, "_IN_VAIN", 3)
    monkeypatch.setattr(entrance, "_HEAR_S", 0.5)
    made = Street(getattr(request, "param", HashStore)())
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["silent", "of_another", "off"])
@pytest.mark.timeout(60)
def test_a_joiner_does_not_wait_for_whoever_has_a_dead_workers_port(
    street: Street, kind: str
) -> None:
    for rank in range(2):
        getattr(street, kind)(rank)
    with pytest.raises(NobodyToJoinError, match="none of them answers any more"):
        street.joiner([0, 1, 9]).others()
    assert bool(street.heard) == (kind == "of_another")


@pytest.mark.timeout(60)
def test_a_joiner_waits_for_as_long_as_one_of_them_answers(street: Street) -> None:
    """The hosts of three others are off; the fourth one takes its time."""
    for rank in range(3):
        street.off(rank)
    street.answers(3)

    def attach() -> None:
        if len(street.heard) >= 5:  # more than in vain
            for rank in range(4):
                street.store.set(f"entrance/{rank}", json.dumps({"of": rank}))

    assert street.joiner([0, 1, 2, 3], attach).others() == {"of": 0}


@pytest.mark.parametrize("street", [EndsAsOneKnocks], indirect=True)
def test_a_joiner_does_not_call_those_killed_who_end_as_it_knocks(street: Street) -> None:
    for rank in range(2):
        street.silent(rank).server.close()
    with pytest.raises(NobodyToJoinError, match="they have ended their training"):
        street.joiner([0, 1]).others()


def _knocks() -> tuple[set[int], set[int]]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(model, optimizer, survive=True) as dp:
        client = vars(dp._world)["clients"].mine()
        return knock(client, {0, 1, 2} - {dp.rank}, 20.0)


def test_who_listens_answers_a_knock() -> None:
    told = [each.result for each in processes(_knocks, 3)]
    assert told == [({1, 2}, set()), ({0, 2}, set()), ({0, 1}, set())]


def _listens_late(seconds: float) -> list[Any]:
    """Train where the thread that listens, if it connects to the store, takes long to do so."""
    borrow = Pool.borrow

    def slowly(self: Pool, place: str) -> Any:
        if "watch-members" in threading.current_thread().name:
            time.sleep(seconds)
        return borrow(self, place)

    if int(os.environ["RANK"]) == 0:
        Pool.borrow = slowly  # type: ignore[method-assign]
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with offbeat.attach(model, optimizer, offbeat.ABSSGD(), survive=True) as dp:
        for _ in dp.until(seconds=2 * seconds):
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            time.sleep(0.01)
            optimizer.step()
        assert dp._world.freeze_s is not None
    return [*dp._world.among, dp.stats().lost_samples]


def test_who_waits_for_the_store_is_not_silent() -> None:
    for ended in processes(_listens_late, 3, 2.0):
        assert ended.result == [0, (0, 1, 2), 0.0]
