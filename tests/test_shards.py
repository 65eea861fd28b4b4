"""An iterable data set by shards: each to one reader, once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nets import loss, net, sgd
from test_deal import cluster
from torch.utils.data import DataLoader

import offbeat
from offbeat.clusters import Cluster
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


# --- checkpoints, and losses -----------------------------------------------------------------


def _resumable(
    algorithm: offbeat.Algorithm, states: dict[int, Any], save_after: int, stop: bool
) -> list[tuple[int, int]]:
    """Train two epochs, save after some steps; stop there, or not; or go on from a state."""
    rank, model = offbeat.rank(), net()
    opt = sgd(model)
    shards = offbeat.DealShards(range(20), read)
    loader: Any = DataLoader(shards, batch_size=2)
    got, steps, resumes = [], 0, rank in states
    with offbeat.attach(model, opt, algorithm) as dp:
        if resumes:
            dp.load_state_dict(states[rank]["dp"])
            shards.load_state_dict(states[rank]["shards"])
        for epoch in range(shards.epoch, 2):
            for batch in loader:
                got += [(epoch, sample) for sample in batch.tolist()]
                opt.zero_grad()
                loss(model, 0, 0).backward()
                opt.step()
                steps += 1
                if steps == save_after and not resumes:
                    states[rank] = {"dp": dp.state_dict(), "shards": shards.state_dict()}
                    if stop:
                        return got
    return got


@pytest.mark.parametrize("save_after", [1, 4, 7, 12, 15])
@pytest.mark.parametrize(
    "algorithm", [offbeat.SyncSGD(), offbeat.EagerSGD(), offbeat.ABSSGD()], ids=str
)
def test_every_sample_comes_once_across_an_interruption(
    algorithm: offbeat.Algorithm, save_after: int
) -> None:
    states: dict[int, Any] = {}
    both: list[tuple[int, int]] = []
    for stop in (True, False):
        run = offbeat.run(
            lambda stop=stop: _resumable(algorithm, states, save_after, stop),
            cluster(1.0, 0.7, 0.5, latency_s=0.1),
        )
        both += [each for got in run.results for each in got]
    assert sorted(both) == [(epoch, sample) for epoch in range(2) for sample in samples(20)]


@pytest.mark.parametrize("save_after", [1, 5, 11])
def test_a_worker_goes_on_in_the_middle_of_its_shard(save_after: int) -> None:
    states: dict[int, Any] = {}

    def run() -> list[list[tuple[int, int]]]:
        return offbeat.run(
            lambda: _resumable(offbeat.SyncSGD(), states, save_after, False), cluster(1.0, 0.7)
        ).results

    whole, resumed = run(), run()
    for rank, state in states.items():
        ((number, read_of_it),) = state["shards"]["read"]  # it was in the middle of one
        last = whole[rank][2 * save_after - 1]
        assert number == last[1] // 100
        shard = [(last[0], sample) for sample in read(last[1] // 100)]
        rest = shard[read_of_it:]
        assert shard[read_of_it - 1] == last
        assert resumed[rank][: len(rest)] == rest


def test_a_position_can_be_saved_again_and_is_of_its_epoch() -> None:
    shards, other, third = (offbeat.DealShards(range(6), read) for _ in range(3))
    reading = iter(shards)
    first = [next(reading) for _ in range(5)]
    other.load_state_dict(shards.state_dict())
    assert other.epoch == 0
    third.load_state_dict(other.state_dict())
    assert first + list(other) == first + list(third) == list(offbeat.DealShards(range(6), read))
    assert other.epoch == third.epoch == 1
    third.load_state_dict(shards.state_dict())
    third.set_epoch(1)
    assert sorted(third) == samples(6)


def test_a_state_of_other_shards_is_refused() -> None:
    state = offbeat.DealShards(["a", "b"], list).state_dict()
    with pytest.raises(ValueError, match="the names of the shards, or their order"):
        offbeat.DealShards(["a", "c"], list).load_state_dict(state)


@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.ABSSGD()], ids=str)
def test_shards_of_a_lost_worker_are_dealt_again(algorithm: offbeat.Algorithm) -> None:
    """All of them, to the last sample; and of the one that it was reading some come twice."""
    twice = 0
    for moment in (0.5, 2.5, 5.5, 8.2, 11.0, 14.0):
        crash = f"[[event]]\nkind = 'crash'\nworker = 1\nat_s = {moment}\n"
        where = Cluster.parse(
            "workers = 3\nspeed = [1.0, 0.6, 0.9]\n[compute]\nstep_s = 1.0\n"
            f"[network]\nlatency_s = 0.001\n{crash}"
        )
        seen: list[list[int]] = [[], [], []]

        def worker(seen: list[list[int]] = seen) -> None:
            model = net()
            opt = sgd(model)
            loader: Any = DataLoader(offbeat.DealShards(range(20), read), batch_size=2)
            with offbeat.attach(model, opt, algorithm, survive=True) as dp:
                for batch in loader:
                    opt.zero_grad()
                    loss(model, 0, 0).backward()
                    opt.step()
                    seen[dp.rank] += batch.tolist()

        offbeat.run(worker, where)
        survivors = seen[0] + seen[2]
        assert len(set(survivors)) == len(survivors)
        missing = set(samples(20)) - set(survivors)
        assert missing <= set(seen[1]), (moment, missing)
        again = set(seen[1]) & set(survivors)
        assert len({sample // 100 for sample in again}) <= 2, (moment, again)
        twice += len(again)
        assert all(set(read(sample // 100)) <= missing for sample in missing), "whole shards"
    assert twice
