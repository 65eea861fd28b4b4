"""A worker is lost, and what it had in hand is dealt again: every sample counts once an epoch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import offbeat
from offbeat.clusters import Cluster
from offbeat.data.settling import Held, Settled, settle
from offbeat.errors import TooFewWorkersError
from offbeat.testing import processes
from offbeat.worlds import enter_world

EPOCHS = 2


class Blocks:
    """A sampler with other indices in every epoch: so it is seen which epoch a sample is of."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        first = self._epoch * self._samples
        yield from range(first, first + self._samples)


class Loop:
    """Trains over dealt data; returns how often every sample of every epoch was applied.

    The gradient of a sample is 1 for a parameter of its own, which nobody else has.
    """

    def __init__(self, algorithm: offbeat.Algorithm, samples: int = 24, **loading: Any) -> None:
        self.algorithm, self.samples, self.loading = algorithm, samples, loading
        self.ended: dict[int, float] = {}
        """When each worker's last epoch ended."""

    def __call__(self, victim: int | None = None, steps: int = 0) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(EPOCHS * self.samples, dtype=torch.float64)])
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        dataset = TensorDataset(torch.arange(EPOCHS * self.samples))
        deal = offbeat.Deal(dataset, 2, sampler=Blocks(self.samples))
        loader: Any = DataLoader(dataset, batch_sampler=deal, **self.loading)
        applied = torch.zeros_like(model[0])
        with offbeat.attach(model, opt, self.algorithm, survive=True) as dp:
            dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
            for _ in range(EPOCHS):
                for (index,) in loader:
                    opt.zero_grad()
                    model[0][index].sum().backward()
                    opt.step()
                    steps -= dp.rank == victim
                    if dp.rank == victim and steps == 0:
                        kill = threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL))
                        kill.daemon = True
                        kill.start()
            self.ended[dp.rank] = dp.seconds
        return applied


def cluster(*crashes: tuple[int, float]) -> Cluster:
    events = "".join(
        f"[[event]]\nkind = 'crash'\nworker = {rank}\nat_s = {moment}\n" for rank, moment in crashes
    )
    return Cluster.parse(
        "workers = 3\nspeed = [1.0, 0.6, 0.9]\n[compute]\nstep_s = 1.0\n"
        f"[network]\nlatency_s = 0.001\n{events}"
    )


METHODS = [offbeat.SyncSGD(), offbeat.EagerSGD("majority"), offbeat.ABSSGD()]


@pytest.mark.parametrize("algorithm", METHODS, ids=str)
def test_every_sample_counts_once_an_epoch_whenever_workers_are_lost(
    algorithm: offbeat.Algorithm,
) -> None:
    random, lost, late = Random(str(algorithm)), 0, 0
    seconds = offbeat.run(Loop(algorithm), cluster()).seconds
    for number in range(12):
        first, second = random.sample(range(3), 2)
        crashes = [(first, random.uniform(0.0, seconds))]
        if number % 3 == 2:  # another one, at the same time, while the others settle, or later
            after_s = random.choice([0.0, 1e-3, 2e-3, 3e-3, 5e-3, 1.5])
            crashes.append((second, crashes[0][1] + after_s))
        loop = Loop(algorithm)
        results = offbeat.run(loop, cluster(*crashes)).results
        survivors = [rank for rank, applied in enumerate(results) if applied is not None]
        lost += 3 - len(survivors)
        for rank in survivors:
            if max(crashes[0][1], crashes[-1][1]) < max(loop.ended[each] for each in survivors):
                assert results[rank].unique().tolist() == [1.0], (crashes, results[rank])
            else:  # nobody was left in the loop to be dealt anything
                late += 1
                assert results[rank].max() == 1.0, (crashes, results[rank])
    assert lost > 10
    assert late < 10


