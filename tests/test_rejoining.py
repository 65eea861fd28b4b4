"""A worker freezes, the others go on without it, and it joins them again: in virtual time.

Whatever the method and the moment: nobody hangs, replicas are identical, and what the worker had
computed before is in rounds once, or known to be lost.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from test_deal_lost import Blocks
from test_joining import CODECS, METHODS, bits
from torch.utils.data import DistributedSampler

import offbeat
from offbeat.asynchronous import Asynchronous
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash, Freeze, Join
from offbeat.errors import ExpelledError, WorkerLostError
from offbeat.replica import Replica
from offbeat.rounds.catching_up import CatchingUp

WORKERS = 4
FROZEN = 2
ROUNDS = 10
GRADIENTS = 30
"""Rounds where a gradient is one, or a few are."""
SAMPLES = 3.0
LIMIT_S = 0.4
LONG_S = 0.7


class Fate(NamedTuple):
    """What a worker has seen."""

    rounds: int
    identical: bool | None
    computed: float
    applied: float
    dropped: float
    expelled: float
    lost: float
    by_rank: tuple[float, ...]
    drifts: bool
    momentum: float
    models: dict[int, bytes]
    """By the rounds that it knew of: the parameters that all agreed on then."""
    attached_s: float
    ended_s: float


class Frozen:
    """Each worker's program."""

    def __init__(
        self, algorithm: offbeat.Algorithm, codec: Any = None, freeze_s: float | None = LIMIT_S
    ) -> None:
        self.algorithm = algorithm
        self.settings = {"survive": True, "bucket_bytes": 16, "codec": codec, "freeze_s": freeze_s}

    @property
    def rounds(self) -> int:
        many = isinstance(self.algorithm, offbeat.RennalaSGD)
        return GRADIENTS if isinstance(self.algorithm, Asynchronous) and not many else ROUNDS

    def __call__(self) -> Fate:
        torch.manual_seed(offbeat.rank())
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        betas = (0.0 if hasattr(self.algorithm, "beta") else 0.9, 0.999)  # or a method's own
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=betas)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        seen, models = [0.0] * WORKERS, {}

        def follow(agreed: torch.nn.Module, each: Any) -> None:
            models[each.round + 1] = bits(agreed)
            for worker, samples in enumerate(each.samples_by_rank):
                seen[worker] += samples

        with offbeat.attach(
            model, optimizer, self.algorithm, scheduler=scheduler, **self.settings
        ) as dp:
            attached_s = dp.seconds
            dp.on_round(follow)
            for _ in dp.rounds(self.rounds):
                dp.samples(SAMPLES)
                optimizer.zero_grad()
                model(torch.randn(int(SAMPLES), 3)).square().mean().backward()
                optimizer.step()
        stats, first = dp.stats(), next(iter(optimizer.state.values()))
        return Fate(
            dp.round,
            stats.replicas_identical,
            stats.computed_samples,
            stats.applied_samples,
            stats.dropped_samples,
            stats.expelled_samples,
            stats.lost_samples,
            tuple(seen),
            dp.drifts,
            float(first["exp_avg_sq"].sum()),
            models,
            attached_s,
            dp.seconds,
        )


def cluster(*events: Any, latency_s: float = 1e-3) -> Cluster:
    there = Cluster.load("two-slow-of-eight").resized(WORKERS)
    latencies = {"latency_s": latency_s, "control_latency_s": latency_s}
    network = there.network.model_copy(update=latencies)
    return there.model_copy(update={"events": events, "network": network})


def freeze(at_s: float, for_s: float = LONG_S, worker: int = FROZEN) -> Freeze:
    return Freeze(kind="freeze", worker=worker, at_s=at_s, for_s=for_s)


