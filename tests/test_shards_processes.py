"""Shards that the processes of a DataLoader read: the position of a loop that they are ahead of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import offbeat

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
FORK: dict[str, Any] = {"multiprocessing_context": "fork"}


def read(shard: int) -> Iterator[int]:
    """A shard of 0 to 6 samples, which can be told apart."""
    yield from range(100 * shard, 100 * shard + 3 * shard % 7)


def samples(shards: int) -> list[int]:
    return [sample for shard in range(shards) for sample in read(shard)]


def loader(shards: Any, processes: int = 2, **settings: Any) -> Any:
    context = FORK if processes else {}
    settings = {"batch_size": 3, **(context | settings)}
    return DataLoader(shards, num_workers=processes, **settings)


def saved_everywhere(
    shards: offbeat.DealShards, **settings: Any
) -> list[tuple[list[int], dict[str, Any]]]:
    """One epoch; after every batch, what the loop has seen of it so far, and the position."""
    seen: list[int] = []
    found = []
    for batch in loader(shards, **settings):
        seen += batch.tolist()
        found.append((list(seen), shards.state_dict()))
    assert sorted(seen) == samples(20)
    return found


def rest(state: dict[str, Any], **settings: Any) -> list[int]:
    """What a new loop sees that goes on from there."""
    shards = offbeat.DealShards(range(20), read)
    shards.load_state_dict(state)
    return [each for batch in loader(shards, **settings) for each in batch.tolist()]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("prefetch_factor", [1, 4])
def test_every_sample_comes_once_wherever_the_loop_is_interrupted(
    processes: int, prefetch_factor: int
) -> None:
    shards = offbeat.DealShards(range(20), read)
    found = saved_everywhere(shards, processes=processes, prefetch_factor=prefetch_factor)
    in_the_middle = 0
    for at, (seen, state) in enumerate(found[:-1]):
        assert state["epoch"] == 0
        assert sorted(seen + rest(state, processes=0)) == samples(20), at
        in_the_middle += len(state["read"])
    assert in_the_middle > len(found) / 2  # of shards


@pytest.mark.parametrize("settings", [{"processes": 3}, {"persistent_workers": True}], ids=str)
def test_processes_go_on_where_processes_were(settings: dict[str, Any]) -> None:
    found = saved_everywhere(offbeat.DealShards(range(20), read))
    for seen, state in found[2:-1:5]:
        assert sorted(seen + rest(state, **settings)) == samples(20)


def test_a_resumed_loop_can_be_saved_again_and_goes_on_with_the_next_epoch() -> None:
    seen, state = saved_everywhere(offbeat.DealShards(range(20), read))[5]
    shards = offbeat.DealShards(range(20), read)
    shards.load_state_dict(state)
    assert shards.state_dict() == state
    once_more = list(seen)
    for batch in loader(shards, processes=3):
        once_more += batch.tolist()
        again = shards.state_dict()
        if again["epoch"] == 0:
            assert sorted(once_more + rest(again)) == samples(20)
    assert sorted(once_more) == samples(20)
    assert shards.epoch == 1
    assert sorted(i for batch in loader(shards) for i in batch.tolist()) == samples(20)


def test_a_loop_that_was_left_is_saved_as_exactly() -> None:
    """Its iterator is gone then, and its processes are."""
    shards, seen = offbeat.DealShards(range(20), read), []
    for at, batch in enumerate(loader(shards)):
        seen += batch.tolist()
        if at == 6:
            break
    state = shards.state_dict()
    assert state["epoch"] == 0
    assert sorted(seen + rest(state)) == samples(20)


def test_an_epoch_that_was_read_but_not_seen_is_not_over() -> None:
    """The processes have read all of it when the loop has seen one batch."""
    shards = offbeat.DealShards(range(3), read)
    iterator = iter(loader(shards, prefetch_factor=16))
    seen = next(iterator).tolist()
    while not shards._own.log.exhausted(0):
        time.sleep(0.01)
    state = shards.state_dict()
    assert state["epoch"] == 0
    assert sorted(seen) != samples(3)
    other = offbeat.DealShards(range(3), read)
    other.load_state_dict(state)
    assert sorted(seen + [int(each) for each in other]) == samples(3)


def test_after_the_last_batch_the_next_epoch_comes() -> None:
    for settings in ({}, {"persistent_workers": True}):
        shards = offbeat.DealShards(range(20), read)
        each = loader(shards, **settings)
        for epoch in range(3):
            assert sorted(i for batch in each for i in batch.tolist()) == samples(20)
            state = shards.state_dict()
            assert (state["epoch"], shards.epoch, state["hand"]) == (epoch + 1, epoch + 1, [])
        assert sorted(rest(state)) == samples(20)


@pytest.mark.slow
def test_samples_without_batches_and_spawned_processes() -> None:
    shards = offbeat.DealShards(range(20), read)
    spawned = {"batch_size": None, "multiprocessing_context": "spawn"}
    seen = []
    for at, sample in enumerate(loader(shards, **spawned)):
        seen.append(int(sample))
        if at == 17:
            state = shards.state_dict()
            break
    assert sorted(seen + rest(state, **spawned | {"batch_size": 2})) == samples(20)


class _Doubled(IterableDataset[int]):
    """A data set of one's own that reads from dealt shards."""

    def __init__(self, shards: offbeat.DealShards) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[int]:
        for sample in self.shards:
            yield 2 * sample


