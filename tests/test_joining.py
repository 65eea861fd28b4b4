"""A worker joins a job that runs: in virtual time, at many moments, and while others are lost.

Whatever the method and the moment: nobody hangs, replicas are identical, what everybody has
computed is in rounds once, and the others do not wait for the joiner.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from test_deal_lost import Blocks
from torch.utils.data import DistributedSampler

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash, Join
from offbeat.errors import DisagreementError, EpochOver
from offbeat.merges.mix import Mix
from offbeat.replica import Replica
from offbeat.rounds import Engine, Rules
from offbeat.rounds.joining import Joining
from offbeat.rounds.service import Service

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
    "ABSSGD, the paper's": offbeat.ABSSGD("finish", patience=0.0),
    "MSyncSGD": offbeat.MSyncSGD("auto"),
    "LBBSP": offbeat.LBBSP(3),
    "DropCompute": offbeat.DropCompute(3, window_rounds=3),
    "NonblockingSGD": offbeat.NonblockingSGD(3),
    "banked": offbeat.NonblockingSGD(3, in_flight="bank"),
    "LocalSGD": offbeat.LocalSGD(2),
    "LocalSGD by speed": offbeat.LocalSGD(3, shares="speed"),
    "WaitFreeLocalSGD": offbeat.WaitFreeLocalSGD(),
    "DaSGD": offbeat.DaSGD(2),
    "DaSGD of the paper": offbeat.DaSGD(2, merge="paper", quorum=2),
    "DiLoCo": offbeat.DiLoCo(2),
    "DiLoCo in fragments": offbeat.DiLoCo(4, fragments=2, overlap=1),
    "DiLoCo with a quorum": offbeat.DiLoCo(4, fragments=2, quorum=0.5, grace_s=0.01),
    "WAGMASGD": offbeat.WAGMASGD(2, period=3),
    "DPSGD": offbeat.DPSGD("lazy-ring"),
    "DPSGD in pairs": offbeat.DPSGD("one-peer"),
    "DmSGD": offbeat.DmSGD("complete"),
    "DecentLaM": offbeat.DecentLaM("lazy-ring"),
    "EDM": offbeat.EDM("lazy-ring"),
    "MomentumTracking": offbeat.MomentumTracking("ring"),
    "ASGD": offbeat.ASGD(delay_adaptive=True),
    "RingmasterASGD": offbeat.RingmasterASGD(),
    "RennalaSGD": offbeat.RennalaSGD(),
    "RennalaSGD in pieces": offbeat.RennalaSGD(3, micro_batches=2),
    "RingleaderASGD": offbeat.RingleaderASGD(),
    "RescaledASGD": offbeat.RescaledASGD(max_delay=4),
    "MSyncSGD topped up": offbeat.MSyncSGD(2, top_up=True),
}
CODECS = {"SyncSGD": offbeat.Int4(), "half": "auto", "DiLoCo": offbeat.Int8()}


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
    drifts: bool
    rate: float
    momentum: float
    models: dict[int, bytes]
    """By the rounds that it knew of: the parameters that all agreed on then."""
    statistics: float
    attached_s: float
    ended_s: float


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def train(algorithm: offbeat.Algorithm, codec: Any = None) -> Fate:
    """One worker's program, the joiner's too."""
    torch.manual_seed(offbeat.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    betas = (0.0 if hasattr(algorithm, "beta") else 0.9, 0.999)  # a method may have its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=betas)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen, models = [0.0] * WORKERS, {}

    def follow(agreed: torch.nn.Module, each: Any) -> None:
        models[each.round + 1] = bits(agreed)
        for worker, samples in enumerate(each.samples_by_rank):
            seen[worker] += samples

    settings = {"scheduler": scheduler, "survive": True, "bucket_bytes": 16, "codec": codec}
    with offbeat.attach(model, optimizer, algorithm, **settings) as dp:
        began, attached_s = dp.round, dp.seconds
        models[began] = bits(model)
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
        dp.drifts,
        optimizer.param_groups[0]["lr"],
        float(first["exp_avg_sq"].sum()),
        models,
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


def joined(algorithm: offbeat.Algorithm, there: Cluster, codec: Any = None) -> list[Fate | None]:
    """Run, and check what must hold."""
    fates = offbeat.run(lambda: train(algorithm, codec), there).results
    present = [fate for fate in fates if fate is not None]
    crashed = {event.worker for event in there.events if isinstance(event, Crash)}
    assert {rank for rank, fate in enumerate(fates) if fate is None} <= {*crashed, JOINER}
    for fate in present:
        assert fate.identical
        assert fate.computed == pytest.approx(fate.applied + fate.dropped)
        assert fate.statistics == present[0].statistics
        if getattr(algorithm, "graph", None):  # its rounds are its own, and so is its model
            continue
        assert fate.rounds == present[0].rounds
        if not fate.drifts:  # else these are each worker's own
            assert fate.rate == present[0].rate
            assert fate.momentum == present[0].momentum  # to the bit
        if isinstance(algorithm, offbeat.WAGMASGD):  # each has a model of its own
            continue
        for number in fate.models.keys() & present[0].models.keys():
            assert fate.models[number] == present[0].models[number], number
    return fates


@cache
def span(name: str, latency_s: float) -> tuple[float, float]:
    """When all are attached, and when a run in which nobody joins or is lost ends."""
    whole = offbeat.run(lambda: train(METHODS[name]), cluster(0.0, latency_s=latency_s))
    return max(fate.attached_s for fate in whole.results), whole.seconds


every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_a_worker_joins_and_is_like_the_others_to_the_bit(name: str) -> None:
    check_joined(METHODS[name], span(name, 1e-3)[1] / 2)


@pytest.mark.parametrize("name", CODECS)
def test_a_worker_joins_where_rounds_travel_as_bytes(name: str) -> None:
    """What rounding has left out of its rounds is nothing when it begins."""
    check_joined(METHODS[name], span(name, 1e-3)[1] / 2, CODECS[name])


def check_joined(algorithm: offbeat.Algorithm, joins_s: float, codec: Any = None) -> None:
    fates = joined(algorithm, cluster(joins_s), codec)
    joiner, other = fates[JOINER], fates[0]
    assert joiner is not None
    assert other is not None
    assert 0 < joiner.began < joiner.rounds
    if not getattr(algorithm, "graph", None):
        assert joiner.began in other.models
    assert joiner.computed > 0  # and it is all in rounds, as the others have seen them
    told_once = getattr(algorithm, "fragments", 1) == 1  # else each fragment tells of it
    if told_once and not getattr(algorithm, "graph", None):  # nor do all neighbours hear of it
        assert other.by_rank[JOINER] == pytest.approx(joiner.computed - joiner.dropped)


def drawn(name: str, draws: Random, ranks: Sequence[int] = range(WORKERS)) -> bool:
    """Have a worker join at some moment, and some of these be lost; whether it stayed."""
    latency_s = draws.choice([1e-5, 1e-3, 0.02])
    begins_s, whole = span(name, latency_s)
    joins_s = begins_s + draws.uniform(0.0, 0.7) * (whole - begins_s)
    victims = draws.sample(ranks, draws.choice([0, 1, 1, 2]))
    soon = [joins_s + draws.uniform(0.1, 12) * latency_s for _ in victims]
    later = [draws.uniform(joins_s, whole) for _ in victims]
    moments = draws.choice([soon, later])
    crashes = zip(victims, moments, strict=True)
    return (
        joined(METHODS[name], cluster(joins_s, *crashes, latency_s=latency_s))[JOINER] is not None
    )


@every_method
def test_whenever_it_joins_and_whoever_is_lost_meanwhile(name: str) -> None:
    draws, others = Random(name), [rank for rank in range(WORKERS) if rank != JOINER]
    assert drawn(name, draws, others)
    for _ in range(2):
        drawn(name, draws)


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


def test_a_join_interrupts_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast ones are in a round, waiting for the slow ones, at nearly every moment."""
    interrupted, take_part = 0, Service._take_part

    def noted(self: Service, number: int) -> None:
        nonlocal interrupted
        try:
            take_part(self, number)
        except EpochOver:
            interrupted += 1
            raise

    monkeypatch.setattr(Service, "_take_part", noted)
    begins_s, whole = span("SyncSGD", 1e-3)
    for share in (0.2, 0.4, 0.6):
        fates = joined(offbeat.SyncSGD(), cluster(begins_s + share * (whole - begins_s)))
        assert fates[JOINER] is not None
    assert interrupted == 0


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

    told = offbeat.run(program, cluster(0.3, slow=False)).results
    without = offbeat.run(program, cluster(1e6, slow=False)).results
    assert words.replace("\\", "") in told[JOINER]
    assert "they go on without it" in told[JOINER]
    assert [told[rank] for rank in (0, 1, 3)] == [without[rank] for rank in (0, 1, 3)]
    assert not caplog.records