class Returns:
    """How often workers have joined again, by what they say."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.WARNING, "offbeat")

    def __call__(self) -> int:
        told = [each for each in self._caplog.messages if "it has joined them again" in each]
        self._caplog.clear()
        return len(told)


@pytest.fixture
def returns(caplog: pytest.LogCaptureFixture) -> Returns:
    return Returns(caplog)


def lived(algorithm: offbeat.Algorithm, there: Cluster, codec: Any = None) -> list[Fate | None]:
    """Run, and check what must hold."""
    fates = offbeat.run(Frozen(algorithm, codec), there).results
    present = [fate for fate in fates if fate is not None]
    for fate in present:
        assert fate.identical
        assert fate.computed == pytest.approx(fate.applied + fate.dropped + fate.expelled)
        assert fate.lost == pytest.approx(present[0].lost)
        if getattr(algorithm, "graph", None):  # its rounds are its own, and so is its model
            continue
        assert fate.rounds == present[0].rounds
        if not fate.drifts:
            assert fate.momentum == present[0].momentum  # to the bit
        if isinstance(algorithm, offbeat.WAGMASGD):  # each has a model of its own
            continue
        for number in fate.models.keys() & present[0].models.keys():
            assert fate.models[number] == present[0].models[number], number
    return fates


@cache
def span(name: str, latency_s: float) -> tuple[float, float]:
    """When all are attached, and when a run in which nothing happens ends."""
    whole = offbeat.run(Frozen(METHODS[name]), cluster(latency_s=latency_s))
    return max(fate.attached_s for fate in whole.results), whole.seconds


every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_a_frozen_worker_is_expelled_and_joins_again(name: str, returns: Returns) -> None:
    """At several moments; all that it has computed is accounted for, exactly."""
    begins_s, whole = span(name, 1e-3)
    for share in (0.15, 0.31, 0.5):
        fates = lived(METHODS[name], cluster(freeze(begins_s + share * (whole - begins_s))))
        assert returns() == 1
        check_accounted(METHODS[name], fates)


def check_accounted(algorithm: offbeat.Algorithm, fates: list[Fate | None]) -> None:
    frozen, other = fates[FROZEN], fates[0]
    assert frozen is not None
    assert other is not None
    assert frozen.expelled <= 4 * SAMPLES
    if getattr(algorithm, "graph", None):  # a worker hears of its neighbours alone
        assert other.lost == pytest.approx(frozen.expelled)
    elif isinstance(algorithm, Asynchronous):
        # One gradient may have been dropped, in its turn, while its worker was frozen.
        unheard = frozen.computed - frozen.dropped - other.by_rank[FROZEN] - other.lost
        assert 0.0 <= unheard <= min(frozen.expelled, 2 * SAMPLES)
        assert not unheard or not isinstance(algorithm, (offbeat.ASGD, offbeat.RingleaderASGD))
    elif getattr(algorithm, "fragments", 1) == 1:  # else each fragment tells of it
        assert other.by_rank[FROZEN] + other.lost == pytest.approx(frozen.computed - frozen.dropped)


def test_what_is_still_being_added_up_counts_once(
    returns: Returns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was expelled on its worker's books, and is in a round that the worker applies later."""
    held, found = CatchingUp._held, []

    def noted(self: CatchingUp) -> float:
        found.append(held(self))
        return found[-1]

    monkeypatch.setattr(CatchingUp, "_held", noted)
    algorithm = offbeat.RennalaSGD(24)  # gradients in a round
    for number in range(4):
        lived(algorithm, cluster(freeze(0.7 + number * 0.13)))
        assert returns() == 1
    assert any(found)


@pytest.mark.parametrize("name", CODECS)
def test_the_same_where_rounds_travel_as_bytes(name: str, returns: Returns) -> None:
    begins_s, whole = span(name, 1e-3)
    there = cluster(freeze((begins_s + whole) / 3))
    check_accounted(METHODS[name], lived(METHODS[name], there, CODECS[name]))
    assert returns() == 1


def test_what_a_frozen_worker_costs_the_others() -> None:
    """They wait for the limit, a few messages, and no more; without one, until it goes on."""

    def ended(freeze_s: float | None, *events: Freeze) -> float:
        uniform = Cluster.uniform(WORKERS, 0.1, 1e-3).model_copy(update={"events": events})
        run = offbeat.run(Frozen(offbeat.SyncSGD(), freeze_s=freeze_s), uniform)
        return float(run.results[0].ended_s)

    usual = ended(None)
    assert ended(None, freeze(0.5, 2.0)) == pytest.approx(usual + 2.0, abs=0.1)
    assert ended(0.3, freeze(0.5, 2.0)) == pytest.approx(usual + 0.3, abs=0.1)
    assert ended(0.3, freeze(0.5, 0.25)) == pytest.approx(usual + 0.25, abs=0.1)