def test_shards_inside_of_another_data_set() -> None:
    other = offbeat.DealShards(range(4), read)
    shards = offbeat.DealShards(range(20), read)
    seen: list[int] = []
    for at, batch in enumerate(loader(_Doubled(shards))):
        seen += [each // 2 for each in batch.tolist()]
        if at == 8:
            state = shards.state_dict()
            break
    assert sorted(seen + rest(state)) == samples(20)
    assert other.state_dict()["epoch"] == 0


def test_each_loop_is_the_next_epoch_whoever_reads() -> None:
    shards, orders = offbeat.DealShards(range(20), read), []
    for processes in (0, 1, 2, 0, 3, 1):
        got = [i for batch in loader(shards, processes=processes) for i in batch.tolist()]
        assert sorted(got) == samples(20), processes
        orders.append(tuple(got))
        assert shards.epoch == len(orders) == shards.state_dict()["epoch"]
    alone = offbeat.DealShards(range(20), read)
    for epoch in (0, 1, 3, 5):
        alone.set_epoch(epoch)
        assert list(alone) == list(orders[epoch])


def test_a_state_is_for_processes_that_start_after_it() -> None:
    shards = offbeat.DealShards(range(20), read)
    kept = loader(shards, persistent_workers=True)
    state = shards.state_dict()
    assert Counter(i for batch in kept for i in batch.tolist()) == Counter(samples(20))
    shards.load_state_dict(state)
    with pytest.raises(RuntimeError, match="make a new DataLoader then"):
        list(kept)


def test_two_loaders_that_take_turns_over_the_same_shards_are_told_so() -> None:
    shards = offbeat.DealShards(range(20), read)
    kept = loader(shards, persistent_workers=True)
    assert sorted(i for batch in kept for i in batch.tolist()) == samples(20)
    assert sorted(i for batch in loader(shards) for i in batch.tolist()) == samples(20)
    with pytest.raises(RuntimeError, match="give each a DealShards of its own"):
        list(kept)


def test_a_loader_that_hands_out_batches_in_any_order_cannot_be_saved() -> None:
    shards = offbeat.DealShards(range(20), read)
    for _ in loader(shards, in_order=False):
        with pytest.raises(RuntimeError, match=r"in_order=False .* leave that out"):
            shards.state_dict()
        break


class _Asks(IterableDataset[int]):
    def __init__(self, shards: offbeat.DealShards) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[int]:
        self.shards.state_dict()
        yield 0


def test_a_process_cannot_be_asked_for_the_position() -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of shards is for the worker itself"):
        list(loader(_Asks(offbeat.DealShards(range(20), read))))
