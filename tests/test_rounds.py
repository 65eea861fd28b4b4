"""The pure parts of a round, each alone: start, rates, header, pile, log, bells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Flats, Layout, Pile, Round, Rules
from offbeat.rounds.bells import Bells
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED, Header, Share
from offbeat.rounds.layout import Numbers
from offbeat.rounds.log import MOST, Log
from offbeat.rounds.pile import Piles
from offbeat.rounds.rates import in_parts, read, room, written
from offbeat.rounds.start import ABSENT, DUE, ON_TIME, WANTED, Start
from offbeat.worlds import enter_world

# --- start -----------------------------------------------------------------------------------


def start(candidates: int, needed: int, due: int = 0) -> Start:
    return Start(0, frozenset(range(candidates)), needed, frozenset(range(due)), 0.0)


def met(it: Start, on_time: int, absent: int = 0, wanted: int = 0, due: int = 0) -> bool:
    return it.met(on_time * ON_TIME + absent * ABSENT + wanted * WANTED + due * DUE)


def test_a_round_starts_when_enough_candidates_are_on_time() -> None:
    assert [met(start(8, 3), on_time) for on_time in range(6)] == [False] * 3 + [True] * 3


def test_a_round_starts_when_nobody_else_will_come_and_somebody_is_there() -> None:
    assert not met(start(4, 3), on_time=1, absent=2)
    assert met(start(4, 3), on_time=1, absent=3)


def test_rounds_rest_while_all_are_away_and_nobody_needs_one() -> None:
    assert not met(start(4, 1), on_time=0, absent=4)
    assert met(start(4, 1), on_time=0, absent=4, wanted=1)


def test_who_needs_a_round_does_not_start_it_while_a_candidate_may_come() -> None:
    assert not met(start(4, 1), on_time=0, absent=3, wanted=5)


def test_a_round_waits_for_all_who_are_due_whoever_is_on_time() -> None:
    assert not met(start(4, 1, due=2), on_time=4, due=1)
    assert met(start(4, 1, due=2), on_time=1, due=2)
    assert not met(start(4, 1, due=2), on_time=0, absent=4, wanted=4, due=1)


def test_what_a_round_needs_is_met_for_good() -> None:
    """Arrivals only add up, but for one who comes back: nobody else's makes it wait again."""
    for needed, due, *counts in product((1, 2, 3), (0, 1), *[range(4)] * 3):
        on_time, absent, wanted = counts
        if on_time + absent < 3 and met(start(3, needed, due), on_time, absent, wanted, due):
            assert met(start(3, needed, due), on_time + 1, absent, wanted, due)
            assert met(start(3, needed, due), on_time, absent + 1, wanted, due)
            assert met(start(3, needed, due), on_time, absent, wanted + 1, due)


def test_the_last_one_to_come_is_told_whoever_is_away() -> None:
    it = start(3, 3)
    assert not it.one_missing(ON_TIME)
    assert it.one_missing(2 * ON_TIME)
    assert it.one_missing(2 * ON_TIME + ABSENT)
    assert not it.one_missing(ON_TIME + ABSENT)


def test_a_counter_has_room_for_thirty_thousand_workers() -> None:
    many = 32_767
    it = Start(0, frozenset(range(many)), many, frozenset(range(many)), 0.0)
    assert it.met(many * ON_TIME + many * WANTED + many * DUE)
    assert it.met(many * ABSENT + many * WANTED + many * DUE)
    assert not it.met((many - 1) * ON_TIME + many * WANTED + many * DUE)
    assert many * (ON_TIME + ABSENT + WANTED + DUE) < 2**63  # what a store's counter holds


def test_one_alone_starts_a_round_that_needs_nothing_else() -> None:
    assert start(4, 1).by_one_alone
    assert not start(4, 2).by_one_alone
    assert not start(4, 1, due=1).by_one_alone
    assert not Start(0, frozenset({0}), 1, frozenset(), 8.0).by_one_alone


def test_lockstep_is_a_round_of_all() -> None:
    with pytest.raises(ValueError, match="in lockstep the quorum is all, got 'solo'"):
        Rules("solo", lockstep=True)


# --- rates -----------------------------------------------------------------------------------


def summed(parts: Sequence[Sequence[float]]) -> list[float]:
    """What an all-reduce in float32 makes of them."""
    total = torch.zeros(len(parts[0]))
    for part in parts:
        total += torch.tensor(part)
    return total.tolist()


VALUES = [0.1, 1e-8, 1.0, -0.3, 0.0, 3e-4, 1 / 3, 0.999, 12345.678, 5e-324, -1e-310, 1e-40, 1e30]


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 64, 1024])
def test_a_rate_that_all_hold_is_agreed_to_the_bit(workers: int) -> None:
    draw = Random(workers)
    samples = [float(draw.randint(1, 300)) for _ in range(workers)]
    total = summed([written(tuple(VALUES), each) for each in samples])
    assert read(total, workers, sum(samples)) == tuple(VALUES)


