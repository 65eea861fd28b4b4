"""An iterable data set by shards: each to one reader, once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nets import loss, net, sgd
from test_deal import cluster
from torch.utils.data import DataLoader

import offbeat
from offbeat.errors import DisagreementError


def read(shard: int) -> Iterator[int]:
    """A shard of so many samples, which can be told apart."""
    yield from range(100 * shard, 100 * shard + 2 + shard % 3)


def samples(shards: int) -> list[int]:
    return [sample for shard in range(shards) for sample in read(shard)]


def epochs(shards: offbeat.DealShards, count: int, **loading: Any) -> list[list[int]]:
    """Train over shards; return the samples that this worker got, by epoch."""
    model = net()
    opt = sgd(model)
    loader: Any = DataLoader(shards, batch_size=2, **loading)
    got: list[list[int]] = []
    with offbeat.attach(model, opt, offbeat.ABSSGD()):
        for _ in range(count):
            got.append([])
            for batch in loader:
                got[-1] += batch.tolist()
                opt.zero_grad()
                loss(model, 0, 0).backward()
                opt.step()
    return got


def all_of(results: list[list[list[int]]], epoch: int) -> list[int]:
    return sorted(sample for worker in results for sample in worker[epoch])


def test_every_shard_comes_once_an_epoch_and_the_fast_read_more() -> None:
    results = offbeat.run(
        lambda: epochs(offbeat.DealShards(range(20), read), 2), cluster(1.0, 0.5, latency_s=1e-3)
    ).results
    for epoch in range(2):
        assert all_of(results, epoch) == samples(20)
    fast, slow = (len(worker[0]) + len(worker[1]) for worker in results)
    assert fast > 1.6 * slow
    assert results[0][0] != results[0][1]


def test_one_data_set_may_serve_all_workers_of_a_virtual_run() -> None:
    shards = offbeat.DealShards(range(20), read)
    for _ in range(2):
        results = offbeat.run(lambda: epochs(shards, 2), "uniform-8", workers=3).results
        assert [all_of(results, epoch) for epoch in range(2)] == [samples(20)] * 2


def test_each_iteration_is_the_next_epoch() -> None:
    shards = offbeat.DealShards(range(20), read)
    first, second = list(shards), list(shards)
    shards.set_epoch(0)
    assert first == list(shards) != second == list(shards)
    shards.set_epoch(1)
    assert list(shards) == second
    assert list(offbeat.DealShards(range(20), read, shuffle=False)) == samples(20)


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.slow
def test_alone_the_processes_of_a_loader_divide_the_shards(context: str) -> None:
    shards = offbeat.DealShards(range(20), read)
    kept = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": context}
    for loading in ({"num_workers": 2, "multiprocessing_context": context}, kept):
        results = epochs(shards, 2, **loading)
        assert [all_of([results], epoch) for epoch in range(2)] == [samples(20)] * 2
        assert results[0] != results[1]


def test_processes_have_no_part_in_virtual_time() -> None:
    def worker() -> None:
        epochs(offbeat.DealShards(range(20), read), 1, num_workers=1)

    with pytest.raises(RuntimeError, match=r"in virtual time.*num_workers=0"):
        offbeat.run(worker, cluster(1.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda rank: {"shards": range(20 + rank)}, "the number of shards: .* 20.* 21"),
        (
            lambda rank: {"shards": [rank, 1 - rank]},
            "the names of the shards, or their order",
        ),
        (lambda rank: {"seed": rank}, "seed: "),
    ],
)
def test_workers_that_deal_different_shards_are_told_so(settings: Any, words: str) -> None:
    def worker() -> None:
        list(offbeat.DealShards(**{"shards": range(20), "read": read, **settings(offbeat.rank())}))

    with pytest.raises(DisagreementError, match=f"workers disagree about {words}"):
        offbeat.run(worker, cluster(1.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"shards": []}, ValueError, "no shards"),
        ({"read": "txt"}, TypeError, "read must be a function of a shard, got 'txt'"),
        ({"shuffle": 1}, ValueError, "shuffle must be True or False"),
        ({"seed": 0.5}, ValueError, "seed must be a whole number"),
    ],
    ids=str,
)
def test_bad_input_is_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        offbeat.DealShards(**{"shards": range(3), "read": read, **arguments})


def test_shards_that_come_later_are_an_error() -> None:
    names = ["a", "b"]
    shards = offbeat.DealShards(names, list)
    assert sorted(shards) == ["a", "b"]
    names.append("c")
    with pytest.raises(RuntimeError, match=r"were 2 shards .* are 3 now: make a new DealShards"):
        list(shards)
