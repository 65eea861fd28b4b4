"""Virtual time: order, deadlocks, failures, and what each worker keeps to itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import DeadlockError, WorkerLostError, WorldError
from offbeat.worlds import Condition, World, enter_world, generators

PAIR = Cluster.uniform(2)


def test_workers_wake_in_the_order_of_time_then_of_asking() -> None:
    log: list[tuple[float, int]] = []

    def worker() -> None:
        world = enter_world()
        for pause in (3.0, 1.0) if world.rank == 0 else (2.0, 2.0):
            world.sleep_until(world.now() + pause)
            log.append((world.now(), world.rank))

    assert offbeat.run(worker, PAIR).seconds == 4.0
    assert log == [(2.0, 1), (3.0, 0), (4.0, 1), (4.0, 0)]


def test_results_come_back_by_rank() -> None:
    assert offbeat.run(offbeat.rank, Cluster.uniform(5)).results == [0, 1, 2, 3, 4]


def test_the_same_seed_gives_the_same_run() -> None:
    def worker() -> list[float]:
        world = enter_world()
        for step in range(20):
            world.sleep_until(world.now() + world.compute_s(step, 1, world.now()))
        return [world.now(), torch.rand(1).item(), random.random()]

    cluster = Cluster.load("noisy-neighbours-16")
    first, again, other = (offbeat.run(worker, cluster, seed=seed).results for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_an_exception_is_raised_with_its_rank_and_virtual_time() -> None:
    def worker() -> None:
        world = enter_world()
        world.sleep_until(1.5)
        if world.rank == 1:
            raise KeyError("batch")
        world.sleep_until(100.0)

    with pytest.raises(KeyError) as caught:
        offbeat.run(worker, PAIR)
    assert caught.value.__notes__ == ["in worker 1 at virtual time 1.5 s"]


def test_clean_up_code_runs_when_another_worker_fails() -> None:
    cleaned = []

    def worker() -> None:
        world = enter_world()
        try:
            world.sleep_until(2.0 - world.rank)
            raise ValueError("first")
        finally:
            cleaned.append(world.rank)

    with pytest.raises(ValueError, match="first"):
        offbeat.run(worker, PAIR)
    assert sorted(cleaned) == [0, 1]


def test_a_deadlock_names_every_blocked_worker_and_what_it_waits_for() -> None:
    def worker() -> None:
        world = enter_world()
        if world.rank == 0:
            world.channel("grads").all_reduce(torch.zeros(1)).wait()
        elif world.rank == 1:
            world.control.get("go")
        else:
            with (never := world.condition("a miracle")):
                never.wait_for(lambda: False)

    with pytest.raises(DeadlockError) as caught:
        offbeat.run(worker, Cluster.uniform(3))
    assert str(caught.value).splitlines() == [
        "at virtual time 0 s nothing is left to wake, and 3 of the tasks are blocked:",
        "  worker 0, main: waits for all_reduce sum, number 0 on channel 'grads': "
        "not there yet: 1, 2",
        "  worker 1, main: waits for control key 'go'",
        "  worker 2, main: waits for a miracle",
    ]


def test_an_activity_that_nobody_ends_is_a_deadlock_too() -> None:
    def worker() -> None:
        world = enter_world()
        world.spawn("listener", lambda: _listen(world))

    with pytest.raises(DeadlockError, match="worker 0, listener: waits for control key 'never'"):
        offbeat.run(worker, Cluster.uniform(1))


def _listen(world: World) -> None:
    world.control.get("never")


def _notify_at(moment: float, world: World, condition: Condition) -> None:
    world.sleep_until(moment)
    with condition:
        condition.notify_all()


def test_random_state_stays_with_its_worker_and_comes_back_outside() -> None:
    def worker() -> list[float]:
        world = enter_world()
        torch.manual_seed(world.rank)
        drawn = []
        for _ in range(3):
            world.sleep_until(world.now() + 1)
            drawn.append(torch.rand(1).item())
        return drawn

    torch.manual_seed(42)
    expected_outside = torch.rand(1)
    torch.manual_seed(42)
    results = offbeat.run(worker, PAIR).results
    assert torch.equal(torch.rand(1), expected_outside)
    for rank in range(2):
        torch.manual_seed(rank)
        assert results[rank] == [torch.rand(1).item() for _ in range(3)]


DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "a normal of torch": lambda: torch.randn(1).item(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(20)).tolist(),
    "Python": random.random,
    "a normal of Python": lambda: random.gauss(0.0, 1.0),
    "a shuffle of Python": lambda: random.sample(range(100), 5),
    "NumPy": np.random.random,
    "a normal of NumPy": np.random.standard_normal,  # every second call moves no generator
}


@pytest.mark.parametrize("public", [False, True], ids=["by address", "by getstate"])
@pytest.mark.parametrize("kind", DRAWS)
def test_drawing_in_turns_gives_each_worker_what_it_would_draw_alone(
    kind: str, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if public:  # as where Python's generator is not laid out as expected
        monkeypatch.setattr(generators, "_twister", lambda _: None)
        monkeypatch.setattr(generators, "_get_python", random.getstate)
        monkeypatch.setattr(generators, "_set_python", random.setstate)

    def seeded(seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def worker() -> list[object]:
        world = enter_world()
        if world.rank < 2:
            seeded(world.rank)
        drawn = []
        for step in range(9):  # not each time: others come in between
            world.sleep_until(world.now() + 1 + world.rank / 8)
            if step % (world.rank + 1) == 0:
                drawn.append(DRAWS[kind]())
        return drawn

    seeded(42)
    DRAWS[kind]()
    expected_outside = DRAWS[kind]()
    seeded(42)
    DRAWS[kind]()
    first, again = (offbeat.run(worker, Cluster.uniform(4), seed=1).results for _ in range(2))
    assert DRAWS[kind]() == expected_outside
    assert first == again
    assert first[2][0] != first[3][0]  # seeded by the run
    for rank in range(2):
        seeded(rank)
        assert first[rank] == [DRAWS[kind]() for _ in first[rank]]


def test_generators_are_swapped_by_address_here() -> None:
    """Else each switch costs 14 microseconds more: look at `_twister` of generators.py."""
    assert generators._get_python is not random.getstate


def test_autocast_stays_with_its_worker() -> None:
    def worker() -> list[bool]:
        world = enter_world()
        seen = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=world.rank == 1):
            for _ in range(2):
                world.sleep_until(world.now() + 1)
                seen.append(torch.is_autocast_enabled("cpu"))
        world.sleep_until(world.now() + 1)
        return [*seen, torch.is_autocast_enabled("cpu")]

    assert offbeat.run(worker, PAIR).results == [[False] * 3, [True, True, False]]


def test_grad_mode_of_the_caller_is_put_back() -> None:
    with torch.no_grad():
        assert offbeat.run(torch.is_grad_enabled, PAIR).results == [True, True]
        assert not torch.is_grad_enabled()


def test_blocking_inside_backward_is_refused() -> None:
    def worker() -> None:
        world = enter_world()
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: world.sleep_until(world.now() + 1))
        (x * 2).backward()

    with pytest.raises(WorldError, match=r"inside backward\(\)"):
        offbeat.run(worker, Cluster.uniform(1))


def test_blocking_under_inference_mode_is_refused() -> None:
    def worker() -> None:
        with torch.inference_mode():
            enter_world().sleep_until(1.0)

    with pytest.raises(WorldError, match="use no_grad"):
        offbeat.run(worker, Cluster.uniform(1))


def test_blocking_while_holding_a_condition_is_refused() -> None:
    def worker() -> None:
        world = enter_world()
        with world.condition("state"):
            world.sleep_until(1.0)

    with pytest.raises(WorldError, match="main blocks while it holds a condition"):
        offbeat.run(worker, Cluster.uniform(1))


def test_a_verb_from_outside_is_refused() -> None:
    world = offbeat.run(enter_world, Cluster.uniform(1)).results[0]
    with pytest.raises(WorldError, match="from outside its workers"):
        world.sleep_until(1e9)


def test_an_all_reduce_begins_with_the_last_and_costs_what_the_network_says() -> None:
    # Ring of 4 over 1 MB/s links: 2 * 3 phases of 1 ms and of a quarter of 4,000 bytes.
    cluster = Cluster.parse(
        """
        workers = 4
        [compute]
        step_s = 1.0
        [network]
        latency_s = 0.001
        bandwidth_bytes_per_s = 1e6
        all_reduce = "ring"
        """
    )

    def worker() -> float:
        world = enter_world()
        world.sleep_until(float(world.rank))
        world.channel("data").all_reduce(torch.ones(1000)).wait()
        return world.now()

    assert offbeat.run(worker, cluster).results == pytest.approx([3.0 + 6 * 0.002] * 4)


def test_all_reduces_on_one_channel_follow_each_other() -> None:
    cluster = Cluster.uniform(2, latency_s=1.0)

    def worker() -> float:
        world = enter_world()
        channel = world.channel("data")
        for work in [channel.all_reduce(torch.ones(1)) for _ in range(3)]:
            work.wait()
        return world.now()

    one = cluster.network.all_reduce_s((0, 1), 4)
    assert offbeat.run(worker, cluster).results == pytest.approx([3 * one] * 2)


WIRED = Cluster.parse(
    """
    workers = 4
    [compute]
    step_s = 1.0
    [network]
    latency_s = 1.0
    bandwidth_bytes_per_s = 8.0
    control_latency_s = 0.0
    [[network.link]]
    between = [2, 3]
    latency_s = 3.0
    """
)


def test_an_all_gather_takes_a_ring_s_phases_of_one_tensor_each() -> None:
    # 3 phases of 8 bytes: 1 s of latency and 1 s on the wire, and 2 s more between 2 and 3.
    def worker() -> tuple[float, list[list[int]]]:
        world = enter_world()
        world.sleep_until(float(world.rank))
        into = torch.empty(4, 1, dtype=torch.int64)
        world.channel("data").all_gather(torch.tensor([world.rank]), into).wait()
        return world.now(), into.tolist()

    assert offbeat.run(worker, WIRED).results == [(3.0 + 3 * 4.0, [[0], [1], [2], [3]])] * 4


def test_an_all_to_all_takes_a_message_to_each_of_the_others() -> None:
    # Somebody talks over the slow link in two of the three phases: 2 to 3, and 3 to 2.
    def worker() -> tuple[float, list[int]]:
        world = enter_world()
        rows, into = 10 * world.rank + torch.arange(4), torch.empty(4, dtype=torch.int64)
        world.channel("data").all_to_all(rows, into).wait()
        return world.now(), into.tolist()

    assert offbeat.run(worker, WIRED).results == [
        (4.0 + 2.0 + 4.0, [rank, 10 + rank, 20 + rank, 30 + rank]) for rank in range(4)
    ]


def test_messages_of_one_exchange_share_the_sender_s_link() -> None:
    def worker() -> float:
        world = enter_world()
        channel, got = world.channel("data"), {0: torch.empty(2)}
        if world.rank == 0:  # 8 bytes, 16, 8: they are on their way after 1, 3 and 4 s
            sent = {1: torch.ones(2), 2: torch.ones(4), 3: torch.ones(2)}
            channel.exchange(sent, {}).wait()
        elif world.rank == 2:
            channel.exchange({}, {0: torch.empty(4)}).wait()
        else:
            channel.exchange({}, got).wait()
        return world.now()

    assert offbeat.run(worker, WIRED).results == [5.0, 2.0, 4.0, 5.0]


def test_an_exchange_ends_with_the_slowest_of_its_messages() -> None:
    def worker() -> tuple[float, float]:
        world = enter_world()
        before, after = (world.rank - 1) % 4, (world.rank + 1) % 4
        world.sleep_until(float(world.rank))
        got = torch.empty(2)
        mine = torch.full((2,), float(world.rank))
        world.channel("data").exchange({after: mine}, {before: got}).wait()
        return world.now(), got[0].item()

    # 0 hears of 3, which began at 3 s; 2 has its own message under way for 4 s.
    assert offbeat.run(worker, WIRED).results == [(5.0, 3.0), (3.0, 0.0), (6.0, 1.0), (6.0, 2.0)]


def test_letters_are_given_out_in_the_order_of_asking_not_of_waiting() -> None:
    def worker() -> list[float]:
        world = enter_world()
        channel = world.channel("pairs")
        if world.rank == 0:
            for number in (1.0, 2.0):
                channel.send(torch.tensor([number]), 1).wait()
            channel.exchange({1: torch.tensor([3.0])}, {}).wait()
            return []
        tensors = [torch.empty(1) for _ in range(3)]
        for work in [channel.recv(tensor, 0) for tensor in tensors][::-1]:
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert offbeat.run(worker, PAIR).results[1] == [1.0, 2.0, 3.0]


def test_wrong_rows_and_strangers_are_refused() -> None:
    def worker() -> None:
        channel = enter_world().channel("data")
        with pytest.raises(ValueError, match=r"all_gather among 2 members .* shape \(2, 3\)"):
            channel.all_gather(torch.zeros(3), torch.zeros(3, 2))
        with pytest.raises(ValueError, match="all_to_all among 2 members"):
            channel.all_to_all(torch.zeros(3), torch.zeros(3))
        with pytest.raises(ValueError, match="cannot exchange with worker 7"):
            channel.exchange({7: torch.zeros(1)}, {})

    offbeat.run(worker, PAIR)


def test_nothing_is_left_of_channels_that_everyone_has_closed() -> None:
    cities = []

    def worker() -> None:
        world = enter_world()
        for number in range(5):
            channel = world.channel("again" if number % 2 else f"number {number}")
            channel.all_reduce(torch.ones(1)).wait()
            other = 1 - world.rank
            channel.exchange({other: torch.ones(1)}, {other: torch.ones(1)}).wait()
            world.spawn("background", lambda: None).join()
            with (never := world.condition("never")):
                never.wait_for(lambda: False, until=world.now() + 1.0)
            assert not never._waiting
            if world.rank == 0:
                world.sleep_until(world.now() + 0.5)
            channel.close()
            channel.close()
            with pytest.raises(WorldError, match="after it has closed it"):
                channel.all_reduce(torch.ones(1))
        cities.append(world.city)

    offbeat.run(worker, PAIR)
    city = cities[0]
    assert len(city.places) == 0
    assert not city.store.waiting
    assert [len(world.worker.tasks) for world in city.worlds] == [1, 1]


def test_a_channel_that_is_opened_again_meets_the_others_same_one() -> None:
    def worker() -> list[float]:
        world, sums = enter_world(), []
        for number in range(3):
            channel = world.channel("data")
            mine = torch.tensor([10.0**number])
            work = channel.all_reduce(mine)
            world.sleep_until(world.now() + world.rank)  # worker 0 is ahead
            work.wait()
            channel.close()
            sums.append(mine.item())
        return sums

    assert offbeat.run(worker, PAIR).results == [[2.0, 20.0, 200.0]] * 2


def test_an_alarm_that_nobody_needs_does_not_lengthen_the_run() -> None:
    def worker() -> None:
        world = enter_world()
        with (ready := world.condition("ready")):
            world.spawn("soon", lambda: _notify_at(1.0, world, ready))
            ready.wait_for(lambda: world.now() >= 1.0, until=600.0)

    assert offbeat.run(worker, PAIR).seconds == 1.0


def test_a_control_value_takes_one_latency_to_the_store_and_one_back() -> None:
    cluster = Cluster.uniform(2, latency_s=0.25)

    def worker() -> float:
        world = enter_world()
        if world.rank == 0:
            world.sleep_until(1.0)
            world.control.set("go", b"")
        else:
            world.control.get("go")
        return world.now()

    assert offbeat.run(worker, cluster).results == [1.0, 1.5]


def test_members_that_call_different_collectives_are_told() -> None:
    def worker() -> None:
        world = enter_world()
        world.channel("data").all_reduce(torch.ones(1), "sum" if world.rank else "max").wait()

    with pytest.raises(
        WorldError, match="worker 1 calls all_reduce sum, the others all_reduce max"
    ):
        offbeat.run(worker, PAIR)


def test_tensors_of_different_length_are_told() -> None:
    def worker() -> None:
        world = enter_world()
        world.channel("data").all_reduce(torch.ones(1 + world.rank)).wait()

    with pytest.raises(
        WorldError, match=r"worker 1 brings \(2,\) of torch.float32, worker 0 \(1,\)"
    ):
        offbeat.run(worker, PAIR)


def test_a_step_in_lockstep_wakes_a_worker_twice_when_computed_and_when_exchanged() -> None:
    def events(steps: int) -> int:
        def worker() -> None:
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with offbeat.attach(model, optimizer, offbeat.SyncSGD()):
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()

        return offbeat.run(worker, Cluster.uniform(5, step_s=1.0, latency_s=0.1)).events

    assert events(7) - events(4) == 3 * (5 * 2 + 1)  # and the end of the exchange itself


def test_what_fails_between_two_tasks_ends_the_run() -> None:
    def worker() -> None:
        tensor = torch.ones(2, requires_grad=True)  # a sum cannot be written into it
        enter_world().channel("data").all_reduce(tensor).wait()

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        offbeat.run(worker, PAIR)


CRASH = Cluster.parse(
    """
    workers = 3
    [compute]
    step_s = 1.0
    [[event]]
    kind = "crash"
    worker = 2
    at_s = 2.5
    """
)


def test_a_crash_ends_the_run_of_everyone_with_an_error_that_names_it() -> None:
    seen = []

    def worker() -> None:
        world = enter_world()
        channel = world.channel("data")
        try:
            for step in range(10):
                world.sleep_until(step + 1.0)
                channel.all_reduce(torch.ones(1)).wait()
        except WorkerLostError as error:
            seen.append((world.rank, error.rank, world.now()))
            raise

    with pytest.raises(WorkerLostError, match=r"worker 2 was lost at virtual time 2.5 s"):
        offbeat.run(worker, CRASH)
    assert seen[0] == (0, 2, 3.0)


def test_who_is_on_the_way_to_the_store_or_back_hears_of_a_loss_when_it_is_there() -> None:
    def worker() -> float:
        world = enter_world()
        world.sleep_until((2.6, 2.45, 2.4)[world.rank])
        try:
            world.control.add("there", 1)
        except WorkerLostError:
            return world.now()
        raise AssertionError("nobody has heard of the loss")

    network = Cluster.uniform(3, latency_s=0.25).network  # the loss is known at 2.75
    run = offbeat.run(worker, CRASH.model_copy(update={"network": network}))
    assert run.results == [2.85, 2.95, None]


def test_a_worker_that_ended_before_its_crash_is_not_lost() -> None:
    assert offbeat.run(offbeat.rank, CRASH).results == [0, 1, 2]


def test_a_worker_that_joins_is_not_there_before() -> None:
    cluster = Cluster.parse(
        'workers = 2\n[compute]\nstep_s = 1\n[[event]]\nkind = "join"\nworker = 1\nat_s = 1'
    )
    run = offbeat.run(lambda: (offbeat.rank(), enter_world().now()), cluster)
    assert run.results == [(0, 0.0), (1, 1.0)]