@pytest.mark.parametrize("workers", [2, 3, 7, 64, 1024])
def test_rates_that_differ_become_the_mean_over_samples(workers: int) -> None:
    draw = Random(workers)
    rates = [draw.uniform(0.01, 1.0) for _ in range(workers)]
    samples = [draw.uniform(1, 300) for _ in range(workers)]
    mean = sum(map(math.prod, zip(rates, samples, strict=True))) / sum(samples)
    total = summed([written((rate,), each) for rate, each in zip(rates, samples, strict=True)])
    assert read(total, workers, sum(samples)) == (pytest.approx(mean, rel=1e-4),)


def test_bits_of_two_rates_that_add_up_to_those_of_a_third_do_not_count() -> None:
    rates = [1.0, 4.0]  # in the mean of their bits: 2.0
    total = summed([written((rate,), 1.0) for rate in rates])
    assert read(total, 2, 2.0) == (2.5,)


def test_whoever_brings_no_samples_has_no_say() -> None:
    assert written((9.0,), 0.0) == ()
    total = summed([written((0.1,), 3.0), [0.0] * room(1)])
    assert read(total, 1, 3.0) == (0.1,)
    assert read([0.0] * room(1), 0, 0.0) == ()


@pytest.mark.parametrize("number", [0.1, 1e-8, 2**24 + 1, -7.3, 0.0, 1e15 + 0.3])
def test_three_parts_hold_a_number(number: float) -> None:
    parts = in_parts(number)
    assert sum(parts) == number
    assert torch.tensor(parts).tolist() == list(parts)


# --- header ----------------------------------------------------------------------------------


def header_of(header: Header, rank: int, share: Share) -> list[float]:
    """One worker's header, zeros included."""
    margin = Numbers(torch.ones(header.room))
    margin.write(header.written(rank, share))
    return memoryview(margin.read()).cast(margin.kind).tolist()


def test_a_header_gathers_what_each_worker_says() -> None:
    header = Header(size=3, parameters=2, notes=2, rates=1)
    shares = [
        Share(samples=0.1, age=1, stale=2, notes=(1.5,), micro_batches=1, weight=0.1),
        Share(presence=AWAY, notes=(7.0, 8.0, 9.0), rates=(5.0,)),
        Share(samples=2.0**24 + 1, stale=5, bad=2, micro_batches=3, weight=4.0, stale_samples=2.5),
    ]
    shares[0].rates = shares[2].rates = (0.1,)
    shares[0].used, shares[2].used = [True, False], [True, False]
    parts = [header_of(header, rank, share) for rank, share in enumerate(shares)]
    assert {len(part) for part in parts} == {header.room}
    seen = header.read(summed(parts))
    assert seen.samples == (0.1, 0.0, 2.0**24 + 1)
    assert seen.presence == (HERE, AWAY, HERE)
    assert seen.age == (1, 0, 0)
    assert seen.stale == 5
    assert seen.bad == (2, 1)
    assert seen.notes == ((1.5, 0.0), (7.0, 8.0), (0.0, 0.0))
    assert seen.micro_batches == 4
    assert seen.weight == pytest.approx(4.1, rel=1e-6)  # a sum in float32
    assert seen.stale_samples == 2.5
    assert not seen.changed
    assert seen.rates == (0.1,)
    assert seen.used == (True, False)


def test_a_header_of_nothing_says_nothing() -> None:
    header = Header(size=2, parameters=1)
    seen = header.read(summed([header_of(header, rank, Share()) for rank in range(2)]))
    assert seen.samples == (0.0, 0.0)
    assert seen.bad is None
    assert seen.rates == ()
    assert seen.notes == ((), ())
    assert seen.used == (False,)


def test_one_changed_bucket_is_everybodys_business() -> None:
    header = Header(size=2, parameters=1)
    parts = [header_of(header, 0, Share()), header_of(header, 1, Share(changed=True))]
    assert header.read(summed(parts)).changed


def test_every_presence_arrives() -> None:
    header = Header(size=4, parameters=1)
    kinds = (LEFT, PAUSED, AWAY, HERE)
    parts = [header_of(header, rank, Share(presence=kind)) for rank, kind in enumerate(kinds)]
    assert header.read(summed(parts)).presence == kinds


# --- pile ------------------------------------------------------------------------------------


def layout(*sizes: int, bucket_bytes: int = 2**20) -> Layout:
    tensors = [torch.zeros(size) for size in sizes]
    return Layout([f"p{number}" for number in range(len(sizes))], tensors, bucket_bytes)


def piled(piles: Piles, value: float) -> Pile:
    pile = piles.growing
    for view in pile.flats.views:
        view.fill_(value)
    pile.samples, pile.micro_batches = 1.0, 1
    return pile


def test_a_buffer_goes_round_and_few_are_kept() -> None:
    piles = Piles(layout(4), margin=2, spares=2)
    taken = []
    for value in range(5):
        piled(piles, value)
        taken.append(piles.take())
    assert len({id(pile) for pile in taken}) == 5
    for pile in taken:
        piles.give_back(pile)
    again = []
    for _ in range(3):
        piled(piles, 0.0)
        again.append(piles.take())
    assert sum(any(pile is other for other in taken) for pile in again) == 2