class Closed(offbeat.SyncSGD):
    """A method whose rounds nobody can join."""

    def start(self, replica: Replica) -> None:
        replica.open(Rules("all", lockstep=True), engine=ClosedEngine)


class ClosedEngine(Engine):
    joins = False


def test_a_method_that_takes_in_nobody_says_so() -> None:
    with pytest.raises(ValueError, match=r"worker 2 cannot join: .* by Closed yet"):
        offbeat.run(lambda: train(Closed()), cluster(1.0))


# --- among neighbours ----------------------------------------------------------------------


def test_among_neighbours_a_join_leaves_the_mean_of_all_models_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models: dict[int, list[torch.Tensor]] = {}
    take_in = Mix.take_in

    def noted(self: Mix, channel: Any, new: Sequence[int], mine: bool) -> None:
        take_in(self, channel, new, mine)
        models[offbeat.rank()] = [each.clone() for each in self._base.views]

    monkeypatch.setattr(Mix, "take_in", noted)
    joined(offbeat.EDM("lazy-ring"), cluster(1.0))
    assert sorted(models) == [0, 1, 2, 3]
    begins = models.pop(JOINER)
    assert not torch.equal(models[0][0], models[1][0])  # they have come apart
    for mine, *theirs in zip(begins, *models.values(), strict=True):
        torch.testing.assert_close(mine, sum(theirs) / 3)


