"""Links that several transfers share at once: each gets its fair share, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import train

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.sharing import Load, Port, fair_shares
from offbeat.errors import WorkerLostError
from offbeat.worlds import Channel, World, enter_world

LATENCY_S, BYTES_PER_S = 0.5, 100.0
Log = list[tuple[str, int, float]]


def cluster(workers: int, more: str = "", sharing: str = "fair") -> Cluster:
    return Cluster.parse(
        f"workers = {workers}\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = {LATENCY_S}\n"
        f"bandwidth_bytes_per_s = {BYTES_PER_S}\ncontrol_latency_s = 0.0\n"
        f'sharing = "{sharing}"\nall_reduce = "ring"\n{more}'
    )


def of_bytes(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def logged(work: Callable[[World, Log], None], where: Cluster) -> Log:
    """What happened: (what, rank, when)."""
    log: Log = []
    offbeat.run(lambda: work(enter_world(), log), where)
    return log


def sends(*letters: tuple[int, int, int, float]) -> Callable[[World, Log], None]:
    """Each (source, target, bytes, moment), on a channel of its own."""

    def work(world: World, log: Log) -> None:
        def send(channel: Channel, target: int, size: int, moment: float) -> None:
            world.sleep_until(moment)
            channel.send(of_bytes(size), target).wait()

        def receive(channel: Channel, source: int, size: int, name: str) -> None:
            channel.recv(of_bytes(size), source).wait()
            log.append((name, world.rank, world.now()))

        joins = []
        for number, (source, target, size, moment) in enumerate(letters):
            name = f"letter {number}"
            channel = world.channel(name)
            if world.rank == source:
                joins.append(world.spawn("sends", partial(send, channel, target, size, moment)))
            if world.rank == target:
                joins.append(world.spawn("receives", partial(receive, channel, source, size, name)))
        for each in joins:
            each.join()

    return work


def moments(log: Log) -> dict[str, float]:
    return {what: when for what, _, when in log}


# ---------------------------------------------------------------- the shares themselves

WIRE = Port("network", 0, None, 100.0)
OTHER = Port("network", None, 1, 100.0)


def load(bandwidth: float, *ports: Port) -> Load:
    return Load(1.0, 0.0, bandwidth, ports)


def test_equals_on_one_port_get_equal_shares() -> None:
    assert fair_shares([load(100.0, WIRE)] * 4) == [0.25] * 4


def test_what_a_slow_one_leaves_goes_to_the_others() -> None:
    slow, fast = load(10.0, WIRE), load(100.0, WIRE)
    assert fair_shares([slow, fast, fast]) == [1.0, 0.45, 0.45]


def test_who_is_held_up_elsewhere_leaves_room_here() -> None:
    """Two use the first port, three the second; one of them is the same."""
    both, first, second = load(100.0, WIRE, OTHER), load(100.0, WIRE), load(100.0, OTHER)
    shares = fair_shares([both, first, second, second])
    assert shares == pytest.approx([1 / 3, 2 / 3, 1 / 3, 1 / 3])


# ---------------------------------------------------------------- messages


def test_a_message_alone_takes_what_it_takes_without_sharing() -> None:
    alone = sends((0, 1, 300, 0.0))
    assert logged(alone, cluster(2)) == logged(alone, cluster(2, sharing="none"))
    assert moments(logged(alone, cluster(2))) == {"letter 0": 3.5}


def test_two_at_once_over_one_link_take_twice_as_long_until_the_shorter_is_through() -> None:
    log = logged(sends((0, 1, 100, 0.0), (0, 1, 300, 0.0)), cluster(2))
    assert moments(log) == {"letter 0": 2.5, "letter 1": 4.5}


def test_one_that_begins_later_slows_the_first_from_then_on() -> None:
    """The first has sent 200 of 300 bytes at 2 s; then both have half until 4 s."""
    log = logged(sends((0, 1, 300, 0.0), (0, 1, 300, 2.0)), cluster(2))
    assert moments(log) == {"letter 0": 4.5, "letter 1": 6.5}


def test_both_directions_have_the_whole_link_each() -> None:
    log = logged(sends((0, 1, 300, 0.0), (1, 0, 300, 0.0)), cluster(2))
    assert moments(log) == {"letter 0": 3.5, "letter 1": 3.5}


def test_two_senders_share_the_port_of_their_receiver() -> None:
    log = logged(sends((0, 2, 100, 0.0), (1, 2, 100, 0.0), (2, 1, 100, 0.0)), cluster(3))
    assert moments(log) == {"letter 0": 2.5, "letter 1": 2.5, "letter 2": 1.5}


def test_a_latency_is_not_shared() -> None:
    log = logged(sends((0, 1, 100, 0.0), (0, 1, 100, 1.25)), cluster(2))
    assert moments(log) == {"letter 0": 1.5, "letter 1": 2.75}


def test_a_zone_and_a_link_have_wires_of_their_own() -> None:
    more = "[[network.zone]]\nworkers = [0, 1]\nbandwidth_bytes_per_s = 200.0\n"
    more += "[[network.link]]\nbetween = [0, 3]\nbandwidth_bytes_per_s = 50.0\n"
    log = logged(sends((0, 1, 200, 0.0), (0, 2, 200, 0.0), (0, 3, 200, 0.0)), cluster(4, more))
    assert moments(log) == {"letter 0": 1.5, "letter 1": 2.5, "letter 2": 4.5}


def test_letters_of_one_pair_on_one_channel_come_in_order() -> None:
    def work(world: World, log: Log) -> None:
        channel = world.channel("both")
        if world.rank == 0:
            sent = [channel.send(of_bytes(size), 1) for size in (300, 100)]
            for each in sent:
                each.wait()
            return
        second, first = of_bytes(100), of_bytes(300)
        long, short = channel.recv(first, 0), channel.recv(second, 0)
        short.wait()
        log.append(("short", world.rank, world.now()))
        long.wait()
        log.append(("long", world.rank, world.now()))

    log = logged(work, cluster(2))
    assert moments(log) == {"short": 4.5, "long": 4.5}


def test_what_one_worker_exchanges_at_once_leaves_one_after_the_other() -> None:
    def work(world: World, log: Log) -> None:
        channel = world.channel("all")
        others = [rank for rank in world.members if rank != world.rank]
        outgoing = dict.fromkeys(others, of_bytes(100)) if world.rank == 0 else {}
        incoming = {} if world.rank == 0 else {0: of_bytes(100)}
        channel.exchange(outgoing, incoming).wait()
        log.append(("done", world.rank, world.now()))

    done = [("done", 0, 2.5), ("done", 1, 1.5), ("done", 2, 2.5)]
    assert sorted(logged(work, cluster(3))) == done
    assert sorted(logged(work, cluster(3, sharing="none"))) == done


# ---------------------------------------------------------------- collectives


def reduces(*channels: tuple[float, int]) -> Callable[[World, Log], None]:
    """All-reduces of all workers, each (moment, bytes) on a channel of its own."""

    def work(world: World, log: Log) -> None:
        def one(number: int, moment: float, size: int) -> None:
            channel = world.channel(f"number {number}")
            world.sleep_until(moment)
            channel.all_reduce(of_bytes(size)).wait()
            log.append((f"{number}", world.rank, world.now()))

        joins = [
            world.spawn("reduces", partial(one, number, *each))
            for number, each in enumerate(channels)
        ]
        for each in joins:
            each.join()

    return work


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_an_all_reduce_alone_takes_what_it_takes_without_sharing(workers: int) -> None:
    where = cluster(workers)
    log = logged(reduces((0.0, 400)), where)
    assert {when for _, _, when in log} == {where.network.all_reduce_s(range(workers), 400)}


def test_all_reduces_on_two_channels_share_every_link() -> None:
    """2(P-1) phases of 100 bytes: 6 s of sending, 3 s of latency; half of it each, until 6 s."""
    log = logged(reduces((0.0, 400), (0.0, 200)), cluster(4))
    assert moments(log) == {"1": 6.0 + 3.0, "0": 9.0 + 3.0}


def test_all_reduces_of_one_channel_follow_each_other() -> None:
    def work(world: World, log: Log) -> None:
        channel = world.channel("one")
        works = [channel.all_reduce(of_bytes(400)) for _ in range(3)]
        for each in works:
            each.wait()
            log.append(("reduced", world.rank, world.now()))

    assert logged(work, cluster(4)) == logged(work, cluster(4, sharing="none"))


def test_groups_of_other_workers_do_not_share() -> None:
    def work(world: World, log: Log) -> None:
        mine = (0, 1) if world.rank < 2 else (2, 3)
        world.channel("group", mine).all_reduce(of_bytes(200)).wait()
        log.append(("reduced", world.rank, world.now()))

    assert {when for _, _, when in logged(work, cluster(4))} == {3.0}


@pytest.mark.parametrize(
    "algorithm",
    [offbeat.SyncSGD(), offbeat.EagerSGD("majority"), offbeat.ASGD(), offbeat.LocalSGD(steps=2)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_training_whose_rounds_do_not_meet_is_the_same_to_the_bit(
    algorithm: offbeat.Algorithm,
) -> None:
    """One channel, one exchange at a time: sharing changes neither a moment nor a weight."""

    def of(sharing: str) -> tuple[float, list[list[torch.Tensor]]]:
        run = offbeat.run(lambda: train(6, algorithm)[0], cluster(4, sharing=sharing))
        return run.seconds, [each[-1] for each in run.results]

    (seconds, weights), (seconds_shared, weights_shared) = of("none"), of("fair")
    assert seconds == seconds_shared
    for mine, theirs in zip(weights, weights_shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_worker_that_crashes_in_the_middle_of_a_transfer_is_noticed() -> None:
    crash = '[[event]]\nkind = "crash"\nworker = 1\nat_s = 1.0\n'

    def work(world: World, log: Log) -> None:
        world.channel("all").all_reduce(of_bytes(400)).wait()

    with pytest.raises(WorkerLostError, match="worker 1 was lost"):
        logged(work, cluster(4, crash))
