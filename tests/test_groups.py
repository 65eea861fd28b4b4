"""Groups of workers that change with every round: who meets whom, and how soon all have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Groups, Layout, Pile, SumInGroups
from offbeat.rounds.groups import MOST_DEALS, deals
from offbeat.rounds.header import HERE, LEFT, Header, Share
from offbeat.testing import processes
from offbeat.worlds import enter_world, leave_world

NEVER = 10**9


def _of_round(groups: Groups, number: int) -> list[tuple[int, ...]]:
    return sorted({groups.of(number, rank) for rank in range(groups.workers)})


def test_eight_workers_in_groups_of_four_are_those_of_the_paper() -> None:
    groups = Groups(8, 4, NEVER)
    assert [_of_round(groups, number) for number in range(4)] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 1, 4, 5), (2, 3, 6, 7)],
        [(0, 2, 4, 6), (1, 3, 5, 7)],
        [(0, 1, 2, 3), (4, 5, 6, 7)],
    ]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7])
def test_of_powers_of_two_groups_are_the_rotating_butterfly(bits: int) -> None:
    """dims(t) = (t s + k) mod G, k < s: a group is what these bits of the rank span."""
    for spanned in range(bits):
        groups = Groups(2**bits, 2**spanned, NEVER)
        for number in range(2 * bits):
            dimensions = [(number * spanned + k) % bits for k in range(spanned)]
            for rank in range(2**bits):
                expected = {rank}
                for dimension in dimensions:
                    expected |= {each ^ (1 << dimension) for each in expected}
                assert set(groups.of(number, rank)) == expected


@pytest.mark.parametrize(
    ("workers", "size"), [(6, 3), (6, 2), (12, 4), (24, 6), (30, 5), (100, 10), (2, 1), (1, 1)]
)
def test_of_any_number_of_workers_every_round_divides_them(workers: int, size: int) -> None:
    groups = Groups(workers, size, period=5)
    for number in range(2 * MOST_DEALS):
        dealt = _of_round(groups, number)
        assert sorted(rank for group in dealt for rank in group) == list(range(workers))
        full = (number + 1) % 5 == 0
        assert {len(group) for group in dealt} == {workers if full else size}
    assert deals(workers, size) <= MOST_DEALS
    for rank in range(workers):
        met = {group for number in range(100) for group in [groups.of(number, rank)]}
        assert met <= {groups.everyone, *groups.of_worker(rank)}


def _averaged(groups: Groups, rounds: int) -> Tensor:
    """By worker, the weight of each worker's first model in what it has after so many rounds."""
    models = torch.eye(groups.workers, dtype=torch.float64)
    for number in range(rounds):
        for group in _of_round(groups, number):
            models[list(group)] = models[list(group)].mean(0)
    return models


@pytest.mark.parametrize(
    ("workers", "size", "rounds"),
    [(64, 8, 2), (16, 4, 2), (8, 4, 2), (32, 8, 2), (128, 8, 3), (1024, 32, 2)],
)
def test_all_models_are_one_after_the_fewest_rounds(workers: int, size: int, rounds: int) -> None:
    groups = Groups(workers, size, NEVER)
    assert torch.equal(
        _averaged(groups, rounds), torch.full((workers, workers), 1 / workers).double()
    )
    assert (_averaged(groups, rounds - 1) == 0).any()


@pytest.mark.parametrize(
    ("workers", "size"), [(6, 3), (6, 2), (12, 4), (24, 6), (30, 5), (100, 10)]
)
def test_of_any_number_of_workers_models_come_together(workers: int, size: int) -> None:
    spread = [
        (_averaged(Groups(workers, size, NEVER), rounds) - 1 / workers).abs().max()
        for rounds in (0, 8, 16)
    ]
    assert spread[1] < 1e-2 * spread[0]
    assert spread[2] < 1e-4


def test_those_who_are_left_are_dealt_out_with_empty_places_behind_them() -> None:
    groups = Groups(8, 4, NEVER).among((0, 1, 3, 4, 5, 6, 7))
    expected = [
        [(0, 1, 3, 4), (5, 6, 7)],
        [(0, 1, 5, 6), (3, 4, 7)],
        [(0, 3, 5, 7), (1, 4, 6)],
    ]
    for number, found in enumerate(expected):
        assert sorted({groups.of(number, rank) for rank in groups.everyone}) == found
    assert Groups(8, 4, NEVER).among((1, 4, 6, 7)).of(1, 4) == (1, 4, 6, 7)


@pytest.mark.parametrize(("workers", "size"), [(8, 4), (8, 2), (9, 3), (6, 2), (4, 1)])
def test_whoever_is_left_every_round_divides_them(workers: int, size: int) -> None:
    for lost in range(workers):
        members = tuple(rank for rank in range(workers) if rank not in (lost, 0))
        groups = Groups(workers, size, period=5).among(members)
        for number in range(20):
            of = [groups.of(number, rank) for rank in members]
            assert sorted(rank for group in set(of) for rank in group) == list(members)
            assert all(rank in group for rank, group in zip(members, of, strict=True))
            assert all(len(group) <= size or group == members for group in of)
            for rank, group in zip(members, of, strict=True):
                assert group in (members, *groups.of_worker(rank))


# --- the exchange -----------------------------------------------------------------------------


def _exchange(size: int) -> tuple[list[list[float]], list[tuple[float, ...]]]:
    """Four rounds of groups, and one in which all have left."""
    world = enter_world()
    rank = world.rank
    layout = Layout(["a", "b"], [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))], 8)
    header = Header(world.size, 2)
    exchange = SumInGroups(
        world, world.channel("rounds"), layout, header, Groups(world.size, size, period=4)
    )
    sums, samples = [], []
    for number in range(6):
        pile = Pile(layout, header.room)
        for view in pile.flats.views:
            view.fill_(2.0**rank)
        presence = LEFT if number == 5 else HERE
        shares = exchange.reduce(pile, Share(number, samples=rank, presence=presence))
        assert len({number for view in pile.flats.views for number in view.tolist()}) == 1
        sums.append(pile.flats.views[0].tolist()[:1])
        samples.append(shares.samples)
    leave_world(world)
    return sums, samples


def _check_exchange(workers: int, size: int, results: list[tuple[list[list[float]], list]]) -> None:  # type: ignore[type-arg]
    groups = Groups(workers, size, period=4)
    for rank, (sums, samples) in enumerate(results):
        for number, found in enumerate(sums):
            members = groups.of(number, rank)
            whole = float(sum(2.0**member for member in members))
            if number == 5:  # of each group's mean
                whole = float(sum(2.0**member for member in range(workers)))
            assert found == [whole]
        assert samples == [tuple(map(float, range(workers)))] * 6, "of everybody, always"


@pytest.mark.parametrize(("workers", "size"), [(8, 4), (8, 2), (6, 3), (4, 1), (4, 4), (1, 1)])
def test_a_round_is_the_sum_over_its_group_and_the_last_over_all(workers: int, size: int) -> None:
    run = offbeat.run(lambda: _exchange(size), Cluster.uniform(workers, latency_s=0.1))
    _check_exchange(workers, size, run.results)


@pytest.mark.real
def test_so_it_is_on_real_processes() -> None:
    ended = processes(_exchange, 4, 2)
    _check_exchange(4, 2, [each.result for each in ended])