def test_what_a_lost_worker_held_and_had_not_given_is_left() -> None:
    """Of ten batches two are not dealt yet; worker 2 has given 3, and had 5 and 8 in hand."""
    zero, one = Held(1, "a", 1, 0, 10, [], [[0, 1], [2, 3]]), Held(1, "a", 1, 0, 10, [], [[1, 2]])
    two = Held(1, "a", 1, 0, 10, [], [[3, 4], [5, 6], [8, 9]])
    zero.dealt += [[4, 5], [6, 8]]
    settled = settle(Settled(), {0: [zero], 1: [one]}, [([two], (1, 1))])
    (left,) = settled.left
    assert (left.gone, left.rest) == ([[3, 4]], [[5, 6], [8, 10]])
    # Worker 1 is lost as well, in the middle of its first step.
    (left,) = settle(settled, {0: [zero]}, [([one], (0, 0))]).left
    assert (left.gone, left.rest) == ([[3, 4]], [[1, 2], [5, 6], [8, 10]])


def test_what_is_left_of_a_turn_that_is_over_comes_in_the_next() -> None:
    """Worker 1 had number 2 of epoch 7 in hand; worker 0 has ended that, and is in the next."""
    zero = [Held(1, "a", 1, 7, 4, [], [[0, 2], [3, 4]], over=True), Held(2, "a", 2, 8, 4, [], [])]
    one = [Held(1, "a", 1, 7, 4, [], [[2, 3]])]
    settled = settle(Settled(), {0: zero}, [(one, (0, 0))])
    _, after = settled.left
    assert (after.turn, after.extras, after.rest) == (2, [[7, 2]], [[4, 5], [0, 4]])
    again = settle(settled, {0: zero}, []).left
    assert [each.extras for each in again] == [[], [[7, 2]]]  # once
    # Had it not begun the next, that would wait for it there.
    _, after = settle(Settled(), {0: zero[:1]}, [(one, (0, 0))]).left
    assert (after.turn, after.count, after.extras) == (2, None, [[7, 2]])


def test_keys_do_not_grow_with_epochs() -> None:
    """What is kept of old turns, in case that a worker is lost, is bounded."""
    dataset = TensorDataset(torch.arange(8))

    def keys(epochs: int) -> int:
        def train() -> int:
            model = torch.nn.Linear(1, 1)
            opt = torch.optim.SGD(model.parameters(), lr=0.01)
            deal = offbeat.Deal(dataset)
            with offbeat.attach(model, opt, survive=True):
                for _ in range(epochs):
                    for _ in deal:
                        model(torch.ones(1, 1)).sum().backward()
                        opt.step()
            control: Any = enter_world().control
            return len(control.values) + len(control.counters)

        return max(offbeat.run(train, cluster()).results)

    assert keys(60) <= keys(20) + 6


# --- too few are left ----------------------------------------------------------------------


def test_with_too_few_left_a_checkpoint_is_saved_and_all_resume_from_it() -> None:
    """All but the lost one save; it resumes from another's state, and nothing counts twice."""
    samples, states, said = 30, dict[int, Any](), set[str]()

    def train() -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(EPOCHS * samples, dtype=torch.float64)])
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        dataset = TensorDataset(torch.arange(EPOCHS * samples))
        deal = offbeat.Deal(dataset, 2, sampler=Blocks(samples))
        applied = torch.zeros_like(model[0])
        with offbeat.attach(
            model, opt, offbeat.EagerSGD("majority"), survive=True, min_workers=3
        ) as dp:
            dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
            if saved := states.get(dp.rank, states.get(0)):
                dp.load_state_dict(saved["dp"])
                deal.load_state_dict(saved["deal"])
                applied += saved["applied"]
            try:
                for _ in range(deal.epoch, EPOCHS):
                    for index in deal:
                        opt.zero_grad()
                        model[0][index].sum().backward()
                        opt.step()
            except TooFewWorkersError as error:
                said.add(str(error))
                new = {"dp": dp.state_dict(), "deal": deal.state_dict(), "applied": applied}
                states[dp.rank] = new
        return applied

    for moment in (2.2, 9.4, 13.0):
        states.clear()
        before = offbeat.run(train, cluster((1, moment))).results
        assert before[1] is None
        assert sorted(states) == [0, 2]
        assert all("2 of the workers are left, and min_workers is 3" in words for words in said)
        assert torch.equal(before[0], before[2])
        for applied in offbeat.run(train, cluster()).results:
            assert applied.unique().tolist() == [1.0], (moment, applied)


