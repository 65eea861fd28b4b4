"""Dealt data: every sample once an epoch, whoever is how fast; in virtual time, with exact logs."""

from __future__ import annotations

import io
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nets import net, parameters, same, sgd
from test_contract import ALGORITHMS, BUCKETS, every_algorithm
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import offbeat
from offbeat.clusters import Cluster
from offbeat.data.counter import Counter as Shared
from offbeat.errors import DisagreementError
from offbeat.worlds import Control, enter_world

NEVER_WAITS = offbeat.ABSSGD("finish", patience=0.0)


def data(samples: int) -> TensorDataset:
    """Samples that can be told apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randn(samples, 3, generator=generator)
    return TensorDataset(torch.arange(samples), x, y)


def cluster(*speed: float, latency_s: float = 0.0) -> Cluster:
    return Cluster.parse(
        f"workers = {len(speed)}\nspeed = {list(speed)}\n[compute]\nstep_s = 1.0\n"
        f"[network]\nlatency_s = {latency_s}"
    )


def trained(
    deal: offbeat.Deal,
    dataset: TensorDataset,
    algorithm: offbeat.Algorithm | None = None,
    epochs: int = 1,
) -> list[list[list[int]]]:
    """Train over dealt data; return the batches that this worker got, by epoch."""
    model = net()
    opt = sgd(model)
    loader: Any = DataLoader(dataset, batch_sampler=deal)
    got: list[list[list[int]]] = []
    with offbeat.attach(model, opt, algorithm or NEVER_WAITS, bucket_bytes=BUCKETS):
        for _ in range(epochs):
            got.append([])
            for index, x, y in loader:
                got[-1].append(index.tolist())
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
    return got


def once(results: list[Any], samples: int, epochs: int = 1) -> None:
    """Every sample came once an epoch, over all workers."""
    for epoch in range(epochs):
        got = sorted(i for worker in results for batch in worker[epoch] for i in batch)
        assert got == list(range(samples))


# --- who gets what -------------------------------------------------------------------------


def test_every_sample_comes_once_an_epoch_whoever_is_how_fast() -> None:
    dataset = data(101)
    results = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, 2), dataset, epochs=3),
        cluster(1.0, 0.5, 0.25, latency_s=1e-3),
    ).results
    once(results, 101, 3)


def test_a_worker_at_half_speed_gets_half_as_many() -> None:
    dataset = data(90)
    run = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, shuffle=False), dataset), cluster(1.0, 0.5)
    )
    once(run.results, 90)
    assert [len(worker[0]) for worker in run.results] == [60, 30]
    assert run.seconds == pytest.approx(60.0)


def test_who_got_what() -> None:
    dataset = data(9)
    run = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, shuffle=False), dataset), cluster(1.0, 0.5)
    )
    assert [[batch for (batch,) in worker[0]] for worker in run.results] == [
        [0, 1, 3, 5, 6, 8],
        [2, 4, 7],
    ]


def test_a_much_slower_worker_holds_up_the_others_by_one_batch_at_most() -> None:
    dataset = data(600)
    run = offbeat.run(
        lambda: trained(offbeat.Deal(dataset), dataset), cluster(1.0, 1.0, 0.1, latency_s=1e-3)
    )
    once(run.results, 600)
    assert run.seconds < 600 / 2.1 + 10 + 1


def test_a_worker_that_knows_its_speed_asks_for_several_batches_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    add = Shared.add

    def count(self: Shared, control: Control, wanted: int) -> int:
        asked.append(wanted)
        return add(self, control, wanted)

    monkeypatch.setattr(Shared, "add", count)
    dataset = data(92)
    run = offbeat.run(lambda: trained(offbeat.Deal(dataset), dataset), cluster(1.0, 1.0))
    once(run.results, 92)
    assert max(asked) > 92 // 2 // 16  # what it asks for as long as it knows nothing
    assert len(asked) < 60
    assert run.seconds == pytest.approx(46.0)


def test_the_loop_does_not_wait_for_a_distant_store() -> None:
    """There and back takes four times as long as a micro-batch."""
    dataset = data(2000)
    run = offbeat.run(
        lambda: trained(offbeat.Deal(dataset), dataset, offbeat.SyncSGD(1000)),
        cluster(1.0, 1.0, latency_s=2.0),
    )
    once(run.results, 2000)
    assert run.seconds < 1000 * 1.25


def test_alone_all_come_in_the_order_of_the_permutation() -> None:
    dataset = data(10)
    deal = offbeat.Deal(dataset, 4, shuffle=False)
    assert list(deal) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shuffled = [i for batch in offbeat.Deal(dataset, 4) for i in batch]
    assert sorted(shuffled) == list(range(10))
    assert shuffled != list(range(10))
    once([trained(offbeat.Deal(dataset, 4), dataset, epochs=2)], 10, 2)


def test_one_deal_may_serve_all_workers_of_a_virtual_run() -> None:
    dataset = data(50)
    deal = offbeat.Deal(dataset, 2)
    for _ in range(2):
        once(offbeat.run(lambda: trained(deal, dataset, epochs=2), "uniform-8").results, 50, 2)


@every_algorithm
def test_every_algorithm_trains_on_dealt_data(name: str) -> None:
    dataset = data(61)
    algorithm = ALGORITHMS[name].make(3)
    results = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, 2), dataset, algorithm, epochs=2),
        cluster(1.0, 0.6, 0.3, latency_s=1e-3),
    ).results
    once(results, 61, 2)


# --- epochs and orders ---------------------------------------------------------------------


def _orders(deal: offbeat.Deal, *epochs: int | None) -> list[list[list[int]]]:
    found = []
    for epoch in epochs:
        if epoch is not None:
            deal.set_epoch(epoch)
        found.append(list(deal))
    return found


def test_each_iteration_is_the_next_epoch() -> None:
    first, second, third, again = _orders(offbeat.Deal(data(30), 2), None, None, 7, 0)
    assert len({str(order) for order in (first, second, third)}) == 3
    assert again == first
    assert _orders(offbeat.Deal(data(30), 2), 7) == [third]
    assert _orders(offbeat.Deal(data(30), 2), 1, None)[0] == second


def test_seeds_and_epochs_do_not_meet() -> None:
    (one,), (other,) = (_orders(offbeat.Deal(data(30), 2, seed=seed), 1 - seed) for seed in (0, 1))
    assert one != other


def test_the_programs_generators_are_neither_used_nor_disturbed() -> None:
    dataset, weights = data(20), torch.arange(1.0, 21.0)
    own = torch.Generator().manual_seed(3)
    sampler = WeightedRandomSampler(weights, 40, generator=own)  # type: ignore[arg-type]
    deals = [
        lambda: offbeat.Deal(dataset, 4),
        lambda: offbeat.Deal(dataset, 4, sampler=RandomSampler(dataset)),
        lambda: offbeat.Deal(dataset, 4, sampler=sampler),
    ]
    for deal in deals:
        torch.manual_seed(5)
        random.seed(5)
        before = torch.get_rng_state(), random.getstate(), own.get_state()
        first = list(deal())
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()
        assert torch.equal(before[2], own.get_state())
        torch.manual_seed(6)
        assert list(deal()) == first


def test_the_length_is_that_of_one_workers_share() -> None:
    def worker() -> tuple[int, int]:
        deal = offbeat.Deal(data(100), 3)
        loader: Any = DataLoader(data(100), batch_sampler=deal)
        return len(deal), len(loader)

    assert offbeat.run(worker, "uniform-8").results == [(5, 5)] * 8  # 34 batches
    assert worker() == (34, 34)


def test_drop_last_leaves_out_less_than_a_batch_over_all_workers() -> None:
    dataset = data(31)
    results = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, 4, drop_last=True), dataset), cluster(1.0, 0.5)
    ).results
    assert [len(batch) for worker in results for batch in worker[0]] == [4] * 7


def test_weighted_samples_are_dealt_as_one_process_would_draw_them() -> None:
    dataset = data(20)
    weights = [float(i < 10) for i in range(20)]

    def deal() -> offbeat.Deal:
        return offbeat.Deal(dataset, 3, sampler=WeightedRandomSampler(weights, 40))

    results = offbeat.run(lambda: trained(deal(), dataset), cluster(1.0, 0.5)).results
    got = Counter(i for worker in results for batch in worker[0] for i in batch)
    assert got == Counter(i for batch in deal() for i in batch)
    assert got.total() == 40
    assert max(got) < 10


class Bucketed:
    """Batches of samples that are near each other, in a random order."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return -(-self._samples // 3)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(i, min(i + 3, self._samples))) for i in range(0, self._samples, 3)]
        random.shuffle(batches)
        yield from batches


