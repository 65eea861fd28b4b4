"""Dealt data on real processes: with DataLoader workers, a slow rank, and what goes wrong."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import loss, net, sgd
from test_deal import data, once
from test_shards import all_of, epochs, read, samples
from torch.utils.data import DataLoader

import offbeat
from offbeat.testing import processes
from offbeat.worlds import current

pytestmark = pytest.mark.real

LOADINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "kept": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}
EPOCHS = {"none": 3, "fork": 3, "kept": 3, "spawn": 2}
"""A spawned process imports torch, and every epoch has new ones."""
Batches = list[list[int]]


def _train(
    deal: offbeat.Deal, loader: Any, epochs: int, slow_s: float = 0.0, stop_after: int = -1
) -> list[Batches]:
    """Train; return the batches by epoch. Rank 0 leaves its first epoch after some steps."""
    model = net()
    opt = sgd(model)
    got: list[Batches] = []
    with offbeat.attach(model, opt, offbeat.ABSSGD()):
        for epoch in range(epochs):
            got.append([])
            for index, x, y in loader:
                got[-1].append(index.tolist())
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                time.sleep(slow_s * offbeat.rank())
                opt.step()
                if (offbeat.rank(), epoch, len(got[-1])) == (0, 0, stop_after):
                    break
    return got


def _loader(samples: int, **loading: Any) -> tuple[offbeat.Deal, Any]:
    dataset = data(samples)
    deal = offbeat.Deal(dataset, 2)
    return deal, DataLoader(dataset, batch_sampler=deal, **loading)


def _with_each(stop_after: int) -> dict[str, list[Batches]]:
    """One job, one attachment after the other: each opens a world of its own."""
    return {
        name: _train(*_loader(120, **loading), EPOCHS[name], slow_s=0.02, stop_after=stop_after)
        for name, loading in LOADINGS.items()
    }


@pytest.mark.timeout(240)
def test_every_sample_comes_once_an_epoch_with_any_loader() -> None:
    ended = processes(_with_each, 2, -1, time_out_s=220)
    for name in LOADINGS:
        results = [one.result[name] for one in ended]
        once(results, 120, EPOCHS[name])
    # With processes it counts, too, whose loader starts first: that takes seconds.
    fast, slow = (sum(map(len, one.result["none"])) for one in ended)
    assert fast > slow


@pytest.mark.timeout(240)
def test_who_breaks_off_leaves_the_rest_to_the_others() -> None:
    ended = processes(_with_each, 2, 5, time_out_s=220)
    for name in LOADINGS:
        left, stayed = (one.result[name] for one in ended)
        assert len(left[0]) == 5
        got = [i for batch in left[0] + stayed[0] for i in batch]
        assert len(set(got)) == len(got) >= 120 - 2 * 8  # without what was dealt ahead
        once([left[1:], stayed[1:]], 120, EPOCHS[name] - 1)


# --- outside of the block ------------------------------------------------------------------


def _evaluate() -> list[Any]:
    """Before and after the block, all of it, and only a part of it on one rank."""
    deal, loader = _loader(40)
    got: list[Any] = [next(iter(loader))[0].tolist()]
    assert current._process_world is None
    got.append(_train(deal, loader, 1)[0])
    got.append([batch[0].tolist() for batch in loader])
    for _ in loader:
        if offbeat.rank() == 0:
            break
    assert current._process_world is None
    dist.barrier()
    got.append([batch[0].tolist() for batch in loader])
    return got


def test_outside_of_the_block_the_workers_connect_for_the_iteration() -> None:
    results = [one.result for one in processes(_evaluate, 2)]
    assert results[0][0] != results[1][0]
    once([worker[1:] for worker in results], 40, 3)


# --- checkpoints ---------------------------------------------------------------------------


def _interrupted(loading: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Save in the middle of an epoch, draw on for a while, then go on from what was saved."""
    _, loader = _loader(60, **loading)
    model = net()
    opt = sgd(model)
    before: list[int] = []
    with offbeat.attach(model, opt, offbeat.SyncSGD()) as dp:
        for step, (index, x, y) in enumerate(loader):
            opt.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            opt.step()
            if step < 6:
                before += index.tolist()
            if step == 5:
                dp.state_dict()
                state = loader.batch_sampler.state_dict()
    deal, loader = _loader(60, **loading)
    with offbeat.attach(model, opt, offbeat.SyncSGD()):
        deal.load_state_dict(state)
        after = [i for index, *_ in loader for i in index.tolist()]
    return before, after


def _interrupted_with_each() -> dict[str, Any]:
    return {name: _interrupted(loading) for name, loading in LOADINGS.items()}


@pytest.mark.timeout(240)
def test_every_sample_comes_once_across_an_interruption() -> None:
    ended = processes(_interrupted_with_each, 2, time_out_s=220)
    for name in LOADINGS:
        parts = [part for one in ended for part in one.result[name]]
        assert sorted(i for part in parts for i in part) == list(range(60)), name


# --- shards --------------------------------------------------------------------------------


def _shards_with_each() -> dict[str, list[list[int]]]:
    return {
        name: epochs(offbeat.DealShards(range(30), read), 2, **loading)
        for name, loading in LOADINGS.items()
    }