def test_a_pile_that_follows_is_empty() -> None:
    piles = Piles(layout(4), margin=0)
    piled(piles, 1.0)
    piles.give_back(piles.take())
    assert (piles.samples, piles.micro_batches, piles.growing.used) == (0.0, 0, [False])
    assert piles.growing.oldest_round is None


def test_a_small_empty_pile_holds_zeros_ahead_of_its_round() -> None:
    piles = Piles(layout(4), margin=0)
    pile = piled(piles, 1.0)
    pile.blank = False
    piles.give_back(piles.take())
    piles.prepare()
    assert piles.growing.blank
    assert piles.growing.flats.views[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_pile_finds_the_first_parameter_that_is_not_finite(bad: float) -> None:
    pile = Pile(layout(3, 2, 4, bucket_bytes=8))
    pile.look_for_bad()
    assert pile.bad_slot == 0
    pile.flats.views[2][1] = pile.flats.views[1][0] = bad
    pile.look_for_bad([0, 2])
    assert pile.bad_slot == 3
    pile.clear()
    pile.look_for_bad()
    assert pile.bad_slot == 2


def test_what_a_checkpoint_holds_of_a_pile_gives_it_back() -> None:
    piles = Piles(layout(3), margin=1)
    pile = piled(piles, 2.5)
    pile.oldest_round, pile.known_samples, pile.used = 4, 12.0, [True]
    other = Pile(layout(3), 1)
    other.load_state_dict(pile.state_dict())
    assert other.state_dict().keys() == pile.state_dict().keys()
    for name in ("samples", "micro_batches", "used", "oldest_round", "known_samples"):
        assert getattr(other, name) == getattr(pile, name)
    assert other.flats.views[0].tolist() == [2.5] * 3
    assert not other.blank


# --- log -------------------------------------------------------------------------------------


def logged(log: Log, piles: Piles, count: int, bad: bool = False) -> None:
    for _ in range(count):
        pile = piles.take()
        one = (0, 0) if bad else None
        told = Round(log.completed, Flats(layout(1)), (1.0,), 1.0, (True,), bad=one)
        log.append(told, pile, began_s=0.0, ended_s=0.0)


def test_a_log_gives_its_rounds_in_order_and_their_buffers_back() -> None:
    piles = Piles(layout(1), margin=0, spares=9)
    log = Log(piles)
    assert not log
    logged(log, piles, 3)
    seen = []
    while log:
        seen.append(log.next().round)
        log.returned()
        log.returned()  # once is enough
    assert seen == [0, 1, 2]
    assert len(piles._spare) == 3


def test_a_log_is_too_long_after_a_few_rounds() -> None:
    piles = Piles(layout(1), margin=0)
    log = Log(piles)
    logged(log, piles, MOST)
    assert not log.too_long
    logged(log, piles, 1)
    assert log.too_long


def test_what_was_folded_is_taken_when_it_is_adopted() -> None:
    piles = Piles(layout(1), margin=0)
    log = Log(piles)
    logged(log, piles, 4)
    for _ in range(2):
        log.next()
        log.returned()
        log.folded += 1
    assert (log.completed, log.taken) == (4, 0)
    assert log.adopt() == 2
    assert (log.taken, log.folded, log.adopt()) == (2, 0, 0)


def test_a_round_that_is_not_finite_is_not_for_the_background() -> None:
    piles = Piles(layout(1), margin=0)
    log = Log(piles)
    logged(log, piles, 1)
    logged(log, piles, 1, bad=True)
    assert log.oldest.bad is None
    log.next()
    assert log.oldest.bad is not None


# --- bells -----------------------------------------------------------------------------------


def test_all_hear_all_bells_in_one_order() -> None:
    def worker() -> list[tuple[str, int, int]]:
        world = enter_world()
        bells = Bells(world, "here")
        world.sleep_until(1.0 + world.rank)
        bells.ring("away", 10 + world.rank)
        world.sleep_until(9.0 * world.rank)
        return [bells.hear() for _ in range(3)]

    results = offbeat.run(worker, Cluster.uniform(3, latency_s=0.7)).results
    assert results == [[("away", 10, 0), ("away", 11, 1), ("away", 12, 2)]] * 3


def test_a_round_is_rung_for_once_whoever_wants_it() -> None:
    def worker() -> list[tuple[str, int, int]]:
        world = enter_world()
        bells = Bells(world, "here")
        for round in range(3):
            world.sleep_until(10.0 * round + world.rank)
            bells.want(round)
        world.sleep_until(100.0)
        if world.rank == 2:
            bells.ring("end")
        heard = [bells.hear()]
        while heard[-1][0] != "end":
            heard.append(bells.hear())
        return heard

    wanted = [("wanted", round, 0) for round in range(3)]
    assert offbeat.run(worker, Cluster.uniform(3)).results == [[*wanted, ("end", 0, 2)]] * 3