def test_who_is_frozen_for_less_than_the_limit_is_waited_for(returns: Returns) -> None:
    for name in ("SyncSGD", "solo", "LocalSGD"):
        begins_s, whole = span(name, 1e-3)
        fates = lived(METHODS[name], cluster(freeze((begins_s + whole) / 2, 0.9 * LIMIT_S)))
        assert all(fate is not None and not fate.expelled for fate in fates)
        assert returns() == 0


def drawn(name: str, draws: Random) -> list[Fate | None]:
    """Have some freeze, crash and join at random; no fates if nobody is left who has the state."""
    latency_s = draws.choice([1e-5, 1e-3, 0.02])
    begins_s, whole = span(name, latency_s)
    moments = [begins_s + draws.uniform(0.0, 0.5) * (whole - begins_s) for _ in range(3)]
    first, second, third, fourth = draws.sample(range(WORKERS), WORKERS)
    events: list[Any] = [freeze(moments[0], draws.uniform(0.3, 1.2), first)]
    soon = moments[0] + draws.choice([LIMIT_S, LONG_S]) + draws.uniform(-3, 20) * latency_s
    if draws.random() < 0.7:
        events.append(freeze(draws.choice([soon, moments[1]]), draws.uniform(0.3, 1.2), second))
    if draws.random() < 0.7:
        events.append(Crash(kind="crash", worker=third, at_s=draws.choice([soon, moments[2]])))
    if draws.random() < 0.5:
        events.append(Join(kind="join", worker=fourth, at_s=moments[1]))
    try:
        fates = lived(METHODS[name], cluster(*events, latency_s=latency_s))
    except WorkerLostError as error:
        assert "nobody is left who has the state" in str(error)  # noqa: PT017 - one way of two
        return []
    # Who wakes when the others have ended finds nobody.
    missing = {rank for rank, fate in enumerate(fates) if fate is None}
    assert missing <= {event.worker for event in events}
    return fates


@every_method
def test_whoever_freezes_crashes_and_joins_whenever(name: str, returns: Returns) -> None:
    draws, back = Random(f"rejoining {name}"), 0
    for _ in range(4):
        if drawn(name, draws):
            back += returns()
    assert back > 0


def test_frozen_again_and_again(returns: Returns) -> None:
    begins_s, _ = span("half", 1e-3)
    events = [freeze(begins_s + 0.1 + number * 1.0, 0.45) for number in range(2)]
    lived(METHODS["half"], cluster(*events))
    assert returns() == 2


def test_who_wakes_when_all_others_have_ended_finds_nobody() -> None:
    _, whole = span("SyncSGD", 1e-3)
    fates = lived(METHODS["SyncSGD"], cluster(freeze(whole / 2, 10 * whole)))
    assert [fate is None for fate in fates] == [False, False, True, False]


def test_a_method_that_takes_in_nobody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "can_be_joined", False)
    words = "went on without it. It cannot join them again: .* by EagerSGD"
    with pytest.raises(ExpelledError, match=words):
        offbeat.run(Frozen(offbeat.EagerSGD()), cluster(freeze(0.5)))


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "LocalSGD", "WAGMASGD", "EDM", "RennalaSGD"])
def test_whoever_comes_while_the_others_end_holds_up_nobody(name: str, returns: Returns) -> None:
    """At moments from a step before the end to the end: it joins, or finds nobody."""
    fates = lived(METHODS[name], cluster(freeze(1.0, 100.0)))
    ends_s = max(fate.ended_s for fate in fates if fate is not None)
    came = []
    for number in range(0, 24, 3):
        wakes_s = ends_s - 0.12 + number * 0.0055
        fates = lived(METHODS[name], cluster(freeze(1.0, wakes_s - 1.0)))
        assert [fate is None for fate in fates if fate is not fates[FROZEN]] == [False] * 3
        came.append(fates[FROZEN] is not None)
    assert not came[-1]
    assert any(came) or name in ("WAGMASGD", "EDM")  # there joining takes longer than that


def test_without_survival_all_wait_for_a_frozen_worker() -> None:
    def program() -> float:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer) as dp:
            for _ in range(5):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
        return dp.seconds

    there = Cluster.uniform(2, 0.1).model_copy(update={"events": (freeze(0.25, 3.0, 1),)})
    assert offbeat.run(program, there).results == [pytest.approx(3.45)] * 2