@pytest.mark.timeout(240)
def test_every_shard_comes_once_an_epoch_with_any_loader() -> None:
    ended = processes(_shards_with_each, 2, time_out_s=220)
    for name in LOADINGS:
        results = [one.result[name] for one in ended]
        assert [all_of(results, epoch) for epoch in range(2)] == [samples(30)] * 2, name


def _shards_interrupted(loading: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Save at every step of an epoch, each worker at its own pace; go on from one of them."""
    shards = offbeat.DealShards(range(30), read)
    model, seen, states = net(), [], []
    opt = sgd(model)
    with offbeat.attach(model, opt, offbeat.SyncSGD()) as dp:
        for step, batch in enumerate(DataLoader(shards, batch_size=3, **loading)):
            opt.zero_grad()
            loss(model, 0, 0).backward()
            time.sleep(0.01 * dp.rank)
            opt.step()
            if step < 5:
                seen += batch.tolist()
            if step == 4:
                dp.state_dict()
                states.append(shards.state_dict())
    shards = offbeat.DealShards(range(30), read)
    again: Any = DataLoader(shards, batch_size=2, **others)
    with offbeat.attach(model, opt, offbeat.SyncSGD()):
        shards.load_state_dict(states[0])
        assert shards.epoch == 0
        after, following = [[each for batch in again for each in batch.tolist()] for _ in range(2)]
    return seen, after, following


def _shards_interrupted_with_each() -> list[Any]:
    ways = [("fork", "fork"), ("kept", "none"), ("none", "kept"), ("spawn", "fork")]
    return [_shards_interrupted(LOADINGS[one], LOADINGS[other]) for one, other in ways]


@pytest.mark.timeout(240)
def test_every_sample_of_shards_comes_once_across_an_interruption() -> None:
    ended = processes(_shards_interrupted_with_each, 2, time_out_s=200)
    for ways in zip(*(one.result for one in ended), strict=True):
        assert all(seen for seen, *_ in ways)
        assert sorted(i for seen, after, _ in ways for i in seen + after) == samples(30)
        assert sorted(i for *_, following in ways for i in following) == samples(30)


# --- what goes wrong -----------------------------------------------------------------------


def _different(what: str) -> None:
    rank, dataset = offbeat.rank(), data(40)
    if what == "seed":
        _train(deal := offbeat.Deal(dataset, seed=rank), DataLoader(dataset, batch_sampler=deal), 1)
    elif what == "length":
        rows: list[Any] = [dataset[i] for i in range(40)]
        deal = offbeat.Deal(rows, 2)
        if rank == 1:
            rows.pop()
        _train(deal, DataLoader(rows, batch_sampler=deal), 1)  # type: ignore[arg-type]
    elif what.startswith("mixed"):
        time.sleep(0.5 * ((rank == 0) == (what == "mixed, 1 first")))
        epochs(offbeat.DealShards(range(30), read), 1, num_workers=rank)
    else:
        epochs(offbeat.DealShards(range(30), read, seed=rank), 1, num_workers=1)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", "workers disagree about seed: worker . has ., worker . has ."),
        ("length", "had 40 samples when its Deal was made, and has 39 now"),
        ("shards", "workers disagree about seed: worker . has ., worker . has ."),
        ("mixed, 0 first", r"reads its shards .*: make the DataLoader with num_workers=0 on every"),
        ("mixed, 1 first", r"reads its shards .*: make the DataLoader with num_workers=0 on every"),
    ],
)
def test_every_worker_is_told_what_is_wrong(what: str, words: str) -> None:
    for one in processes(_different, 2, what, check=False, time_out_s=60):
        assert one.error is not None
        assert re.search(words, str(one.error)), one.error


def _keys() -> list[int]:
    """How many keys the job's store holds after some epochs, and after more of them."""
    _, loader = _loader(20)
    shards = offbeat.DealShards(range(4), read)
    seen, model = [], net()
    with offbeat.attach(model, sgd(model), offbeat.SyncSGD()) as dp:
        for _ in range(2):
            for _ in range(10):
                for each in (loader, shards):
                    for _ in each:
                        pass
            dp.replicas_identical()
            store: Any = dist.distributed_c10d._get_default_store()
            seen.append(store.num_keys())
            dp.replicas_identical()
    return seen


def test_keys_in_the_store_do_not_grow_with_epochs() -> None:
    for one in processes(_keys, 2):
        few, many = one.result
        assert many <= few + 8  # bells; ten epochs that were kept would be 20 keys or more


def _compares(algorithm: offbeat.Algorithm, epochs: int) -> list[bool]:
    """As in docs/start.md: after an epoch, whoever was dealt the last batches."""
    _, loader = _loader(64)
    found, model = [], net()
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm) as dp:
        for _ in range(epochs):
            for _, x, y in loader:
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
            found.append(dp.replicas_identical())
    return found


@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.EagerSGD()], ids=str)
def test_replicas_are_identical_after_an_epoch_that_does_not_divide(
    algorithm: offbeat.Algorithm,
) -> None:
    """32 batches for 3 workers: some have made one step less, and have not applied that round."""
    for one in processes(_compares, 3, algorithm, 4):
        assert one.result == [True] * 4