# --- several at a time ---------------------------------------------------------------------


class Two:
    """Trains two models at a time, each over a method of its own."""

    def __init__(self, *algorithms: offbeat.Algorithm) -> None:
        self.algorithms = algorithms
        self.attached_s = 0.0
        self.began: dict[int, int] = {}

    def __call__(self) -> tuple[bool | None, ...]:
        torch.manual_seed(offbeat.rank())
        models = [torch.nn.Linear(3, width) for width in (2, 4)]
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
        with ExitStack() as stack:
            one, other = (
                stack.enter_context(offbeat.attach(*each, survive=True))
                for each in zip(models, optimizers, self.algorithms, strict=True)
            )
            self.attached_s = max(self.attached_s, one.seconds)
            self.began[one.rank] = min(one.round, other.round)
            for _ in one.rounds(ROUNDS):
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(torch.randn(2, 3)).square().mean().backward()
                    optimizer.step()
        for each in (one, other):
            stats = each.stats()
            assert stats.computed_samples == stats.applied_samples + stats.dropped_samples
            assert stats.replicas_identical
        return tuple(each.stats().replicas_identical for each in (one, other))


def test_who_comes_while_two_models_end_holds_up_nobody() -> None:
    """The others serve the rounds of one, and the joiner waits for the state of the other."""
    joined = too_late = 0
    for name, seed in (("SyncSGD", 1), ("unlike", 2), ("half", 3)):
        pair = {**PAIRS, "unlike": (offbeat.SyncSGD(), offbeat.SyncSGD(micro_batches=2))}[name]
        draws, ends_s = Random(seed), offbeat.run(Two(*pair), cluster(0.0)).seconds
        for _ in range(8):
            told = offbeat.run(Two(*pair), cluster(draws.uniform(0.8, 1.0) * ends_s)).results
            assert [told[rank] for rank in (0, 1, 3)] == [(True, True)] * 3
            joined += told[JOINER] is not None
            too_late += told[JOINER] is None
    assert joined
    assert too_late