def test_a_loop_that_was_asked_to_end_ends_on_who_joins_after_that() -> None:
    """`stop()` was called in a round that the frozen worker has missed."""

    def program() -> int:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(
            model, optimizer, offbeat.EagerSGD("solo"), survive=True, freeze_s=0.2
        ) as dp:
            for step in dp.until(seconds=100.0):
                if dp.rank == 0 and step == 8:
                    dp.stop()
                if dp.rank == 1 and step == 8:  # it still serves the others meanwhile
                    with dp.away():
                        dp._world.sleep_until(3.0)
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
        return dp.round

    there = Cluster.uniform(3, 0.1, 1e-3).model_copy(update={"events": (freeze(0.5, 1.0),)})
    done = offbeat.run(program, there)
    assert done.seconds < 5.0
    assert len(set(done.results)) == 1


@pytest.mark.parametrize(
    ("algorithm", "expelled"),
    [
        *((offbeat.EagerSGD(), True), (offbeat.ABSSGD(), True), (offbeat.SyncSGD(), False)),
        *((offbeat.LocalSGD(2), False), (offbeat.ASGD(), True), (offbeat.RennalaSGD(), True)),
        (offbeat.DPSGD(), False),
    ],
    ids=str,
)
def test_by_default_a_silence_of_a_second_counts_where_all_do_not_wait_for_all(
    algorithm: offbeat.Algorithm, expelled: bool, returns: Returns
) -> None:
    def program() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, algorithm, survive=True) as dp:
            for _ in dp.until(seconds=6.0):
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()

    for for_s in (0.9, 2.0):
        there = Cluster.uniform(3, 0.1, 1e-3).model_copy(update={"events": (freeze(0.5, for_s),)})
        offbeat.run(program, there)
        assert returns() == (expelled and for_s > 1)


class Two:
    """Two models are trained in turns, each with a method of its own."""

    def __init__(self, *algorithms: offbeat.Algorithm) -> None:
        self.algorithms = algorithms

    def __call__(self) -> list[tuple[bytes, float, int]]:
        torch.manual_seed(offbeat.rank())
        with ExitStack() as stack:
            pairs, dps = [], []
            for algorithm in self.algorithms:
                model = torch.nn.Linear(3, 2)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
                dp = offbeat.attach(model, optimizer, algorithm, survive=True, freeze_s=LIMIT_S)
                dps.append(stack.enter_context(dp))
                pairs.append((model, optimizer))
            for _ in dps[0].until(seconds=4.0):
                for model, optimizer in pairs:
                    optimizer.zero_grad()
                    model(torch.randn(2, 3)).square().mean().backward()
                    optimizer.step()
        for dp in dps:
            assert dp.stats().replicas_identical
            assert dp.stats().pending_samples == pytest.approx(0.0)
        return [
            (bits(model), dp.stats().lost_samples, dp.round)
            for (model, _), dp in zip(pairs, dps, strict=True)
        ]


@pytest.mark.parametrize(
    "algorithms",
    [
        (offbeat.EagerSGD(), offbeat.EagerSGD()),
        (offbeat.SyncSGD(), offbeat.EagerSGD("solo")),
        (offbeat.ABSSGD(), offbeat.WaitFreeLocalSGD()),
        (offbeat.RingleaderASGD(), offbeat.SyncSGD()),
    ],
    ids=str,
)
def test_who_was_expelled_is_back_where_two_models_are_trained(
    algorithms: tuple[offbeat.Algorithm, ...], returns: Returns
) -> None:
    for number in range(12):
        there = cluster(freeze(0.4 + number * 0.013))
        told = offbeat.run(Two(*algorithms), there).results
        assert all(each == told[0] for each in told)
        assert returns() == 1


