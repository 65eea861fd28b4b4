"""A joiner gets a large state in stripes, from several workers: in virtual time.

What must hold of any join does: replicas are identical to the bit, whoever is lost and whenever,
and every sample comes once. Here, the state is large whatever its size.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from test_joining import JOINER, METHODS, Dealt, Two, cluster, drawn, joined, span

import offbeat
from offbeat.errors import EpochOver
from offbeat.rounds import joining
from offbeat.rounds.joining import Joining
from offbeat.rounds.packed import pack, unpack
from offbeat.rounds.stripes import MOST_GIVERS, chosen, copy_stripe, ends_of, size_of
from offbeat.worlds.current import present_world
from offbeat.worlds.virtual import VirtualWorld

IN_LOCKSTEP = ["SyncSGD", "SyncSGD in pieces", "LBBSP", "DropCompute", "LocalSGD", "DiLoCo"]
striped = pytest.mark.parametrize("name", IN_LOCKSTEP)


class Stripe(NamedTuple):
    """What a worker has copied."""

    giver: int
    givers: tuple[int, ...]
    epoch: int
    taken: int
    begin: int
    end: int
    size: int
    at_s: float


@pytest.fixture(autouse=True)
def gave(monkeypatch: pytest.MonkeyPatch) -> list[Stripe]:
    """Have every state given in stripes, where any is; who has given what."""
    stripes: list[Stripe] = []
    give = Joining._give_to

    def noted(self: Joining, donation: Any, gift: Any) -> None:
        rank, givers, size = self._world.rank, donation.givers, size_of(gift.common)
        begin, end = ends_of(size, givers.index(rank), len(givers))
        stripes.append(
            Stripe(
                rank, givers, donation.epoch, donation.taken, begin, end, size, self._world.now()
            )
        )
        give(self, donation, gift)

    monkeypatch.setattr("offbeat.donation.STRIPED_BYTES", 0)
    monkeypatch.setattr(Joining, "_give_to", noted)
    return stripes


def check_whole(stripes: list[Stripe]) -> None:
    """They are of one round, and come to the whole."""
    (givers,) = {each.givers for each in stripes}
    assert len({(each.epoch, each.taken, each.size) for each in stripes}) == 1
    assert sorted(each.giver for each in stripes) == list(givers)
    ends = [0]
    for each in sorted(stripes, key=lambda each: each.begin):
        assert each.begin == ends[-1]
        ends.append(each.end)
    assert ends[-1] == stripes[0].size > 0


# --- the row of bytes ----------------------------------------------------------------------


def mixed() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(7, 3),
        torch.randn(4, 6).t(),  # not contiguous
        torch.empty(0),
        torch.tensor(3),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.randn(33).to(torch.bfloat16),
        torch.tensor([True, False, True]),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 50])
def test_stripes_come_to_the_whole_row(count: int) -> None:
    tensors = mixed()
    row = torch.full((size_of(tensors),), 7, dtype=torch.uint8)
    for number in range(count):
        begin, end = ends_of(len(row), number, count)
        copy_stripe(tensors, begin, end, row[begin:end])
    assert ends_of(len(row), count - 1, count)[1] == len(row)
    own = torch.randn(5)
    state = unpack(pack({"own": own, "all": tensors, "twice": tensors[0]}, tensors), row)
    assert torch.equal(state["own"], own)
    assert torch.equal(state["twice"], tensors[0])
    for mine, its in zip(tensors, state["all"], strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(mine, its)


def test_givers_are_far_from_each_other_and_not_too_many() -> None:
    assert chosen([]) == ()
    assert chosen([1, 4]) == (1, 4)
    assert chosen(range(32)) == (0, 4, 8, 12, 16, 20, 24, 28)
    assert len(chosen(range(9))) == MOST_GIVERS


# --- a worker joins --------------------------------------------------------------------------


@striped
def test_each_of_the_others_gives_a_stripe_of_the_same_round(name: str, gave: list[Stripe]) -> None:
    fates = joined(METHODS[name], cluster(span(name, 1e-3)[1] / 2))
    joiner = fates[JOINER]
    assert joiner is not None
    assert joiner.began > 0
    assert joiner.computed > 0
    assert gave[0].givers == (0, 1, 3)
    check_whole(gave)


@pytest.mark.parametrize("name", ["half", "solo", "ABSSGD", "DaSGD", "WAGMASGD", "DPSGD", "ASGD"])
def test_one_gives_all_where_others_come_to_the_same_round_when_they_like(
    name: str, gave: list[Stripe]
) -> None:
    fates = joined(METHODS[name], cluster(span(name, 1e-3)[1] / 2))
    assert fates[JOINER] is not None
    assert len(gave) == len(gave[0].givers) == 1


def test_what_is_small_is_given_by_one(monkeypatch: pytest.MonkeyPatch, gave: list[Stripe]) -> None:
    monkeypatch.setattr("offbeat.donation.STRIPED_BYTES", 1000)
    assert joined(offbeat.SyncSGD(), cluster(0.4))[JOINER] is not None
    assert len(gave) == len(gave[0].givers) == 1


@striped
def test_whenever_it_joins_and_whoever_is_lost_meanwhile(name: str, gave: list[Stripe]) -> None:
    draws, others = Random(f"stripes {name}"), [rank for rank in range(4) if rank != JOINER]
    assert drawn(name, draws, others)
    for _ in range(4):
        drawn(name, draws)
    assert any(len(each.givers) > 1 for each in gave)  # not where all are about to end


@pytest.mark.parametrize("name", ["SyncSGD", "LocalSGD"])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_if_one_that_gives_a_stripe_dies_the_others_give_all_anew(
    name: str, lost: int, gave: list[Stripe]
) -> None:
    """Before the others know of it, and while its stripe travels."""
    moment_s = span(name, 0.01)[1] / 2
    joined(METHODS[name], cluster(moment_s, latency_s=0.01))
    (copied_s,) = [each.at_s for each in gave if each.giver == lost]
    died_while_it_gave = 0
    for later_s in (-0.001, 0.0, 0.005, 0.015, 0.025, 0.04, 0.1):
        gave.clear()
        there = cluster(moment_s, (lost, copied_s + later_s), latency_s=0.01)
        fates = joined(METHODS[name], there)
        assert fates[lost] is None
        assert fates[JOINER] is not None
        last = [each for each in gave if each.epoch == gave[-1].epoch]
        check_whole(last)
        if {each.epoch for each in gave} != {last[0].epoch}:
            died_while_it_gave += 1
            assert last[0].givers == tuple(rank for rank in (0, 1, 3) if rank != lost)
    assert died_while_it_gave > 1


def test_every_sample_comes_once(gave: list[Stripe]) -> None:
    draws, algorithm = Random("dealt"), offbeat.SyncSGD()
    whole, took_part = offbeat.run(Dealt(algorithm), cluster(0.0)).seconds, 0
    for number in range(8):
        crash = [(draws.choice([0, 1, 3]), draws.uniform(0.0, whole))] if number % 2 else []
        dealt = Dealt(algorithm)
        fates = offbeat.run(dealt, cluster(draws.uniform(0.1, 0.6) * whole, *crash)).results
        took_part += dealt.drawn.get(JOINER, 0) > 0
        for rank, applied in enumerate(fates):  # the joiner has not seen all rounds
            ended = not crash or crash[0][1] < max(dealt.ended.values())
            if applied is not None and rank != JOINER and ended:
                assert applied.unique().tolist() == [1.0], (number, crash, applied)
    assert took_part > 4
    assert any(len(each.givers) == 3 for each in gave)


def test_a_worker_joins_where_two_models_are_trained_at_a_time(gave: list[Stripe]) -> None:
    """One gives all of each: a round of one may have to wait for the other."""
    draws, algorithms = Random("two"), (offbeat.SyncSGD(), offbeat.SyncSGD())
    two = Two(*algorithms)
    ends_s = offbeat.run(two, cluster(0.0)).seconds
    for _ in range(4):
        joins_s = draws.uniform(two.attached_s, 0.6 * ends_s)
        two = Two(*algorithms)
        assert offbeat.run(two, cluster(joins_s)).results[JOINER] == (True, True)
    assert {len(each.givers) for each in gave} == {1}


# --- who is not in its loop --------------------------------------------------------------------


def test_a_worker_that_is_away_gives_nothing_and_is_not_waited_for(gave: list[Stripe]) -> None:
    def program() -> tuple[float, bool | None]:
        torch.manual_seed(offbeat.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with offbeat.attach(model, optimizer, survive=True) as dp:
            attached_s = dp.seconds
            for _ in dp.rounds(60):
                if dp.rank == 1 and 0.3 < dp.seconds < 0.9:
                    with dp.away():
                        dp._world.sleep_until(4.0)
                optimizer.zero_grad()
                model(torch.randn(2, 3)).square().mean().backward()
                optimizer.step()
        return attached_s, dp.stats().replicas_identical

    there = cluster(1.0, slow=False)
    told = offbeat.run(program, there).results
    assert all(identical for _, identical in told)
    assert 1.0 < told[JOINER][0] < 3.0
    assert gave[0].givers == (0, 3)
    check_whole(gave)


def test_if_a_step_ends_by_an_error_the_stripe_is_given_before_the_next_one(
    gave: list[Stripe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others' stripes would never be complete."""
    raised: list[int] = []

    def program() -> bool | None:
        torch.manual_seed(offbeat.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with offbeat.attach(model, optimizer, survive=True) as dp:

            def fail(*_: Any) -> None:
                if dp.rank == 1 and dp._replica.engine.is_asked_for_state and not raised:
                    raised.append(dp.round)
                    raise KeyError("of the program's own")

            dp.on_round(fail)
            for _ in dp.rounds(30):
                optimizer.zero_grad()
                model(torch.randn(2, 3)).square().mean().backward()
                try:
                    optimizer.step()
                except KeyError:
                    continue
        return dp.stats().replicas_identical

    assert offbeat.run(program, cluster(1.0, slow=False)).results == [True] * 4
    assert raised
    check_whole(gave)
    assert gave[0].givers == (0, 1, 3)
    assert gave[-1].giver == 1


@pytest.mark.parametrize("joins_s", [1.5, 1.9, 2.3])
def test_a_worker_joins_while_all_compare_their_replicas(
    joins_s: float, gave: list[Stripe]
) -> None:
    """No round follows in which all could copy the same: one gives all."""

    def program() -> int:
        torch.manual_seed(offbeat.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with offbeat.attach(model, optimizer, survive=True) as dp:
            for _ in range(4 if dp.rank == JOINER else 8):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if dp.rank == 0:
                dp._world.sleep_until(3.0)  # the others wait for it
            while dp._so_far.comparisons < 3:
                dp.replicas_identical()
        return dp._so_far.comparisons

    told = offbeat.run(program, cluster(joins_s, slow=False)).results
    assert all(each is None or each >= 3 for each in told)
    assert gave
    assert all(len(each.givers) == 1 for each in gave)


def test_a_copy_of_the_epoch_before_goes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be lost while another one copies: who joins begins anew then, and so do they."""
    refused: list[str] = []
    channel = VirtualWorld.channel

    def noted(self: VirtualWorld, name: str, *arguments: Any, **settings: Any) -> Any:
        try:
            return channel(self, name, *arguments, **settings)
        except EpochOver:
            if "/state/" in name:
                refused.append(name)
            raise

    monkeypatch.setattr(VirtualWorld, "channel", noted)
    copied: list[tuple[int, float]] = []
    copy = joining.copy_stripe

    def slowly(*arguments: Any) -> None:
        world = present_world()
        assert world is not None
        copied.append((world.rank, world.now()))
        world.sleep_until(world.now() + 0.05)  # as a large state takes
        copy(*arguments)

    monkeypatch.setattr(joining, "copy_stripe", slowly)
    for algorithm in (offbeat.SyncSGD(), offbeat.EagerSGD()):
        copied.clear()
        joined(algorithm, cluster(1.0))
        giver, moment_s = copied[0]
        lost = next(rank for rank in (0, 1, 3) if rank != giver)
        for later_s in (0.01, 0.03, 0.049):  # before the copy is there
            copied.clear()
            fates = joined(algorithm, cluster(1.0, (lost, moment_s + later_s)))
            assert fates[JOINER] is not None
            assert len(copied) > 1
    assert refused