# --- fixed shares --------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
def test_fixed_shares_are_divided_among_the_survivors_from_the_next_epoch_on(
    drop_last: bool,
) -> None:
    dataset = TensorDataset(torch.arange(20.0))

    def train() -> list[list[int]]:
        model = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        fixed: Any = DistributedSampler(
            dataset, num_replicas=3, rank=offbeat.rank(), drop_last=drop_last
        )
        sampler = offbeat.Survivors(fixed)
        loader: Any = DataLoader(dataset, batch_size=2, sampler=sampler)
        got: list[list[int]] = []
        with offbeat.attach(model, opt, offbeat.EagerSGD(), survive=True):
            for epoch in range(3):
                got.append([])
                sampler.set_epoch(epoch)
                for (x,) in loader:
                    got[-1] += x.int().tolist()
                    opt.zero_grad()
                    model(x[:, None] / 20).square().mean().backward()
                    opt.step()
        return got

    for moment in (0.5, 1.5, 3.0):
        zero, one, two = offbeat.run(train, cluster((1, moment))).results
        assert one is None
        assert len(zero[0]) == len(two[0])
        for epoch in (1, 2):
            assert len(zero[epoch]) == 10
            assert sorted(zero[epoch] + two[epoch]) == list(range(20))


def test_who_has_left_its_loop_holds_up_nobody_at_the_next_epoch() -> None:
    """Workers see at different moments that it is over, and some have begun another epoch then."""
    dataset = TensorDataset(torch.arange(24.0))

    def train() -> tuple[int, bool | None]:
        model = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        fixed: Any = DistributedSampler(dataset, num_replicas=3, rank=offbeat.rank())
        sampler = offbeat.Survivors(fixed)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo"), survive=True) as dp:
            for epoch in range(1 + offbeat.rank()):
                sampler.set_epoch(epoch)
                for number in sampler:
                    opt.zero_grad()
                    model(torch.full((1, 1), number / 24)).square().mean().backward()
                    opt.step()
        return dp.stats().steps, dp.stats().replicas_identical

    assert offbeat.run(train, cluster()).results == [(8, True), (16, True), (24, True)]


def test_survivors_wraps_a_distributed_sampler() -> None:
    with pytest.raises(TypeError, match="wraps a DistributedSampler, got RandomSampler"):
        offbeat.Survivors(RandomSampler(range(3)))  # type: ignore[arg-type]


# --- real processes ------------------------------------------------------------------------


def _killed_one_after_another() -> list[Any]:
    """Loaders without processes, and with some that fetch ahead; another worker dies in each."""
    found = []
    for victim, workers in ((3, 0), (2, 2)):
        context = {"multiprocessing_context": "fork"} if workers else {}
        loop = Loop(offbeat.EagerSGD("majority"), 160, num_workers=workers, **context)
        found.append(loop(victim, 7).unique().tolist())
    return found


@pytest.mark.real
def test_every_sample_counts_once_an_epoch_when_a_process_is_killed() -> None:
    ended = processes(_killed_one_after_another, 4, check=False, time_out_s=100)
    assert [one.exit_code for one in ended[2:]] == [-signal.SIGKILL] * 2
    for one in ended[:2]:
        assert one.error is None, one.error
        assert one.result == [[1.0], [1.0]]


def _too_few() -> str:
    """Worker 1 is killed; the others are too few, save, and leave the block in an orderly way."""
    model = torch.nn.Linear(2, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with offbeat.attach(model, opt, offbeat.SyncSGD(), survive=True, min_workers=3) as dp:
        try:
            for step in range(10**6):
                model(torch.ones(1, 2)).square().mean().backward()
                opt.step()
                if (dp.rank, step) == (1, 20):
                    os.kill(os.getpid(), signal.SIGKILL)
        except TooFewWorkersError:
            return f"saved round {dp.state_dict()['replica']['round']}"
    return "went on"


@pytest.mark.real
def test_processes_that_are_too_few_save_and_end() -> None:
    zero, one, two = processes(_too_few, 3, check=False, time_out_s=100)
    assert one.exit_code == -signal.SIGKILL
    assert zero.error is None, zero.error
    assert zero.result == two.result
    assert zero.result.startswith("saved round 2")
