"""A worker joins a job that runs: in virtual time, at many moments, and while others are lost.

Whatever the method and the moment: nobody hangs, replicas are identical, what everybody has
computed is in rounds once, and the others do not wait for the joiner.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from test_deal_lost import Blocks

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash, Join
from offbeat.errors import DisagreementError
from offbeat.rounds.joining import Joining

WORKERS = 4
JOINER = 2
ROUNDS = 8
SAMPLES = 3.0
METHODS = {
    "SyncSGD": offbeat.SyncSGD(),
    "SyncSGD in pieces": offbeat.SyncSGD(micro_batches=2),
    "solo": offbeat.EagerSGD("solo"),
    "half": offbeat.EagerSGD(),
    "bounded": offbeat.EagerSGD("majority", max_staleness_rounds=1),
    "delayed": offbeat.EagerSGD(delay=1),
    "ABSSGD": offbeat.ABSSGD(),
    "ABSSGD by noise": offbeat.ABSSGD(warm_up_rounds="noise"),
}


class Fate(NamedTuple):
    """What a worker has seen."""

    began: int
    """The round that it began after."""
    rounds: int
    identical: bool | None
    computed: float
    applied: float
    dropped: float
    by_rank: tuple[float, ...]
    rate: float
    momentum: float
    statistics: float
    attached_s: float
    ended_s: float


def train(algorithm: offbeat.Algorithm) -> Fate:
    """One worker's program, the joiner's too."""
    torch.manual_seed(offbeat.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = [0.0] * WORKERS

    def follow(_: torch.nn.Module, each: Any) -> None:
        for worker, samples in enumerate(each.samples_by_rank):
            seen[worker] += samples

    with offbeat.attach(
        model, optimizer, algorithm, scheduler=scheduler, survive=True, bucket_bytes=16
    ) as dp:
        began, attached_s = dp.round, dp.seconds
        dp.on_round(follow)
        for _ in dp.rounds(ROUNDS):
            dp.samples(SAMPLES)
            optimizer.zero_grad()
            model(torch.randn(int(SAMPLES), 3)).square().mean().backward()
            optimizer.step()
    stats, first = dp.stats(), next(iter(optimizer.state.values()))
    return Fate(
        began,
        dp.round,
        stats.replicas_identical,
        stats.computed_samples,
        stats.applied_samples,
        stats.dropped_samples,
        tuple(seen),
        optimizer.param_groups[0]["lr"],
        float(first["exp_avg_sq"].sum()),
        float(model[1].running_mean.sum()),
        attached_s,
        dp.seconds,
    )


def cluster(
    joins_s: float, *crashes: tuple[int, float], latency_s: float = 1e-3, slow: bool = True
) -> Cluster:
    there = Cluster.load("two-slow-of-eight" if slow else "uniform-8").resized(WORKERS)
    network = there.network.model_copy(
        update={"latency_s": latency_s, "control_latency_s": latency_s}
    )
    events: list[Any] = [Join(kind="join", worker=JOINER, at_s=joins_s)]
    events += [Crash(kind="crash", worker=rank, at_s=moment) for rank, moment in crashes]
    return there.model_copy(update={"events": tuple(events), "network": network})


def joined(algorithm: offbeat.Algorithm, there: Cluster) -> list[Fate | None]:
    """Run, and check what must hold."""
    fates = offbeat.run(lambda: train(algorithm), there).results
    present = [fate for fate in fates if fate is not None]
    crashed = {event.worker for event in there.events if isinstance(event, Crash)}
    assert {rank for rank, fate in enumerate(fates) if fate is None} <= {*crashed, JOINER}
    for fate in present:
        assert fate.identical
        assert fate.computed == pytest.approx(fate.applied + fate.dropped)
        assert (fate.rounds, fate.rate) == (present[0].rounds, present[0].rate)
        assert fate.momentum == present[0].momentum  # to the bit
        assert fate.statistics == present[0].statistics
    return fates


@cache
def span(name: str, latency_s: float) -> tuple[float, float]:
    """When all are attached, and when a run in which nobody joins or is lost ends."""
    whole = offbeat.run(lambda: train(METHODS[name]), cluster(0.0, latency_s=latency_s))
    return max(fate.attached_s for fate in whole.results), whole.seconds


every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_a_worker_joins_and_is_like_the_others_to_the_bit(name: str) -> None:
    _, whole = span(name, 1e-3)
    fates = joined(METHODS[name], cluster(whole / 2))
    joiner, other = fates[JOINER], fates[0]
    assert joiner is not None
    assert other is not None
    assert 0 < joiner.began < joiner.rounds
    assert joiner.computed > 0  # and it is all in rounds, as the others have seen them
    assert other.by_rank[JOINER] == pytest.approx(joiner.computed - joiner.dropped)


@every_method
def test_whenever_it_joins_and_whoever_is_lost_meanwhile(name: str) -> None:
    random, came = Random(name), 0
    for _ in range(4):
        latency_s = random.choice([1e-5, 1e-3, 0.02])
        begins_s, whole = span(name, latency_s)
        joins_s = begins_s + random.uniform(0.0, 0.7) * (whole - begins_s)
        victims = random.sample(range(WORKERS), random.choice([0, 1, 1, 2]))
        soon = [joins_s + random.uniform(0.1, 12) * latency_s for _ in victims]
        later = [random.uniform(joins_s, whole) for _ in victims]
        moments = random.choice([soon, later])
        fates = joined(
            METHODS[name],
            cluster(joins_s, *zip(victims, moments, strict=True), latency_s=latency_s),
        )
        came += fates[JOINER] is not None
    assert came > 0


def test_if_the_one_that_gives_its_state_dies_another_one_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gave: list[tuple[int, float]] = []
    give = Joining._give_to

    def noted(self: Joining, *arguments: Any) -> None:
        gave.append((self._world.rank, self._world.now()))
        give(self, *arguments)

    monkeypatch.setattr(Joining, "_give_to", noted)
    joined(offbeat.EagerSGD(), cluster(1.0, latency_s=0.01))
    ((giver, moment),) = gave
    gave.clear()
    fates = joined(offbeat.EagerSGD(), cluster(1.0, (giver, moment + 0.005), latency_s=0.01))
    assert gave[0][0] == giver
    assert len({rank for rank, _ in gave}) == 2
    assert fates[giver] is None
    assert fates[JOINER] is not None


def test_the_others_do_not_wait_for_a_joiner() -> None:
    """Not even in lockstep: a round with it costs a few messages more, and regrouping some."""
    alone, *_ = joined(offbeat.SyncSGD(), cluster(1e6, slow=False))
    assert alone is not None
    helped, *_, joiner, _ = joined(offbeat.SyncSGD(), cluster(alone.ended_s / 3, slow=False))
    assert helped is not None
    assert joiner is not None
    assert joiner.began > 0
    assert helped.ended_s < alone.ended_s + 0.06  # 60 messages, of some 300 in all


def test_who_comes_when_all_others_have_ended_finds_nobody() -> None:
    fates = joined(offbeat.SyncSGD(), cluster(1e4))
    assert fates[JOINER] is None


# --- refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"width": 5}, r"weight of shape \(5, 3\)"),
        ({"kind": torch.optim.SGD}, "the others have AdamW as the optimizer, this worker has SGD"),
        ({"algorithm": offbeat.EagerSGD()}, "as the algorithm, this worker has EagerSGD"),
        ({"version": "0.0.7"}, "as the version of offbeat, this worker has 0.0.7"),
    ],
)
def test_a_joiner_that_differs_is_refused_and_the_others_do_not_notice(
    other: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def program() -> Any:
        mine = other if offbeat.rank() == JOINER else {}
        if "version" in mine:
            monkeypatch.setattr(offbeat, "__version__", mine["version"])
        torch.manual_seed(0)
        model = torch.nn.Linear(3, mine.get("width", 4))
        optimizer = mine.get("kind", torch.optim.AdamW)(model.parameters(), lr=0.01)
        algorithm = mine.get("algorithm", offbeat.SyncSGD())
        try:
            with offbeat.attach(model, optimizer, algorithm, survive=True) as dp:
                for _ in dp.rounds(ROUNDS):
                    model(torch.ones(2, 3)).square().mean().backward()
                    optimizer.step()
        except DisagreementError as error:
            return str(error)
        return dp.stats().replicas_identical, dp.seconds

    told = offbeat.run(program, cluster(1.0, slow=False)).results
    without = offbeat.run(program, cluster(1e6, slow=False)).results
    assert words.replace("\\", "") in told[JOINER]
    assert "they go on without it" in told[JOINER]
    assert [told[rank] for rank in (0, 1, 3)] == [without[rank] for rank in (0, 1, 3)]
    assert not caplog.records


@pytest.mark.parametrize("algorithm", [offbeat.LocalSGD(2), offbeat.LBBSP(), offbeat.DiLoCo(4)])
def test_a_method_that_takes_in_nobody_says_so(algorithm: offbeat.Algorithm) -> None:
    name = type(algorithm).__name__
    with pytest.raises(ValueError, match=f"worker 2 cannot join: .* by {name} yet"):
        offbeat.run(lambda: train(algorithm), cluster(1.0))


# --- dealt data ----------------------------------------------------------------------------


class Dealt:
    """Trains over dealt data; returns how often every sample of every epoch was applied."""

    epochs, samples = 3, 24

    def __init__(self, algorithm: offbeat.Algorithm) -> None:
        self.algorithm = algorithm
        self.ended: dict[int, float] = {}
        self.drawn: dict[int, int] = {}

    def __call__(self) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(self.epochs * self.samples)])
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        deal = offbeat.Deal(range(len(model[0])), 2, sampler=Blocks(self.samples))
        rank, applied = offbeat.rank(), torch.zeros(self.epochs * self.samples)
        with offbeat.attach(model, opt, self.algorithm, survive=True) as dp:
            dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
            for epoch in range(deal.epoch, self.epochs):
                deal.set_epoch(epoch)
                for batch in deal:
                    self.drawn[rank] = self.drawn.get(rank, 0) + 1
                    opt.zero_grad()
                    model[0][batch].sum().backward()
                    opt.step()
            self.ended[rank] = dp.seconds
        assert dp.stats().replicas_identical
        return applied


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "half", "ABSSGD"])
def test_a_joiner_is_dealt_data_from_where_the_others_are(name: str) -> None:
    draws = Random(name)
    whole = offbeat.run(Dealt(METHODS[name]), cluster(0.0)).seconds
    took_part = 0
    for number in range(8):
        crash = [(draws.choice([0, 1, 3]), draws.uniform(0.0, whole))] if number % 2 else []
        dealt = Dealt(METHODS[name])
        fates = offbeat.run(dealt, cluster(draws.uniform(0.1, 0.6) * whole, *crash)).results
        took_part += dealt.drawn.get(JOINER, 0) > 0
        survivors = [rank for rank, fate in enumerate(fates) if fate is not None]
        for rank in survivors:  # the joiner has not seen all rounds
            if rank != JOINER and (not crash or crash[0][1] < max(dealt.ended.values())):
                assert fates[rank].unique().tolist() == [1.0], (number, crash, fates[rank])
    assert took_part > 4