PAIRS = {
    "SyncSGD": (offbeat.SyncSGD(), offbeat.SyncSGD()),
    "half": (offbeat.EagerSGD(), offbeat.EagerSGD()),
    "of all kinds": (offbeat.LocalSGD(2), offbeat.ASGD()),
    "neighbours": (offbeat.DmSGD("ring"), offbeat.RingleaderASGD()),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_worker_joins_where_two_models_are_trained_at_a_time(name: str) -> None:
    draws, two = Random(name), Two(*PAIRS[name])
    ends_s = offbeat.run(two, cluster(0.0)).seconds
    for _ in range(4):
        joins_s = draws.uniform(two.attached_s, 0.6 * ends_s)
        crash = draws.choice([(), ((draws.choice([0, 1, 3]), joins_s + draws.uniform(0.0, 0.5)),)])
        two = Two(*PAIRS[name])
        fates = offbeat.run(two, cluster(joins_s, *crash)).results
        assert fates[JOINER] == (True, True), crash
        assert two.began[JOINER] > 0


def test_a_joiner_that_attaches_less_than_the_others_says_so_at_its_first_step() -> None:
    def program() -> str:
        models = [torch.nn.Linear(3, 2) for _ in range(2)]
        words = ""
        with ExitStack() as stack:
            for each in models[: 1 if offbeat.rank() == JOINER else 2]:
                optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
                dp = stack.enter_context(offbeat.attach(each, optimizer, survive=True))
            for _ in dp.rounds(ROUNDS):
                each(torch.ones(2, 3)).square().mean().backward()
                try:
                    optimizer.step()
                except RuntimeError as error:
                    words = str(error)
                    break
        return words

    told = offbeat.run(program, cluster(0.3, slow=False)).results
    assert "who have attached 2 things at a time" in told[JOINER]
    assert [told[rank] for rank in (0, 1, 3)] == ["", "", ""]


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


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "half", "ABSSGD", "ASGD"])
def test_a_joiner_is_dealt_data_from_where_the_others_are(name: str) -> None:
    draws = Random(name)
    whole = offbeat.run(Dealt(METHODS[name]), cluster(0.0)).seconds
    took_part = 0
    for number in range(8):
        crash = [(draws.choice([0, 1, 3]), draws.uniform(0.0, whole))] if number % 2 else []
        if name in (
            "ASGD",
            "RingmasterASGD",
        ):  # nothing says there which data a lost worker has given
            crash = []
        dealt = Dealt(METHODS[name])
        fates = offbeat.run(dealt, cluster(draws.uniform(0.1, 0.6) * whole, *crash)).results
        took_part += dealt.drawn.get(JOINER, 0) > 0
        survivors = [rank for rank, fate in enumerate(fates) if fate is not None]
        for rank in survivors:  # the joiner has not seen all rounds
            if rank != JOINER and (not crash or crash[0][1] < max(dealt.ended.values())):
                assert fates[rank].unique().tolist() == [1.0], (number, crash, fates[rank])
    assert took_part > 4


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "LocalSGD", "DPSGD"])
def test_a_joiner_has_a_share_from_the_next_epoch_on(name: str) -> None:
    epochs, samples = 5, 24

    def train() -> list[list[int]]:
        model = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        fixed = DistributedSampler(range(samples), num_replicas=4, rank=offbeat.rank())  # type: ignore[arg-type, var-annotated]
        sampler = offbeat.Survivors(fixed)
        got: list[list[int]] = []
        with offbeat.attach(model, opt, METHODS[name], survive=True):
            for epoch in range(epochs):
                sampler.set_epoch(epoch)
                got.append([])
                for number in sampler:
                    got[-1].append(number)
                    opt.zero_grad()
                    model(torch.full((1, 1), number / samples)).square().mean().backward()
                    opt.step()
        return got

    draws = Random(name)
    whole = offbeat.run(train, cluster(0.0)).seconds
    begun = set()
    for _ in range(12):
        told = offbeat.run(train, cluster(draws.uniform(0.02, 0.9) * whole)).results
        joiner = told[JOINER] or [[]] * epochs
        for epoch in range(epochs):
            drawn = [number for each in told if each for number in each[epoch]]
            assert sorted(drawn) == list(range(samples))
            assert len(joiner[epoch]) in (0, samples // 4)
        shares = [len(each) for each in joiner]
        assert shares == sorted(shares)
        begun.add(sum(map(bool, shares)))
    assert len(begun) > 2


@every_method
def test_a_worker_joins_while_all_compare_their_replicas(name: str) -> None:
    """They wait for all there, and come to the end of no step; among all is the joiner."""

    def program() -> int:
        torch.manual_seed(offbeat.rank())
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        settings: dict[str, Any] = {"survive": True, "bucket_bytes": 8}
        with offbeat.attach(model, optimizer, METHODS[name], **settings) as dp:
            for _ in range(4 if dp.rank == JOINER else 8):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if dp.rank == 0:
                dp._world.sleep_until(3.0)  # the others wait for it
            while dp._so_far.comparisons < 3:
                dp.replicas_identical()
        return dp._so_far.comparisons

    draws, joined = Random(name), 0
    for _ in range(3):
        told = offbeat.run(program, cluster(draws.uniform(1.5, 2.5), slow=False)).results
        joined += told[JOINER] is not None
        assert {each for each in told if each is not None} == {3}
    assert joined