def test_who_was_expelled_has_no_share_of_the_epochs_that_began_without_it(
    returns: Returns,
) -> None:
    def train() -> list[int]:
        model = torch.nn.Linear(1, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        fixed: Any = DistributedSampler(range(24), num_replicas=4, rank=offbeat.rank())  # type: ignore[arg-type]
        sampler, shares = offbeat.Survivors(fixed), []
        with offbeat.attach(model, opt, offbeat.EagerSGD(), survive=True, freeze_s=LIMIT_S):
            for epoch in range(6):
                sampler.set_epoch(epoch)
                shares.append(0)
                for number in sampler:
                    shares[-1] += 1
                    opt.zero_grad()
                    model(torch.full((1, 1), number / 24)).square().mean().backward()
                    opt.step()
        return shares

    missed = 0
    for number in range(10):
        told = offbeat.run(train, cluster(freeze(0.4 + number * 0.037, 1.5))).results
        assert returns() == 1
        assert [len(each) for each in told] == [6] * 4
        for epoch in range(1, 6):
            assert sum(each[epoch] for each in told) == 24
        missed += told[FROZEN].count(0)
    assert missed > 2


# --- dealt data ----------------------------------------------------------------------------


class Dealt:
    """Trains over dealt data; returns how often every sample of every epoch was applied."""

    epochs, samples = 3, 24

    def __init__(self, algorithm: offbeat.Algorithm) -> None:
        self.algorithm = algorithm
        self.made = 0.0  # of samples, in rounds of their own workers

    def __call__(self) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.zeros(self.epochs * self.samples)])
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        deal = offbeat.Deal(range(len(model[0])), 2, sampler=Blocks(self.samples))
        applied = torch.zeros(self.epochs * self.samples)
        with offbeat.attach(model, opt, self.algorithm, survive=True, freeze_s=LIMIT_S) as dp:
            dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
            for epoch in range(self.epochs):
                deal.set_epoch(epoch)
                for batch in deal:
                    dp.samples(len(batch))
                    opt.zero_grad()
                    model[0][batch].sum().div(len(batch)).backward()
                    opt.step()
        assert dp.stats().replicas_identical
        self.made += dp.stats().applied_samples
        return applied


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "half", "ABSSGD", "ASGD"])
def test_what_it_had_in_hand_is_dealt_again_and_nothing_comes_twice(
    name: str, returns: Returns
) -> None:
    draws, back = Random(f"dealt {name}"), 0
    whole = offbeat.run(Dealt(METHODS[name]), cluster()).seconds
    for _ in range(8):
        at_s = draws.uniform(0.05, 0.4) * whole
        dealt = Dealt(METHODS[name])
        fates = offbeat.run(dealt, cluster(freeze(at_s, draws.choice([0.45, 0.5, 0.9])))).results
        came = returns()
        back += came
        for rank, fate in enumerate(fates):
            if fate is not None and (rank != FROZEN or not came):  # it has not seen all rounds
                assert fate.unique().tolist() == [1.0], (at_s, fate)
    assert back > 2


@pytest.mark.parametrize("name", ["DPSGD", "DPSGD in pairs"])
def test_the_same_among_neighbours(name: str, returns: Returns) -> None:
    """Each sample is in a round that its worker has made, once."""
    draws, back = Random(f"dealt {name}"), 0
    whole = offbeat.run(Dealt(METHODS[name]), cluster()).seconds
    for _ in range(8):
        dealt = Dealt(METHODS[name])
        there = cluster(freeze(draws.uniform(0.05, 0.4) * whole, draws.choice([0.45, 0.5, 0.9])))
        fates = offbeat.run(dealt, there).results
        back += returns()
        assert None not in fates
        assert dealt.made == Dealt.epochs * Dealt.samples
    assert back > 2


# --- what it says --------------------------------------------------------------------------


def test_everybody_says_what_has_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "offbeat")
    lines: list[dict[str, Any]] = []
    there = Cluster.uniform(WORKERS, 0.1, 1e-3).model_copy(update={"events": (freeze(0.45),)})
    offbeat.run(Frozen(offbeat.SyncSGD()), there, records=lines.append)
    lost, joined, again = caplog.messages
    assert "worker 2 was lost at virtual time 0.85 s (silent for 0.4 s" in lost
    assert "worker 2 has joined; 4 of 4 workers train" in joined
    assert "worker 2 was silent, and the others went on without it; it has joined them" in again
    kinds = [(each["kind"], each["rank"]) for each in lines if each["kind"] in ("lost", "joined")]
    assert sorted(kinds) == [*(("joined", r) for r in range(4)), *(("lost", r) for r in (0, 1, 3))]


def test_an_expelled_worker_is_a_lost_one_to_who_asks() -> None:
    assert issubclass(ExpelledError, WorkerLostError)