def test_batches_of_like_lengths_are_dealt_whole() -> None:
    dataset = data(32)
    results = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, batch_sampler=Bucketed(32)), dataset, epochs=2),
        cluster(1.0, 0.5, 0.7),
    ).results
    once(results, 32, 2)
    orders = [
        [batch[0] // 3 for worker in results for batch in worker[epoch]] for epoch in range(2)
    ]
    assert orders[0] != orders[1]
    for worker in results:
        for batch in worker[0] + worker[1]:
            assert batch == list(range(batch[0], batch[0] + len(batch)))


def test_a_samplers_own_set_epoch_is_called() -> None:
    class Counting(RandomSampler):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)

    seen: list[int] = []
    sampler = BatchSampler(Counting(data(9)), 2, drop_last=False)
    _orders(offbeat.Deal(data(9), batch_sampler=sampler), None, 5)
    assert seen == [0, 5]


# --- ending early, again, twice ------------------------------------------------------------


def test_who_breaks_off_leaves_the_rest_to_the_others() -> None:
    dataset = data(40)

    def worker() -> list[list[int]]:
        deal = offbeat.Deal(dataset, 1)
        got: list[list[int]] = []
        model = net()
        with offbeat.attach(model, sgd(model), offbeat.ABSSGD()) as dp:
            for _ in range(2):
                got.append([])
                for (index,) in deal:
                    got[-1].append(index)
                    enter_world().sleep_until(dp.seconds + 1.0)
                    if dp.rank == 0 and len(got[-1]) == 3 and len(got) == 1:
                        break
        return got

    left, stayed = offbeat.run(worker, cluster(1.0, 1.0)).results
    assert len(left[0]) == 3
    undone = set(range(40)) - {*left[0], *stayed[0]}
    assert len(undone) <= 2  # what the one that left had been dealt ahead
    assert len(left[0]) + len(stayed[0]) + len(undone) == 40
    assert sorted(left[1] + stayed[1]) == list(range(40))


