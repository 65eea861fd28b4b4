"""Checks that every world must pass: what its verbs promise, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from offbeat.errors import EpochOver
from offbeat.worlds import World, enter_world, leave_world

Check = Callable[[World], None]


def a_worker_knows_itself_and_the_others(world: World) -> None:
    assert 0 <= world.rank < world.size
    assert world.members == tuple(range(world.size))
    assert world.epoch == 0
    assert world.among == (world.epoch, world.members)


def all_reduce_gives_everyone_the_same_sum(world: World) -> None:
    channel = world.channel("sum")
    for length in (1, 1000):
        tensor = torch.full((length,), float(world.rank + 1))
        channel.all_reduce(tensor).wait()
        assert tensor.eq(world.size * (world.size + 1) / 2).all(), tensor


def all_reduce_knows_max_and_min(world: World) -> None:
    channel = world.channel("extremes")
    most, least = torch.tensor([world.rank]), torch.tensor([world.rank])
    channel.all_reduce(most, "max").wait()
    channel.all_reduce(least, "min").wait()
    assert (most.item(), least.item()) == (world.size - 1, 0)


def collectives_under_way_together_end_in_order(world: World) -> None:
    channel = world.channel("several")
    tensors = [torch.full((8,), float(number)) for number in range(5)]
    for work in [channel.all_reduce(tensor) for tensor in tensors]:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [world.size * n for n in range(5)]


def collectives_under_way_together_may_be_waited_for_in_another_order(world: World) -> None:
    """Of one shape, so that what one has needed may be used again for the next."""
    channel = world.channel("backwards")
    for turn in range(4):
        tensors = [torch.full((8,), 10.0 * turn + number) for number in range(1 + turn)]
        works = [channel.all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for number, tensor in enumerate(tensors):
            assert tensor.tolist() == [world.size * (10.0 * turn + number)] * 8


def broadcast_takes_over_the_sources_values(world: World) -> None:
    source = world.size - 1
    tensor = torch.full((3,), float(world.rank))
    world.channel("broadcast").broadcast(tensor, source).wait()
    assert tensor.tolist() == [source] * 3


def tensors_between_two_workers_arrive_in_order(world: World) -> None:
    if world.size == 1:
        return
    channel = world.channel("pairs")
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent = [channel.send(torch.tensor([world.rank, number]), after) for number in range(3)]
    for number in range(3):
        channel.recv(got := torch.empty(2, dtype=torch.int64), before).wait()
        assert got.tolist() == [before, number]
    for work in sent:
        work.wait()


def all_gather_has_a_row_of_everyone(world: World) -> None:
    channel = world.channel("rows")
    for shape in ((), (3,), (2, 2)):
        into = torch.full((world.size, *shape), -1.0)
        channel.all_gather(torch.full(shape, float(world.rank)), into).wait()
        for rank in world.members:
            assert into[rank].eq(rank).all(), into


def all_to_all_transposes(world: World) -> None:
    tensor = torch.tensor([[world.rank, to] for to in world.members])
    into = torch.full_like(tensor, -1)
    world.channel("transposed").all_to_all(tensor, into).wait()
    assert into.tolist() == [[source, world.rank] for source in world.members]


def tables_of_another_shape_are_refused(world: World) -> None:
    channel = world.channel("tables")
    row, table = torch.zeros(2), torch.zeros(world.size + 1, 2)
    for verb, tensor in ((channel.all_gather, row), (channel.all_to_all, table)):
        try:
            verb(tensor, table)
        except ValueError:
            continue
        raise AssertionError(f"a table of {world.size + 1} rows among {world.size} workers")


def everyone_exchanges_with_everyone_at_once(world: World) -> None:
    """Tensors large enough that no buffer on the way takes them in."""
    channel, others = world.channel("exchange"), [r for r in world.members if r != world.rank]
    for length in (1, 300_000):
        outgoing = {other: torch.full((length,), 10.0 * world.rank + other) for other in others}
        incoming = {other: torch.empty(length) for other in others}
        channel.exchange(outgoing, incoming).wait()
        for other in others:
            assert incoming[other].eq(10.0 * other + world.rank).all(), (other, world.rank)
    channel.exchange({}, {}).wait()


def an_exchange_may_go_one_way_and_keeps_the_order(world: World) -> None:
    if world.size == 1:
        return
    channel = world.channel("one way")
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    first, second = torch.zeros(1), torch.zeros(1)
    sent = channel.send(torch.tensor([1.0]), after)
    exchanged = channel.exchange({after: torch.tensor([2.0])}, {before: first})
    received = channel.recv(second, before)
    for work in (sent, exchanged, received):
        work.wait()
    assert (first.item(), second.item()) == (1.0, 2.0)


def nobody_exchanges_with_itself_or_a_stranger(world: World) -> None:
    channel = world.channel("no such")
    for peer in (world.rank, world.size):
        try:
            channel.exchange({peer: torch.zeros(1)}, {})
        except ValueError:
            continue
        raise AssertionError(f"worker {world.rank} of {world.size} exchanges with {peer}")


def a_closed_channel_may_be_opened_again(world: World) -> None:
    """Members close two channels in different orders: closing waits for nobody."""
    for _ in range(3):
        channels = [world.channel(f"again {number}") for number in range(2)]
        for channel in channels:
            channel.all_reduce(total := torch.ones(1)).wait()
            assert total.item() == world.size
        for channel in channels[:: -1 if world.rank % 2 else 1]:
            channel.close()


def a_channel_of_another_epoch_is_not_opened(world: World) -> None:
    """By one worker only: it would stand in for the one that the others open."""
    if world.size == 1:
        return
    if world.rank == 0:
        try:
            world.channel("epoch", epoch=world.epoch + 1)
        except EpochOver:
            pass
        else:
            raise AssertionError(f"a channel of epoch {world.epoch + 1} in {world.epoch}")
    world.channel("epoch", epoch=world.epoch).all_reduce(total := torch.ones(1)).wait()
    assert total.item() == world.size


def groups_do_not_hear_each_other(world: World) -> None:
    mine = tuple(rank for rank in world.members if rank % 2 == world.rank % 2)
    tensor = torch.tensor([1.0])
    channel = world.channel("parity", mine)
    channel.all_reduce(tensor).wait()
    assert channel.members == mine
    assert tensor.item() == len(mine)


def a_channel_refuses_strangers(world: World) -> None:
    for members in ((world.rank, world.size), (world.rank, world.rank)):
        try:
            world.channel("strange", members)
        except ValueError:
            continue
        raise AssertionError(f"a channel of {members} among {world.size} workers")


def control_values_reach_everyone(world: World) -> None:
    world.control.set(f"from/{world.rank}", f"{world.rank}".encode())
    for rank in world.members:
        assert world.control.get(f"from/{rank}") == f"{rank}".encode()


def a_counter_gives_each_worker_its_own_number(world: World) -> None:
    mine = world.control.add("tickets", 1)
    world.control.set(f"ticket/{mine}", f"{world.rank}".encode())
    owners = {world.control.get(f"ticket/{number + 1}") for number in range(world.size)}
    assert len(owners) == world.size


def the_clock_goes_on_and_sleeps(world: World) -> None:
    began = world.now()
    world.sleep_until(began + 0.01)
    assert world.now() >= began + 0.01
    world.sleep_until(began)  # has passed


def a_background_activity_hands_its_result_over(world: World) -> None:
    ready, found = world.condition("the result"), []
    channel = world.channel("background")

    def reduce() -> None:
        channel.all_reduce(total := torch.tensor([float(world.rank)])).wait()
        with ready:
            found.append(total.item())
            ready.notify_all()

    activity = world.spawn("reduce", reduce)
    with ready:
        assert ready.wait_for(lambda: bool(found))
    activity.join()
    assert found == [sum(world.members)]


def waiting_for_a_condition_ends_at_the_deadline(world: World) -> None:
    began = world.now()
    with (never := world.condition("never")):
        assert not never.wait_for(lambda: False, until=began + 0.02)
    assert world.now() >= began + 0.02


def an_all_reduce_does_not_end_before_its_tensor_is_ready(world: World) -> None:
    channel = world.channel("not before")
    moment = world.now() + (0.05 if world.rank == 0 else 0.0)
    channel.all_reduce(torch.zeros(1), not_before=moment).wait()
    if world.rank == 0:
        assert world.now() >= moment


def a_grad_mode_stays_with_its_worker(world: World) -> None:
    channel = world.channel("grad mode")
    with torch.set_grad_enabled(world.rank % 2 == 0):
        for _ in range(3):
            channel.all_reduce(torch.zeros(1)).wait()
            assert torch.is_grad_enabled() == (world.rank % 2 == 0)


CHECKS: tuple[Check, ...] = (
    a_worker_knows_itself_and_the_others,
    all_reduce_gives_everyone_the_same_sum,
    all_reduce_knows_max_and_min,
    collectives_under_way_together_end_in_order,
    collectives_under_way_together_may_be_waited_for_in_another_order,
    broadcast_takes_over_the_sources_values,
    tensors_between_two_workers_arrive_in_order,
    all_gather_has_a_row_of_everyone,
    all_to_all_transposes,
    tables_of_another_shape_are_refused,
    everyone_exchanges_with_everyone_at_once,
    an_exchange_may_go_one_way_and_keeps_the_order,
    nobody_exchanges_with_itself_or_a_stranger,
    a_closed_channel_may_be_opened_again,
    a_channel_of_another_epoch_is_not_opened,
    groups_do_not_hear_each_other,
    a_channel_refuses_strangers,
    control_values_reach_everyone,
    a_counter_gives_each_worker_its_own_number,
    the_clock_goes_on_and_sleeps,
    a_background_activity_hands_its_result_over,
    waiting_for_a_condition_ends_at_the_deadline,
    an_all_reduce_does_not_end_before_its_tensor_is_ready,
    a_grad_mode_stays_with_its_worker,
)


def on_this_world(*checks: Check) -> Callable[[], None]:
    """Return a function that runs checks, one after the other, on the world it is called in."""
    return partial(_on_this_world, checks)


def _on_this_world(checks: Sequence[Check]) -> None:
    world = enter_world()
    try:
        for check in checks:
            check(world)
    except BaseException as error:
        leave_world(world, error)
        raise
    leave_world(world)
