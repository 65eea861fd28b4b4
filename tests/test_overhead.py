"""What the host costs beyond device and network, charged in virtual time."""

from __future__ import annotations

import pytest
import torch
from nets import net, sgd, train

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.overhead import KINDS, PACE_S, fit_overhead, of_virtual
from offbeat.worlds import World, enter_world

BARE = """
workers = 3
[compute]
step_s = 1.0
[network]
latency_s = 0.25
all_reduce = "ring"
control_latency_s = 0.0
"""


def cluster(**overhead: float) -> Cluster:
    keys = "".join(f"{key} = {value}\n" for key, value in overhead.items())
    return Cluster.parse(f"{BARE}[overhead]\n{keys}")


def last_round_s(algorithm: offbeat.Algorithm, where: Cluster, steps: int = 4) -> float:
    """When the last round of a training was applied."""
    moments: list[float] = []

    def sink(line: dict[str, float | str]) -> None:
        if line["kind"] == "round":
            moments.append(float(line["at_s"]))

    offbeat.run(lambda: train(steps, algorithm), where, records=sink)
    return max(moments)


def test_without_overhead_nothing_is_charged() -> None:
    bare = Cluster.parse(BARE)
    assert bare.overhead == cluster(step_s=0.0).overhead
    assert "overhead" not in bare.describe()
    for algorithm in (offbeat.SyncSGD(), offbeat.EagerSGD("majority"), offbeat.ASGD()):
        assert last_round_s(algorithm, bare) == last_round_s(algorithm, cluster())


def test_a_round_in_lockstep_costs_a_step_and_an_exchange_more() -> None:
    """4 phases of 0.25 s are a round's all-reduce; one more connects the workers before."""
    rounds = 4

    def seconds(**overhead: float) -> float:
        return last_round_s(offbeat.SyncSGD(), cluster(**overhead), rounds)

    bare = seconds()
    assert seconds(step_s=0.125) == bare + rounds * 0.125
    connecting = seconds(exchange_s=0.5) - bare - rounds * 0.5
    assert connecting >= 0.0
    more = last_round_s(offbeat.SyncSGD(), cluster(exchange_s=0.5), rounds + 1)
    assert more - seconds(exchange_s=0.5) == 1.0 + 1.0 + 0.5


def test_messages_cost_an_exchange_each() -> None:
    def work() -> float:
        world = enter_world()
        channel, tensor = world.channel("pair"), torch.zeros(2)
        if world.rank == 0:
            channel.send(tensor, 1).wait()
        elif world.rank == 1:
            channel.recv(tensor, 0).wait()
        return world.now()

    for sharing in ("none", "fair"):
        text = f"{BARE}sharing = '{sharing}'\n[overhead]\nexchange_s = 0.5\n"
        assert offbeat.run(work, Cluster.parse(text)).results == [0.0, 0.75, 0.0]


def test_whoever_a_condition_lets_go_on_does_so_a_moment_later() -> None:
    def work() -> float:
        world = enter_world()
        condition, there = world.condition("there"), []

        def come() -> None:
            world.sleep_until(2.0)
            with condition:
                there.append(True)
                condition.notify_all()

        coming = world.spawn("comes", come)
        with condition:
            condition.wait_for(lambda: bool(there))
            found = world.now()
        coming.join()
        return found

    assert offbeat.run(work, cluster(wake_s=0.125)).results == [2.125] * 3


def test_a_predicate_that_holds_no_more_on_waking_up_is_waited_for_again() -> None:
    """As a thread would: between the two moments somebody else takes what was there."""

    def work() -> float:
        world = enter_world()
        condition, there = world.condition("there"), [0]

        def come(moment: float) -> None:
            world.sleep_until(moment)
            with condition:
                there[0] += 1
                condition.notify_all()

        def take(world: World = world) -> None:
            world.sleep_until(2.0625)
            with condition:
                there[0] -= 1

        joins = [world.spawn("comes", lambda: come(2.0)), world.spawn("takes", take)]
        joins.append(world.spawn("comes again", lambda: come(3.0)))
        with condition:
            condition.wait_for(lambda: there[0] > 0)
            found = world.now()
        for each in joins:
            each.join()
        return found

    assert offbeat.run(work, cluster(wake_s=0.125)).results == [3.125] * 3


@pytest.mark.parametrize("algorithm", [offbeat.EagerSGD("all"), offbeat.ABSSGD(), offbeat.ASGD()])
def test_rounds_of_a_background_wait_for_it_to_wake_up(algorithm: offbeat.Algorithm) -> None:
    assert last_round_s(algorithm, cluster(wake_s=0.05)) > last_round_s(algorithm, cluster())


def test_real_processes_are_not_charged() -> None:
    """They pay as it comes: a pace is that of the device alone."""
    where = Cluster.parse("workers = 1\n[compute]\nstep_s = 0.001\n[overhead]\nstep_s = 100.0\n")
    model = net()
    with offbeat.attach(model, sgd(model), pace=where) as dp:
        assert dp._world.compute_s(0, 1.0, 0.0) == 0.001


def test_resizing_keeps_it_and_describing_tells_it() -> None:
    found = cluster(step_s=0.0005, wake_s=0.0001)
    assert found.resized(7).overhead == found.overhead
    assert "500 µs per micro-batch, 0 per exchange, 100 to wake up" in found.describe()


# ---------------------------------------------------------------- found by a profile

NETWORK = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9, "all_reduce": "ring"}


@pytest.mark.parametrize(
    "overhead",
    [
        {"step_s": 0.0, "exchange_s": 0.0, "wake_s": 0.0},
        {"step_s": 5e-4, "exchange_s": 0.0, "wake_s": 0.0},
        {"step_s": 3e-4, "exchange_s": 7e-4, "wake_s": 2e-4},
    ],
    ids=["nothing", "steps", "all"],
)
def test_a_profile_finds_what_was_charged(overhead: dict[str, float]) -> None:
    """Where virtual workers are the ones to be measured, all that they pay is known."""
    tables = {"network": NETWORK, "overhead": overhead, "compute": {"step_s": PACE_S}}
    where = Cluster.model_validate({"workers": 4, **tables})
    probes = {kind: of_virtual(make(), where) for kind, make in KINDS.items()}
    found = fit_overhead([probes] * 4, NETWORK, paced=True)
    assert found == pytest.approx(overhead, rel=1e-6, abs=1e-9)


def test_the_lateness_of_a_paced_wake_up_is_not_that_of_a_real_device() -> None:
    tables = {"overhead": {"step_s": 5e-4}, "compute": {"step_s": PACE_S}, "network": NETWORK}
    where = Cluster.model_validate({"workers": 2, **tables})
    probes = {kind: of_virtual(make(), where) for kind, make in KINDS.items()}
    found = fit_overhead([probes] * 2, NETWORK, paced=False)
    assert found == pytest.approx({"step_s": 0.0, "exchange_s": 0.0, "wake_s": 0.0}, abs=1e-9)
