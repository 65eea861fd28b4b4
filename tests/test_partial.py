"""The partial all-reduce and m-synchronous SGD: triggers, statistics, small examples by hand.

tests/test_schedules.py holds the same protocol against its promises under random schedules, and
tests/test_partial_real.py on real processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from nets import loss, net, same, sgd, train

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import ClosedError, DisagreementError
from offbeat.rounds import Engine, Layout, Pile, Quorum, Rules
from offbeat.rounds.log import MOST, MOST_TAKEN_FROM
from offbeat.worlds import enter_world

# --- the trigger ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quorum", "drawn", "needed"),
    [
        ("solo", None, 1),
        ("majority", 1, 1),
        ("all", None, 8),
        ("first:3", 3, 1),
        ("last:3", 3, 3),
        ("first:8", 8, 1),
        (1, None, 1),
        (8, None, 8),
        (0.5, None, 4),
        (0.51, None, 5),
        (1e-9, None, 1),
        (1.0, None, 8),
    ],
)
def test_a_trigger_is_some_candidates_and_how_many_of_them(
    quorum: str | int | float, drawn: int | None, needed: int
) -> None:
    assert Quorum.of(quorum, 8) == Quorum(drawn, needed)


KNOWN = (
    'quorum must be "solo", "majority", "all", "first:k", "last:k", '
    "a number of workers or a fraction of them, got "
)


@pytest.mark.parametrize(
    ("quorum", "message"),
    [
        (0, "quorum must be between 1 and the 8 workers, got 0"),
        (-1, "quorum must be between 1 and the 8 workers, got -1"),
        (9, "quorum must be between 1 and the 8 workers, got 9"),
        (0.0, "quorum: a fraction of workers must be above 0 and at most 1, got 0.0"),
        (-0.5, "quorum: a fraction of workers must be above 0 and at most 1, got -0.5"),
        (1.01, "quorum: a fraction of workers must be above 0 and at most 1, got 1.01"),
        (math.nan, "quorum: a fraction of workers must be above 0 and at most 1, got nan"),
        ("first:0", "the number of candidates must be between 1 and the 8 workers, got 0"),
        ("last:9", "the number of candidates must be between 1 and the 8 workers, got 9"),
        ("first:", KNOWN + "'first:'"),
        ("last:-1", KNOWN + "'last:-1'"),
        ("most", KNOWN + "'most'"),
        ("", KNOWN + "''"),
        (True, KNOWN + "True"),
        (None, KNOWN + "None"),
    ],
)
def test_a_trigger_that_cannot_be_meant_is_refused(quorum: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        Quorum.of(quorum, 8)
    assert str(caught.value) == message

    def worker() -> None:
        with offbeat.partial_all_reduce("bad", torch.zeros(1), quorum=quorum):
            pass

    with pytest.raises(ValueError) as caught:  # noqa: PT011
        offbeat.run(worker, Cluster.uniform(8))
    assert str(caught.value) == message


@pytest.mark.parametrize("settings", [{"max_staleness_rounds": -1}])
def test_a_bound_that_cannot_be_meant_is_refused(settings: dict[str, Any]) -> None:
    def worker() -> None:
        layout = Layout(["x"], [torch.zeros(1)])
        Engine(enter_world(), "bad", layout, Rules("solo", **settings))

    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        offbeat.run(worker, Cluster.uniform(2))


def test_a_fraction_that_is_a_whole_number_of_workers_is_that_number() -> None:
    assert Quorum.of(0.07, 100).needed == 7
    for workers in range(1, 65):
        for some in range(1, workers + 1):
            assert Quorum.of(some / workers, workers).needed == some


def test_candidates_depend_on_the_round_and_on_nothing_else() -> None:
    active = (0, 2, 3, 5, 7)
    for quorum in ("majority", "first:3", "last:2"):
        trigger = Quorum.of(quorum, 8)
        drawn = [trigger.for_round(round, active) for round in range(50)]
        assert drawn[::-1] == [
            Quorum.of(quorum, 8).for_round(round, active) for round in reversed(range(50))
        ]
        assert len(set(drawn)) > 3
        for candidates, needed in drawn:
            assert candidates <= set(active)
            assert len(candidates) == trigger.drawn
            assert needed == trigger.needed


def test_every_worker_is_drawn_equally_often() -> None:
    trigger = Quorum.of("majority", 5)
    drawn = [min(trigger.for_round(round, (0, 1, 2, 3, 4))[0]) for round in range(5000)]
    for rank in range(5):
        assert drawn.count(rank) == pytest.approx(1000, abs=4 * math.sqrt(5000 * 0.2 * 0.8))


def test_fewer_active_workers_than_needed_means_all_of_them() -> None:
    assert Quorum.of(6, 8).for_round(0, (1, 4)) == (frozenset({1, 4}), 2)
    assert Quorum.of("last:3", 8).for_round(0, (1, 4)) == (frozenset({1, 4}), 2)
    assert Quorum.of("first:3", 8).for_round(0, (5,)) == (frozenset({5}), 1)


# --- how many are on time, and how long they wait ------------------------------------------

PERIOD_S, LATER_S = 4.0, 0.25


def _staircase(quorum: str | int, workers: int, rounds: int) -> list[tuple[int, float]]:
    """Rank p arrives p * LATER_S after the common begin of every round; what is late is dropped.

    Return, by round, how many are in it, and how long the workers have waited on average.
    """

    def worker() -> list[tuple[int, float]]:
        world, seen = enter_world(), []
        with offbeat.partial_all_reduce(
            "staircase", torch.zeros(1), quorum=quorum, drop_late=True
        ) as opened:
            for number in range(rounds):
                world.sleep_until(number * PERIOD_S + world.rank * LATER_S)
                arrived = world.now()
                [record] = opened.rounds(torch.ones(1))
                assert record.round == number
                assert record.mean()[0].item() == 1.0
                assert record.waited_s == world.now() - arrived
                seen.append((int(record.sum.views[0].item()), record.waited_s))
            world.sleep_until(rounds * PERIOD_S)  # leaving is an arrival, too
        return seen

    run = offbeat.run(worker, Cluster.uniform(workers), own_random_state=False)
    by_round = list(zip(*run.results, strict=True))
    assert all(len({active for active, _ in seen}) == 1 for seen in by_round)
    return [(seen[0][0], fmean(waited for _, waited in seen)) for seen in by_round]


def test_in_a_full_round_a_worker_waits_for_half_the_staircase() -> None:
    for active, waited_s in _staircase("all", workers=8, rounds=5):
        assert active == 8
        assert waited_s == (8 - 1) / 2 * LATER_S


def test_in_a_solo_round_nobody_waits() -> None:
    assert _staircase("solo", workers=8, rounds=5) == [(1, 0.0)] * 5


@pytest.mark.parametrize("m", [1, 3, 8])
def test_a_quorum_of_m_has_the_m_fastest(m: int) -> None:
    for active, waited_s in _staircase(m, workers=8, rounds=5):
        assert active == m
        assert waited_s == sum(range(m)) / 8 * LATER_S


@pytest.mark.parametrize(
    ("quorum", "mean", "last"),
    [
        ("majority", (8 + 1) / 2, max),
        ("first:2", (8 + 1) / 3, min),
        ("first:4", (8 + 1) / 5, min),
        ("last:2", 2 * (8 + 1) / 3, max),
        ("last:4", 4 * (8 + 1) / 5, max),
    ],
)
def test_drawn_candidates_make_as_many_workers_active_as_the_formula_says(
    quorum: str, mean: float, last: Callable[[frozenset[int]], int]
) -> None:
    rounds = 200
    seen = _staircase(quorum, workers=8, rounds=rounds)
    for round, (active, waited_s) in enumerate(seen):
        candidates, _ = Quorum.of(quorum, 8).for_round(round, tuple(range(8)))
        starts = last(candidates)
        assert active == starts + 1
        assert waited_s == sum(range(starts + 1)) / 8 * LATER_S
    deviation = math.sqrt(fmean((active - mean) ** 2 for active, _ in seen))
    assert fmean(active for active, _ in seen) == pytest.approx(
        mean, abs=3 * deviation / math.sqrt(rounds)
    )
    if quorum == "majority":
        assert deviation == pytest.approx(math.sqrt((8**2 - 1) / 12), rel=0.1)
        waited_s = fmean(waited for _, waited in seen)
        assert waited_s == pytest.approx((8**2 - 1) / (6 * 8) * LATER_S, rel=0.1)


# --- examples by hand ----------------------------------------------------------------------
#
# Worker r contributes, in its step s, 10^s in place r: the digits of a sum tell the steps in it.
# Each worker logs (moment, round, sum, staleness) of every round that it takes.

Seen = tuple[float, int, list[float], int]


def _played(
    compute_s: Sequence[Sequence[float]], quorum: str | int = "solo", **settings: Any
) -> list[list[Seen]]:
    workers = len(compute_s)

    def worker() -> list[Seen]:
        world, seen = enter_world(), []

        def note(record: offbeat.Round) -> None:
            total = record.sum.views[0].tolist()
            seen.append((world.now(), record.round, total, record.staleness_rounds))

        opened = offbeat.partial_all_reduce(
            "example", torch.zeros(workers), quorum=quorum, **settings
        )
        for step, seconds in enumerate(compute_s[world.rank]):
            world.sleep_until(world.now() + seconds)
            tensor = torch.zeros(workers)
            tensor[world.rank] = 10.0**step
            for record in opened.rounds(tensor):
                note(record)
        for record in opened._partial.leave():  # what close() does, and looks at the records
            note(record)
        opened._end()
        return seen

    return offbeat.run(worker, Cluster.uniform(workers)).results


def test_a_late_gradient_rides_in_the_next_round() -> None:
    fast, slow = _played([[1, 1, 1, 1], [2.5]])
    assert fast == [
        (1.0, 0, [1, 0], 0),
        (2.0, 1, [10, 0], 0),
        (3.0, 2, [100, 1], 2),
        (4.0, 3, [1000, 0], 0),
    ]
    assert (
        slow
        == [
            (2.5, 0, [1, 0], 0),  # late: takes what it has missed, and does not wait
            (2.5, 1, [10, 0], 0),
            *fast[2:],
        ]
    )


def test_a_late_gradient_is_dropped_if_so_asked() -> None:
    fast, slow = _played([[1, 1, 1], [2.5, 1]], drop_late=True)
    assert fast == [
        (1.0, 0, [1, 0], 0),
        (2.0, 1, [10, 0], 0),
        (3.0, 2, [100, 0], 0),  # not the slow worker's 1
    ]
    assert slow == [
        (2.5, 0, [1, 0], 0),
        (2.5, 1, [10, 0], 0),
        (3.5, 2, [100, 0], 0),  # its second step is late as well
    ]


def test_two_steps_ride_together_if_no_round_starts_between_them() -> None:
    first, second = _played([[1, 3], [1.5, 1]])
    assert second == [
        (1.5, 0, [1, 0], 0),
        (2.5, 1, [0, 11], 1),  # on time with its second step: starts the round, with both
        (4.0, 2, [10, 0], 1),  # what the first worker has left behind
    ]
    assert first == [
        (1.0, 0, [1, 0], 0),
        (4.0, 1, [0, 11], 1),
        (4.0, 2, [10, 0], 1),
    ]


@pytest.mark.parametrize(
    ("bound", "moments"),
    [
        (None, [1.0, 2.0, 3.0, 4.0, 5.0]),
        (3, [1.0, 2.0, 3.0, 4.5, 5.5]),
        (2, [1.0, 2.0, 4.5, 5.5, 6.5]),
        (1, [1.0, 4.5, 5.5, 6.5, 7.5]),
        (0, [4.5, 5.5, 6.5, 7.5, 8.5]),
    ],
)
def test_the_fast_wait_rather_than_exceed_the_bound(
    bound: int | None, moments: list[float]
) -> None:
    fast, _ = _played([[1, 1, 1, 1, 1], [4.5]], max_staleness_rounds=bound)
    assert [moment for moment, *_ in fast[:5]] == moments
    assert max(staleness for *_, staleness in fast) == (4 if bound is None else bound)


def test_a_bound_holds_everyone_only_until_the_late_one_has_given() -> None:
    fast, slow = _played([[1, 1, 1, 1], [3.5]], max_staleness_rounds=1)
    assert fast == [
        (1.0, 0, [1, 0], 0),
        (3.5, 1, [10, 1], 1),  # on time since 2.0
        (4.5, 2, [100, 0], 0),
        (5.5, 3, [1000, 0], 0),
    ]
    assert slow == [(3.5, 0, [1, 0], 0), *fast[1:]]


def test_a_worker_that_leaves_at_once_is_not_waited_for() -> None:
    left, busy = _played([[], [1, 1]], quorum="all")
    assert (
        left
        == busy
        == [
            (1.0, 0, [0, 1], 0),
            (2.0, 1, [0, 10], 0),
        ]
    )


def test_what_a_worker_leaves_behind_is_in_the_last_round() -> None:
    fast, slow = _played([[1], [2.5]])
    assert fast == [(1.0, 0, [1, 0], 0), (2.5, 1, [0, 1], 1)]
    assert slow == [(2.5, 0, [1, 0], 0), (2.5, 1, [0, 1], 1)]


def test_a_designated_worker_that_has_left_starts_its_round_by_leaving() -> None:
    assert Quorum.of("majority", 3).for_round(0, (0, 1, 2)) == (frozenset({2}), 1)
    assert Quorum.of("majority", 3).for_round(1, (0, 1)) == (frozenset({1}), 1)
    first, second, left = _played([[1], [2], []], quorum="majority")
    assert left == [(0.0, 0, [0, 0, 0], 0), (2.0, 1, [1, 1, 0], 1)]
    assert first == [(1.0, 0, [0, 0, 0], 0), (2.0, 1, [1, 1, 0], 1)]
    assert second == [(2.0, 0, [0, 0, 0], 0), (2.0, 1, [1, 1, 0], 1)]


@pytest.mark.parametrize("quorum", ["solo", "majority", "all", "first:1", "last:1", 1, 0.5])
@pytest.mark.parametrize("bound", [None, 0, 3])
def test_a_worker_alone_is_always_on_time(quorum: str | int, bound: int | None) -> None:
    assert _played([[1, 2]], quorum=quorum, max_staleness_rounds=bound) == [
        [(1.0, 0, [1], 0), (3.0, 1, [10], 0)]
    ]


def test_outside_any_cluster_it_is_a_worker_alone() -> None:
    with offbeat.partial_all_reduce("alone", torch.zeros(2)) as opened:
        for round in range(3):
            record = opened.reduce(torch.tensor([1.0, 2.0]), samples=2.0)
            assert record.round == round
            assert record.ranks == (0,)
            assert record.mean()[0].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("workers", [3, 5, 6, 7])
def test_any_number_of_workers_gives_the_right_sum(workers: int) -> None:
    results = _played([[1, 1]] * workers, quorum="all")
    assert (
        results
        == [
            [
                (1.0, 0, [1] * workers, 0),
                (2.0, 1, [10] * workers, 0),
            ]
        ]
        * workers
    )


def test_reduce_returns_the_newest_round() -> None:
    def worker() -> list[tuple[int, tuple[int, ...]]]:
        world, seen = enter_world(), []
        with offbeat.partial_all_reduce("newest", torch.zeros(1), quorum="solo") as opened:
            for _ in range(6 if world.rank == 0 else 2):
                world.sleep_until(world.now() + (1.0 if world.rank == 0 else 2.4))
                record = opened.reduce(torch.ones(1))
                seen.append((record.round, record.ranks))
        return seen

    fast, slow = offbeat.run(worker, Cluster.uniform(2)).results
    assert fast == [(0, (0,)), (1, (0,)), (2, (0, 1)), (3, (0,)), (4, (0, 1)), (5, (0,))]
    assert slow == [(1, (0,)), (3, (0,))]


# --- bad input -----------------------------------------------------------------------------


def _refusals(setting: Callable[[int], dict[str, Any]]) -> list[str]:
    def worker() -> str:
        settings = {"like": torch.zeros(1, 2), "quorum": "solo", "name": "different"}
        settings.update(setting(offbeat.rank()))
        with pytest.raises(DisagreementError) as caught:
            offbeat.partial_all_reduce(settings.pop("name"), *settings.pop("like"), **settings)
        return str(caught.value)

    return offbeat.run(worker, Cluster.uniform(4, latency_s=0.1)).results


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            lambda rank: {"name": f"mine {rank // 3}"},
            "the name: worker 0 has mine 0, worker 3 has mine 1",
        ),
        (lambda rank: {"quorum": 2 + (rank == 2)}, "the quorum: worker 0 has 2, worker 2 has 3"),
        (
            lambda rank: {"max_staleness_rounds": 1 if rank < 3 else None},
            "max_staleness_rounds: worker 0 has 1, worker 3 has None",
        ),
        (
            lambda rank: {"like": torch.zeros(1 + (rank == 1), 3)},
            "tensors: worker 0 has 1 tensors, worker 1 has 2 tensors",
        ),
        (
            lambda rank: {"like": torch.zeros(1, 3 + (rank == 3))},
            r"tensors: worker 0 has tensor 0 of shape \(3,\) and torch.float32, "
            r"worker 3 has tensor 0 of shape \(4,\) and torch.float32",
        ),
        (
            lambda rank: {"like": torch.zeros(1, 3).to(torch.float64 if rank else torch.float32)},
            r"tensors: worker 0 has .* and torch.float32, worker 1 has .* and torch.float64",
        ),
    ],
)
def test_workers_that_are_set_up_differently_are_all_told(
    setting: Callable[[int], dict[str, Any]], message: str
) -> None:
    told = _refusals(setting)
    assert len(told) == 4
    assert len(set(told)) == 1
    assert re.search(f"workers disagree about {message}", told[0]), told[0]


def test_a_tensor_of_another_shape_is_refused_and_nothing_is_contributed() -> None:
    with offbeat.partial_all_reduce("shapes", torch.zeros(2)) as opened:
        wrong: tuple[torch.Tensor, ...]
        for wrong in ((torch.zeros(3),), (torch.zeros(2, dtype=torch.float64),), ()):
            with pytest.raises(ValueError, match="of the shapes and types that were declared"):
                opened.reduce(*wrong)
        assert opened.reduce(torch.ones(2)).samples == 1


def test_something_must_be_declared() -> None:
    with pytest.raises(ValueError, match="needs at least one tensor"):
        offbeat.partial_all_reduce("nothing")


def test_a_contribution_after_leaving_is_refused() -> None:
    def worker() -> None:
        opened = offbeat.partial_all_reduce("left", torch.zeros(1), quorum="solo")
        opened.reduce(torch.ones(1))
        opened.close()
        opened.close()  # once is enough
        with pytest.raises(ClosedError, match="a contribution to 'left' after leaving it"):
            opened.reduce(torch.ones(1))

    offbeat.run(worker, Cluster.uniform(2))


def test_a_name_can_be_used_again() -> None:
    def worker() -> list[tuple[int, ...]]:
        world, seen = enter_world(), []
        for steps in (1, 3):
            with offbeat.partial_all_reduce("again", torch.zeros(1), quorum="all") as opened:
                for _ in range(steps):
                    world.sleep_until(world.now() + 1.0 + world.rank)
                    seen.append(opened.reduce(torch.ones(1)).ranks)
        return seen

    for seen in offbeat.run(worker, Cluster.uniform(3)).results:
        assert seen == [(0, 1, 2)] * 4


@pytest.mark.parametrize("samples", [0.1, 2**24 + 1])
def test_no_sample_is_lost_whatever_its_weight(samples: float) -> None:
    def worker() -> offbeat.Stats:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")) as dp:
            for step in range(5):
                opt.zero_grad()
                dp.samples(samples)
                loss(model, dp.rank, step).backward()
                opt.step()
        return dp.stats()

    for stats in offbeat.run(worker, Cluster.uniform(2)).results:
        assert stats.pending_samples == 0


def test_a_pause_does_not_wait_for_those_who_have_left() -> None:
    def worker() -> tuple[float, bool | None]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")) as dp:
            for step in range(2 if dp.rank == 0 else 6):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                opt.step()
                if step == 3:
                    dp.state_dict()
        return dp.stats().pending_samples, dp.stats().replicas_identical

    assert offbeat.run(worker, Cluster.uniform(3)).results == [(0.0, True)] * 3


def test_after_a_pause_a_bound_of_none_holds_from_the_first_round() -> None:
    def worker() -> list[tuple[float, ...]]:
        world, seen = enter_world(), []
        layout = Layout(["x"], [torch.zeros(1)])
        engine = Engine(world, "bound", layout, Rules("solo", max_staleness_rounds=0))
        for _ in engine.settle():
            pass
        engine.resume()

        def add(pile: Pile) -> None:
            pile.flats.views[0].fill_(1)
            pile.samples, pile.micro_batches = 1, 1

        world.sleep_until(1.0 + world.rank)
        assert engine.contribute(add) == "on time"
        for rounds in (engine.results(), engine.leave()):
            seen += [record.samples_by_rank for record in rounds]
        return seen

    for seen in offbeat.run(worker, Cluster.uniform(3)).results:
        assert seen == [(1, 1, 1)]


# --- m-synchronous SGD ---------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("cluster", ["uniform-8", "two-slow-of-eight", "eager-cifar-8"])
def test_m_of_all_equals_synchronous_sgd_bit_for_bit(cluster: str, workers: int) -> None:
    cluster_ = Cluster.load(cluster).resized(workers)
    runs = [
        offbeat.run(partial(train, algorithm=algorithm), cluster_).results
        for algorithm in (offbeat.MSyncSGD(workers), offbeat.MSyncSGD(1.0), offbeat.SyncSGD())
    ]
    for ours, fraction, synchronous in zip(*runs, strict=True):
        for step, expected in enumerate(synchronous[0]):
            assert same(ours[0][step], expected)
            assert same(fraction[0][step], expected)
        assert ours[1].dropped_samples == 0


@pytest.mark.parametrize("m", [0, 5, 1.5, "some", True])
def test_an_m_that_cannot_be_meant_is_refused(m: Any) -> None:
    with pytest.raises(ValueError, match="got"):
        offbeat.run(lambda: train(algorithm=offbeat.MSyncSGD(m)), Cluster.uniform(4))


@pytest.mark.parametrize("m", range(1, 9))
def test_a_round_takes_as_long_as_its_mth_fastest_worker(m: int) -> None:
    speeds = [1.0, 0.25, 2.0, 0.5, 4.0, 0.125, 8.0, 16.0]
    cluster = Cluster.parse(f"workers = 8\nspeed = {speeds}\n[compute]\nstep_s = 1")
    ranks = sorted(range(8), key=lambda rank: 1 / speeds[rank])[:m]
    for _, stats in offbeat.run(
        lambda: train(steps=1, algorithm=offbeat.MSyncSGD(m)), cluster
    ).results:
        first = stats.history[0]
        assert first.ranks == tuple(sorted(ranks))
        assert stats.dropped_samples == (stats.rank not in ranks)
        if stats.rank in ranks:
            assert first.ended_s == 1 / speeds[ranks[-1]]


def test_a_round_of_random_workers_takes_the_mth_order_statistic() -> None:
    draw, rounds, workers = Random(7), 30, 7
    arrives_s = [[draw.expovariate(1.0) for _ in range(workers)] for _ in range(rounds)]

    def worker(m: int) -> list[float]:
        world, ended = enter_world(), []
        with offbeat.partial_all_reduce(
            "order", torch.zeros(1), quorum=m, drop_late=True
        ) as reduced:
            for number in range(rounds):
                world.sleep_until(100.0 * number + arrives_s[number][world.rank])
                record = reduced.reduce(torch.ones(1))
                assert record.samples == m
                ended.append(world.now())
        return ended

    for m in range(1, workers + 1):
        results = offbeat.run(partial(worker, m), Cluster.uniform(workers)).results
        for number, seconds in enumerate(arrives_s):
            ended_s = 100.0 * number + sorted(seconds)[m - 1]
            assert min(ended[number] for ended in results) == ended_s


# --- what is kept while a worker is away ---------------------------------------------------


@pytest.mark.parametrize("says_so", [True, False])
def test_who_asks_for_the_newest_round_keeps_only_a_few(says_so: bool) -> None:
    def worker() -> tuple[int, list[int]]:
        world, longest, seen = enter_world(), 0, []
        with offbeat.partial_all_reduce("few", torch.ones(1), quorum="solo") as few:
            for step in range(60):
                if (world.rank, step) in ((0, 3), (0, 10)):
                    with few.away() if says_so else nullcontext():
                        for _ in range(20):
                            world.sleep_until(world.now() + 1.0)
                            longest = max(longest, len(few._partial.log))
                world.sleep_until(world.now() + 1.0)
                seen.append(few.reduce(torch.ones(1)).round)
        return longest, seen

    longest, seen = offbeat.run(worker, Cluster.uniform(3)).results[0]
    assert longest <= MOST + 1
    assert seen == sorted(set(seen))
    assert seen[3] >= 20  # the newest one then


def test_who_asks_for_every_round_gets_every_round() -> None:
    def worker() -> list[int]:
        world, seen = enter_world(), []
        with offbeat.partial_all_reduce("all", torch.ones(1), quorum="solo") as opened:
            for step in range(30):
                world.sleep_until(world.now() + (20.0 if (world.rank, step) == (0, 3) else 1.0))
                seen += [each.round for each in opened.rounds(torch.ones(1))]
        return seen

    for seen in offbeat.run(worker, Cluster.uniform(3)).results:
        assert seen == list(range(len(seen)))


def test_the_log_stays_short_though_a_worker_applies_rounds_slowly() -> None:
    """The others wait for it in the end: it would never catch up."""

    def worker() -> tuple[int, list[torch.Tensor]]:
        model, world, longest = net(), enter_world(), 0
        opt = sgd(model)

        def slow(*_: object) -> None:
            nonlocal longest
            if world.rank == 0:
                world.sleep_until(world.now() + 5.0)
                longest = max(longest, len(dp._replica.engine.log))

        opt.register_step_post_hook(slow)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")) as dp:
            for step in range(10 if world.rank == 0 else 100):
                opt.zero_grad()
                loss(model, world.rank, step).backward()
                opt.step()
        return longest, list(model.parameters())

    results = offbeat.run(worker, Cluster.uniform(3, step_s=1.0)).results
    assert results[0][0] <= MOST_TAKEN_FROM
    assert all(same(last, results[0][1]) for _, last in results)