def test_two_loops_over_one_deal_at_once_are_refused() -> None:
    deal = offbeat.Deal(data(10), 2)
    with pytest.raises(RuntimeError, match=r"two loops over one Deal.*a Deal for each loader"):
        for _ in zip(deal, deal, strict=True):
            pass
    first = iter(deal)
    next(first)
    assert len(list(deal)) == 5  # it was left
    with pytest.raises(RuntimeError, match="two loops"):
        next(first)


def test_an_iterator_that_nobody_asks_takes_nothing() -> None:
    deal = offbeat.Deal(data(10), 2)
    unused = iter(deal)
    assert deal.epoch == 0
    assert len(list(deal)) == 5
    assert deal.epoch == 1
    assert len(list(unused)) == 5


def test_a_deal_can_be_sent_to_another_process() -> None:
    deal = offbeat.Deal(data(10), 2)
    first = list(deal)
    copy = pickle.loads(pickle.dumps(deal))
    assert copy.epoch == 0
    assert list(copy) == first


def test_keys_do_not_grow_with_epochs() -> None:
    dataset = data(20)

    def keys(epochs: int) -> int:
        def worker() -> int:
            trained(offbeat.Deal(dataset, 2), dataset, offbeat.SyncSGD(), epochs)
            control: Any = enter_world().control
            return len(control.values) + len(control.counters)

        return max(offbeat.run(worker, cluster(1.0, 0.5)).results)

    assert keys(8) == keys(2)


def test_a_deal_may_be_used_over_several_attachments() -> None:
    dataset = data(30)

    def worker() -> list[list[list[int]]]:
        deal = offbeat.Deal(dataset, 2)
        return [trained(deal, dataset)[0] for _ in range(3)]

    results = offbeat.run(worker, cluster(1.0, 0.5)).results
    once(results, 30, 3)


# --- checkpoints ---------------------------------------------------------------------------


