"""The choice of m, from what rounds show of the workers' times and of the gradient's noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import comb
from random import Random

import pytest
import torch
from torch import nn

import offbeat
from offbeat.algorithms.msync import Choice
from offbeat.clusters import Cluster
from offbeat.rounds import Measured
from offbeat.theory import best_m

Job = Callable[[Random, int], float]


def now_and_then_slow(draw: Random, rank: int) -> float:
    """Every tenth gradient takes ten times as long."""
    return 10.0 if draw.random() < 0.1 else 1.0


@cache
def chosen(
    job: Job,
    seed: int,
    rounds: int,
    noise: float = 100.0,
    exchange_s: float = 0.0,
    workers: int = 8,
) -> list[int]:
    """The m of every round, where late workers end what they compute and then begin anew."""
    draw, choice, now, m = Random(seed), Choice(workers), 0.0, workers
    last = [0.0] * workers
    ends = [job(draw, rank) for rank in range(workers)]
    lengths, began, there, seen = list(ends), [0] * workers, set[int](), []
    for round in range(rounds):
        while len(there) < m:
            rank = min(set(range(workers)) - there, key=lambda rank: ends[rank])
            now = max(now, ends[rank])
            if began[rank] == round:
                there.add(rank)
                last[rank] = lengths[rank]
            else:  # of older parameters: dropped, and the next one has taken so much longer
                again, began[rank] = job(draw, rank), round
                ends[rank] = now + again
                lengths[rank] += again
        now += exchange_s
        m = choice(
            Measured(
                round,
                tuple(last),
                (1.0,) * len(there),
                (1 + noise,) * len(there),
                1 + noise / len(there),
                exchange_s,
            )
        )
        for rank in there:
            lengths[rank], began[rank] = job(draw, rank), round + 1
            ends[rank] = now + lengths[rank]
        there.clear()
        seen.append(m)
    return seen


def costs(noise: float, exchange_s: float = 0.0) -> list[float]:
    """T_m for 8 workers that begin together and are now and then slow."""

    def fast(m: int) -> float:  # the probability that at least m are
        return sum(comb(8, k) * 0.9**k * 0.1 ** (8 - k) for k in range(m, 9))

    return [(10 - 9 * fast(m) + exchange_s) * (1 + noise / m) for m in range(1, 9)]


def test_by_hand_five_of_eight_are_best_and_all_cost_nearly_four_times_as_much() -> None:
    exact = costs(100.0)
    assert min(exact) == exact[5 - 1]
    assert exact[8 - 1] / exact[5 - 1] == pytest.approx(3.77, abs=0.01)


@pytest.mark.slow
def test_m_is_chosen_well_where_now_one_is_slow_and_now_another() -> None:
    exact = costs(100.0)
    for seed in range(20):
        m = chosen(now_and_then_slow, seed, rounds=1000)[-1]
        assert exact[m - 1] <= 1.02 * min(exact), f"seed {seed}: m is {m}"


def test_m_does_not_flap() -> None:
    for seed in range(20):
        seen = chosen(now_and_then_slow, seed, rounds=1000)[500:]
        assert sum(before != after for before, after in pairwise(seen)) <= 2, f"seed {seed}"


@pytest.mark.slow
def test_where_the_exchange_is_dear_more_workers_are_worth_waiting_for() -> None:
    exact = costs(100.0, exchange_s=10.0)
    assert exact.index(min(exact)) + 1 == 7
    for seed in range(20):
        m = chosen(now_and_then_slow, seed, rounds=1000, exchange_s=10.0)[-1]
        assert exact[m - 1] <= 1.05 * min(exact), f"seed {seed}: m is {m}"


def test_a_worker_that_becomes_slow_for_good_is_soon_left_out_and_taken_back() -> None:
    now = {"factor": 1.0}

    def job(draw: Random, rank: int) -> float:
        return draw.uniform(1.0, 1.1) * (now["factor"] if rank == 0 else 1.0)

    choice, draw, chosen_m = Choice(8), Random(1), []
    for round in range(400):
        now["factor"] = 5.0 if 100 <= round < 200 else 1.0
        seconds = tuple(job(draw, rank) for rank in range(8))
        chosen_m.append(choice(Measured(round, seconds, (1.0,) * 8, (101.0,) * 8, 1 + 100 / 8)))
    assert chosen_m[99] == 8
    assert chosen_m[105] == 7
    assert chosen_m[350] == 8


def test_m_is_chosen_from_times_and_noise() -> None:
    seconds = (1.0, 1.0, 1.1, 5.0)
    choice = Choice(4)
    for round in range(30):  # |mean|^2 = 1 + 100/4: signal 1, noise 100
        m = choice(Measured(round, seconds, (1.0,) * 4, (101.0,) * 4, 26.0))
    assert m == best_m(seconds, 100.0) == 3


def test_the_noise_of_a_gradient_is_that_of_its_samples() -> None:
    seconds = (1.0, 1.0, 1.1, 1.42)
    choice = Choice(4)
    for round in range(30):  # 50 a sample, 10 samples a gradient: one gradient's is 5
        m = choice(Measured(round, seconds, (10.0,) * 4, (6.0,) * 4, 1 + 50 / 40))
    assert m == best_m(seconds, 5.0) == 3
    assert best_m(seconds, 50.0) == 4


def test_without_a_signal_more_gradients_a_second_are_better() -> None:
    choice = Choice(4)
    for round in range(30):
        m = choice(Measured(round, (1.0, 1.0, 1.0, 1.3), (1.0,) * 4, (8.0,) * 4, 1.0))
    assert m == 4


def test_the_first_round_is_not_judged_and_one_worker_is_never_enough() -> None:
    choice = Choice(4)
    assert choice(Measured(0, (1.0, 1.0, 1.0, 99.0), (1.0,) * 4, (1.0,) * 4, 1.0)) == 4
    for round in range(1, 30):  # no noise at all: one gradient would do
        m = choice(Measured(round, (1.0, 2.0, 3.0, 4.0), (1.0,) * 4, (1.0,) * 4, 1.0))
    assert m == 2


def test_a_single_worker_is_the_m_fastest() -> None:
    choice = Choice(1)
    assert [choice(Measured(r, (1.0,), (1.0,), (1.0,), 1.0)) for r in range(9)] == [1] * 9


HALF_ARE_SLOWER = Cluster.parse(
    "workers = 8\nspeed = [1.0, 1.0, 1.0, 1.0, 0.66, 0.66, 0.66, 0.66]\n"
    "[compute]\nstep_s = 1.0\n[network]\nlatency_s = 1e-4"
)


def numbers_on_time(scale: float, rounds: int) -> list[int]:
    """How many gradients each round has had, on |w|^2 / 2 with this noise scale."""

    def worker() -> list[int]:
        torch.manual_seed(offbeat.rank())
        model = nn.Linear(2000, 1, bias=False)
        nn.init.constant_(model.weight, 2000**-0.5)
        opt = torch.optim.SGD(model.parameters(), lr=1e-6)
        with offbeat.attach(model, opt, offbeat.MSyncSGD("auto")) as dp:
            for _ in dp.rounds(rounds):
                opt.zero_grad()
                noise = torch.randn_like(model.weight) * (scale / 2000) ** 0.5
                (model.weight.square().sum() / 2 + (model.weight * noise).sum()).backward()
                opt.step()
        return [len(round.ranks) for round in dp.stats().history]

    results: list[list[int]] = offbeat.run(worker, HALF_ARE_SLOWER).results
    assert all(each == results[0] for each in results)
    return results[0][:rounds]


@pytest.mark.parametrize(("scale", "m"), [(1000.0, 8), (1.0, 4)])
def test_trained_with_auto_noise_decides_whether_the_slower_half_is_worth_waiting_for(
    scale: float, m: int
) -> None:
    # 1 s * (1 + S / 4) for the fast half, and 1.5 s * (1 + S / 8) for all of them.
    assert best_m([1.0] * 4 + [1.5] * 4, scale) == m
    seen = numbers_on_time(scale, rounds=60)
    assert seen[0] == 8
    assert seen[30:] == [m] * 30