def _resumable(
    dataset: TensorDataset,
    algorithm: offbeat.Algorithm,
    states: dict[int, bytes],
    save_after: int,
    stop: bool,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Train two epochs, save after some steps; stop there, or not; or go on from a state."""
    rank, model = offbeat.rank(), torch.nn.Sequential(net(), torch.nn.Dropout(0.3))
    opt = sgd(model)
    deal = offbeat.Deal(dataset, 2)
    loader: Any = DataLoader(dataset, batch_sampler=deal)
    got, steps, resumes = [], 0, rank in states
    with offbeat.attach(model, opt, algorithm, bucket_bytes=BUCKETS) as dp:
        if resumes:
            state = torch.load(io.BytesIO(states[rank]))
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["optimizer"])
            dp.load_state_dict(state["dp"])
            deal.load_state_dict(state["deal"])
        for _ in range(deal.epoch, 2):
            for index, x, y in loader:
                got.append([deal.epoch, *index.tolist()])
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
                steps += 1
                if steps == save_after and not resumes:
                    state = {"dp": dp.state_dict(), "deal": deal.state_dict()}
                    state |= {"model": model.state_dict(), "optimizer": opt.state_dict()}
                    torch.save(state, file := io.BytesIO())
                    states[rank] = file.getvalue()
                    if stop:
                        break
            if stop and rank in states and not resumes:
                break
    return got, parameters(model)


@pytest.mark.parametrize("save_after", [1, 5, 12, 17])
@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.LocalSGD(3)], ids=str)
def test_a_run_resumes_bit_by_bit(
    algorithm: offbeat.Algorithm, latency_s: float, save_after: int
) -> None:
    dataset, states = data(59), dict[int, bytes]()
    where = cluster(1.0, 0.7, 0.5, latency_s=latency_s)

    def run() -> list[Any]:
        return offbeat.run(
            lambda: _resumable(dataset, algorithm, states, save_after, False), where
        ).results

    whole = run()
    resumed = run()
    for (got, last), (after, other) in zip(whole, resumed, strict=True):
        assert got[save_after:] == after
        assert same(last, other)


@pytest.mark.parametrize("speed", [(1.0, 0.5), (1.0, 0.9, 0.2)], ids=str)
@pytest.mark.parametrize("save_after", [1, 4, 6, 15])
@every_algorithm
def test_every_sample_comes_once_across_an_interruption(
    name: str, save_after: int, speed: tuple[float, ...]
) -> None:
    dataset, states = data(59), dict[int, bytes]()
    algorithm = ALGORITHMS[name].make(len(speed))
    where = cluster(*speed, latency_s=0.1)
    both: list[list[int]] = []
    for stop in (True, False):
        run = offbeat.run(
            lambda stop=stop: _resumable(dataset, algorithm, states, save_after, stop), where
        )
        both += [batch for got, _ in run.results for batch in got]
    for epoch in (1, 2):
        got = sorted(i for of, *batch in both if of == epoch for i in batch)
        assert got == list(range(59))


def test_a_position_is_of_its_epoch() -> None:
    deal = offbeat.Deal(data(10), 2)
    other = offbeat.Deal(data(10), 2)
    turn = iter(deal)
    first = [next(turn), next(turn)]
    other.load_state_dict(deal.state_dict())
    assert other.epoch == 0
    assert first + list(other) == list(offbeat.Deal(data(10), 2))
    other.load_state_dict(deal.state_dict())
    other.set_epoch(3)
    assert len(list(other)) == 5
    assert len(list(other)) == 5


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch_size": 3}, "batch_size 2, but here it is 3"),
        ({"seed": 1}, "seed 0, but here it is 1"),
        ({"samples": 9}, "the length of the data set 10, but here it is 9"),
    ],
)
def test_a_state_of_another_deal_is_refused(change: dict[str, int], what: str) -> None:
    state = offbeat.Deal(data(10), 2).state_dict()
    settings = {"batch_size": 2, "samples": 10, **change}
    other = offbeat.Deal(data(settings.pop("samples")), **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"saved with {what}: resume with the same set-up"):
        other.load_state_dict(state)


def test_a_state_of_another_rank_is_refused() -> None:
    def worker() -> None:
        deal = offbeat.Deal(data(10), 2)
        states[offbeat.rank()] = deal.state_dict()
        with pytest.raises(ValueError, match="saved with rank 0, but here it is 1"):
            deal.load_state_dict(states[0] if offbeat.rank() else {**states[0], "rank": 0})
            raise ValueError("saved with rank 0, but here it is 1")

    states: dict[int, Any] = {}
    offbeat.run(worker, cluster(1.0, 1.0))
    with pytest.raises(ValueError, match="saved with world_size 2, but here it is 1"):
        offbeat.Deal(data(10), 2).load_state_dict(states[0])


# --- bad input -----------------------------------------------------------------------------


class Lines(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield from "abc"


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"dataset": []}, ValueError, "the data set is empty"),
        ({"dataset": Lines()}, TypeError, "Lines has no length.*DealShards"),
        ({"batch_size": 0}, ValueError, "batch_size must be a whole number above 0, got 0"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be a whole number above 0, got 2.0"),
        ({"batch_size": True}, ValueError, "got True"),
        ({"seed": "0"}, ValueError, "seed must be a whole number, got '0'"),
        ({"shuffle": 1}, ValueError, "shuffle must be True or False, got 1"),
        ({"drop_last": 1}, ValueError, "drop_last must be True or False, got 1"),
        (
            {"batch_size": 11, "drop_last": True},
            ValueError,
            "10 samples make no batch of 11: leave out drop_last.* at most 10",
        ),
        ({"sampler": [1], "shuffle": True}, ValueError, "leave out shuffle"),
        (
            {"batch_sampler": [[1]], "batch_size": 2, "drop_last": True},
            ValueError,
            "leave out batch_size, drop_last",
        ),
        ({"batch_sampler": [[1]], "sampler": [1]}, ValueError, "leave out sampler"),
        ({"batch_sampler": []}, ValueError, "nothing to deal: list is empty"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        offbeat.Deal(**{"dataset": range(10), **arguments})


@pytest.mark.parametrize("processes", [0, 1])
def test_a_loader_that_would_make_batches_of_batches_is_refused(processes: int) -> None:
    """Given as `sampler=` it would be silent: batches of batches, and an epoch of fewer steps."""
    dataset = data(10)
    loader: Any = DataLoader(
        dataset, batch_size=4, sampler=offbeat.Deal(dataset, 2), num_workers=processes
    )
    with pytest.raises(TypeError, match=r"batch_sampler=deal\), without batch_size and sampler"):
        next(iter(loader))


def test_a_batch_larger_than_the_data_is_one_short_batch() -> None:
    assert [sorted(batch) for batch in offbeat.Deal(range(3), 7)] == [[0, 1, 2]]


def test_a_sampler_that_draws_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to deal: generator is empty"):
        list(offbeat.Deal(range(3), sampler=(i for i in ())))  # type: ignore[var-annotated]


def test_an_epoch_must_be_a_whole_number() -> None:
    for epoch in (-1, 1.0, True):
        with pytest.raises(ValueError, match="epoch must be a whole number from 0"):
            offbeat.Deal(range(3)).set_epoch(epoch)  # type: ignore[arg-type]


def test_a_data_set_that_changes_its_length_is_an_error() -> None:
    dataset = list(range(10))
    deal = offbeat.Deal(dataset, 2)
    assert len(list(deal)) == 5
    dataset.append(10)
    with pytest.raises(RuntimeError, match=r"had 10 samples .* has 11 now: make a new Deal"):
        list(deal)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda rank: {"samples": 20 + rank}, "the length of the data set: .* 20.* 21"),
        (lambda rank: {"seed": rank}, "seed: "),
        (lambda rank: {"batch_size": 1 + rank}, "batch_size: "),
        (lambda rank: {"shuffle": rank == 0}, "shuffle: "),
        (lambda rank: {"sampler": [rank] * 20}, "what the sampler draws: "),
    ],
)
def test_workers_that_deal_different_things_are_told_so(settings: Any, words: str) -> None:
    def worker() -> None:
        mine = settings(offbeat.rank())
        dataset = data(mine.pop("samples", 20))
        trained(offbeat.Deal(dataset, **mine), dataset)

    with pytest.raises(
        DisagreementError, match=f"workers disagree about {words}.*must deal the same data"
    ):
        offbeat.run(worker, cluster(1.0, 1.0, 0.5))


@pytest.mark.parametrize("what", ["tensors", "a split", "labels"])
def test_workers_with_other_data_of_the_same_length_are_told_so(what: str) -> None:
    class Labelled(Dataset[Any]):
        def __init__(self, rank: int) -> None:
            self.targets = [rank] * 20

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("no sample is read to find out")

    def worker() -> None:
        rank = offbeat.rank()
        mine: Dataset[Any]
        if what == "tensors":
            mine = TensorDataset(torch.arange(20.0) + rank)
        elif what == "a split":
            own = torch.Generator().manual_seed(rank)
            mine, _ = random_split(TensorDataset(torch.arange(40.0)), [20, 20], own)
        else:
            mine = Labelled(rank)
        model = torch.nn.Linear(1, 1)
        with offbeat.attach(model, torch.optim.SGD(model.parameters())):
            next(iter(offbeat.Deal(mine, 2)))

    with pytest.raises(
        DisagreementError, match=r"disagree about what the data set holds.* seed that alike"
    ):
        offbeat.run(worker, cluster(1.0, 1.0))


def test_workers_that_are_in_different_epochs_are_told_so() -> None:
    def worker() -> None:
        dataset = data(20)
        deal = offbeat.Deal(dataset)
        deal.set_epoch(offbeat.rank())
        trained(deal, dataset)

    with pytest.raises(DisagreementError, match="workers disagree about the epoch: "):
        offbeat.run(worker, cluster(1.0, 1.0))
