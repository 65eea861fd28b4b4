"""Codecs beneath methods: in both worlds, replicas stay the same to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd
from test_codecs import ALL
from torch import Tensor, nn

import offbeat
from offbeat import GlobalQSGD, Half, Int4, Int8
from offbeat.clusters import Cluster
from offbeat.clusters.network import Network
from offbeat.codecs import Codec
from offbeat.errors import DisagreementError, GradientError, NonFiniteGradientError
from offbeat.testing import processes

CLUSTER = "workers = 3\nspeed = [1.0, 0.7, 0.5]\n[compute]\nstep_s = 1.0\n[network]\n"
THREE, AT_ONCE = Cluster.parse(f"{CLUSTER}latency_s = 0.1"), Cluster.parse(CLUSTER)
ALGORITHMS = {
    "sync": offbeat.SyncSGD(),
    "sync-accumulate": offbeat.SyncSGD(micro_batches=2),
    "eager-solo": offbeat.EagerSGD("solo"),
    "eager-majority": offbeat.EagerSGD("majority", delay=1),
    "abs": offbeat.ABSSGD(),
    "waitfree": offbeat.WaitFreeLocalSGD(),
    "local": offbeat.LocalSGD(3),
    "diloco": offbeat.DiLoCo(3),
    "diloco-fragments": offbeat.DiLoCo(4, fragments=2),
    "diloco-overlap": offbeat.DiLoCo(4, overlap=1, quorum=2),
}
ASKED = ("sync", "eager-solo", "abs", "waitfree", "diloco")
CODECS: dict[str, Codec | str] = {**ALL, "auto": "auto"}


def _train(
    algorithm: offbeat.Algorithm, codec: Any, steps: int = 12, **settings: Any
) -> tuple[list[Tensor], offbeat.Stats]:
    """Buckets of a few parameters, which go while backward runs."""
    model = net(seed=offbeat.rank())
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm, codec=codec, bucket_bytes=64, **settings) as dp:
        for step in range(steps):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
    return parameters(model), dp.stats()


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [(each, codec) for each in ASKED for codec in CODECS]
    + [(each, codec) for each in ALGORITHMS if each not in ASKED for codec in ("int8", "int4")],
)
def test_replicas_stay_the_same_to_the_bit(algorithm: str, codec: str) -> None:
    method = ALGORITHMS[algorithm]
    results = offbeat.run(lambda: _train(method, CODECS[codec]), THREE).results
    for mine, stats in results:
        assert stats.replicas_identical
        assert same(mine, results[0][0])
        assert stats.applied_samples + stats.dropped_samples == stats.computed_samples


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_model_is_near_that_without_a_codec(algorithm: str, codec: str) -> None:
    """Where messages take no time, so that rounds start at the same moments."""
    coded, plain = (
        offbeat.run(lambda each=each: _train(ALGORITHMS[algorithm], each), AT_ONCE).results[0][0]
        for each in (CODECS[codec], None)
    )
    for mine, exact in zip(coded, plain, strict=True):
        assert float((mine - exact).norm() / exact.norm()) < 0.03


def test_alone_there_is_nothing_to_code() -> None:
    one = Cluster.parse("workers = 1\n[compute]\nstep_s = 1.0")
    (coded, _), (plain, _) = (
        offbeat.run(lambda codec=codec: _train(offbeat.SyncSGD(), codec), one).results[0]
        for codec in (Int4(), None)
    )
    assert same(coded, plain)


# --- real processes ----------------------------------------------------------------------------


REAL = [
    *(("sync", codec) for codec in ("float16", "int8", "foretold", "exponential", "auto")),
    *(("eager-solo", "int8"), ("abs", "bfloat16"), ("waitfree", "int4"), ("diloco", "int4")),
]


def _real() -> list[list[Tensor]]:
    return [_train(ALGORITHMS[each], CODECS[codec], steps=6)[0] for each, codec in REAL]


@pytest.mark.real
def test_on_real_processes_too_and_lockstep_has_the_bits_of_virtual_time() -> None:
    ended = [each.result for each in processes(_real, 3)]
    for of_rank in ended[1:]:
        assert all(same(mine, first) for mine, first in zip(of_rank, ended[0], strict=True))
    for (algorithm, codec), got in zip(REAL, ended[0], strict=True):
        # Of others it depends on who is late; and what an "auto" finds to be quicker, on the link.
        if algorithm in ("sync", "diloco") and codec != "auto":
            virtual = offbeat.run(
                lambda: _train(ALGORITHMS[algorithm], CODECS[codec], steps=6),  # noqa: B023
                Cluster.parse("workers = 3\n[compute]\nstep_s = 1.0"),
            ).results[0][0]
            assert same(got, virtual), (algorithm, codec)


# --- time --------------------------------------------------------------------------------------


def _exchange_s(codec: Any, network: str) -> float:
    """For a round of a model of 4,160 numbers, without overlap."""
    return (_seconds(codec, network, 6) - _seconds(codec, network, 2)) / 4 - 1.0


def _seconds(codec: Any, network: str, steps: int) -> float:

    def worker() -> float:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt, offbeat.SyncSGD(overlap=False), codec=codec) as dp:
            for _ in range(steps):
                opt.zero_grad()
                model(torch.ones(2, 64)).square().mean().backward()
                opt.step()
            return dp.seconds

    cluster = f"workers = 4\n[compute]\nstep_s = 1.0\n[network]\nall_reduce = 'ring'\n{network}"
    return float(offbeat.run(worker, Cluster.parse(cluster)).results[0])


def test_virtual_time_charges_the_bytes_on_the_wire() -> None:
    network = "bandwidth_bytes_per_s = 1e4"
    plain, half, int8, int4 = (
        _exchange_s(codec, network) for codec in (None, Half(), Int8(), Int4(block=256))
    )
    assert plain == pytest.approx(1.5 * (4 * 4160) / 1e4, rel=0.05)
    # The header goes by itself, in full.
    assert plain / half == pytest.approx(2.0, rel=0.05)
    assert 3.4 < plain / int8 < 4.0
    assert 6.0 < plain / int4 < 8.0


def test_virtual_time_charges_the_codecs_own_seconds() -> None:
    assert _exchange_s(Int8(), "") == 0.0
    assert _exchange_s(Int8(), "codec_bytes_per_s = 16640.0") == pytest.approx(1.0)
    assert _exchange_s(None, "codec_bytes_per_s = 16640.0") == 0.0


def _chosen(
    network: str, steps: int, before: Callable[[int], None] = lambda step: None
) -> list[bool]:
    """After every step: whether an "auto" codes; `before` each, the first worker says which."""

    def worker() -> list[bool]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        coded = []
        with offbeat.attach(model, opt, codec="auto") as dp:
            for step in range(steps):
                if dp.rank == 0:
                    before(step)
                opt.zero_grad()
                model(torch.ones(2, 64)).square().mean().backward()
                opt.step()
                coder = dp._replica.coder
                assert coder is not None
                coded.append(not coder.free)
        return coded

    cluster = f"workers = 4\n[compute]\nstep_s = 1.0\n[network]\nall_reduce = 'ring'\n{network}"
    results = offbeat.run(worker, Cluster.parse(cluster)).results
    assert all(each == results[0] for each in results)
    return list(results[0])


def test_auto_codes_where_that_is_quicker() -> None:
    slow, quick = "bandwidth_bytes_per_s = 1e4\n", "bandwidth_bytes_per_s = 1e7\n"
    codec = "codec_bytes_per_s = 1e6"
    assert all(_chosen(slow + codec, 60)[10:])
    assert not any(_chosen(quick + codec, 60)[10:])


def _charge_times(factor: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every collective take so many times as long as the cluster file says."""
    as_written = Network.collective_s

    def charged(network: Network, *what: Any) -> float:
        return factor[0] * as_written(network, *what)

    monkeypatch.setattr(Network, "collective_s", charged)


def test_auto_decides_again_when_the_link_changes_and_alike_on_every_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Quick, a thousand times slower from step 45 on, quick again from step 120 on.

    It looks after rounds 42 and 74, sees the slow link there, tries both in ten rounds, and so on.
    """
    factor = [1.0]
    _charge_times(factor, monkeypatch)

    def before(step: int) -> None:
        factor[0] = 1000.0 if 45 <= step < 120 else 1.0

    quick = "bandwidth_bytes_per_s = 1e7\ncodec_bytes_per_s = 1e6"
    coded = _chosen(quick, 180, before)
    tries = [False, True] * 5
    tries = tries[1:] + tries[:1]  # after a step: what the next one will do
    assert coded[:9] == tries[:9]
    assert not any(coded[9:73])
    assert coded[73:83] == [False, *tries[:9]]
    assert all(coded[83:147])
    assert not any(coded[157:])


def test_auto_finds_a_quicker_link_behind_the_codecs_own_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plain round takes 4 s, a coded one 3, of which 2.5 are the codec's own; later 2 and 2.75.

    No look sees that. Tries may cost a hundredth of the waits: they come with the look after 167
    rounds.
    """
    factor = [1.0]
    _charge_times(factor, monkeypatch)

    def before(step: int) -> None:
        factor[0] = 0.5 if step >= 20 else 1.0

    coded = _chosen("bandwidth_bytes_per_s = 6240\ncodec_bytes_per_s = 6656", 216, before)
    assert all(coded[9:201])
    assert not any(coded[211:])


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["int4", "standard", "foretold", "auto"])
@pytest.mark.parametrize("algorithm", ["sync", "diloco"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(algorithm: str, codec: str) -> None:
    saved: dict[int, Any] = {}

    def worker(first: int, last: int, saves: bool) -> list[Tensor]:
        model = net()
        opt = sgd(model)
        rank = offbeat.rank()
        if first:
            model.load_state_dict(saved[rank][1])
            opt.load_state_dict(saved[rank][2])
        with offbeat.attach(model, opt, ALGORITHMS[algorithm], codec=CODECS[codec]) as dp:
            if first:
                dp.load_state_dict(saved[rank][0])
            for step in range(first, last):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                if saves and step == 5:
                    states = dp.state_dict(), model.state_dict(), opt.state_dict()
                    saved[rank] = copy.deepcopy(states)
        return parameters(model)

    through = offbeat.run(lambda: worker(0, 12, saves=True), THREE).results[0]
    resumed = offbeat.run(lambda: worker(6, 12, saves=False), THREE).results[0]
    assert same(through, resumed)


def test_a_checkpoint_of_another_codec_is_refused() -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, codec=Int8()) as dp:
            state = dp.state_dict()
        with offbeat.attach(model, opt, codec=Int4()) as dp:
            with pytest.raises(ValueError, match=r"saved with codec Int8.*here it is Int4"):
                dp.load_state_dict(state)

    offbeat.run(worker, THREE)


# --- losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        *(("sync", codec) for codec in ("int8", "int4", "auto")),
        *(("sync", "foretold"), ("eager-solo", "standard"), ("eager-solo", "exponential")),
        *(("diloco", "int4"), ("abs", "int8"), ("waitfree", "int8")),
    ],
)
def test_the_others_train_on_when_a_worker_is_lost(algorithm: str, codec: str) -> None:
    """At many moments: while coding, in an all-to-all, an all-gather, or between rounds."""
    lost = 0
    for number in range(10):
        at_s = 2.0 + 0.517 * number
        crash = f'\n[[event]]\nkind = "crash"\nworker = {number % 3}\nat_s = {at_s}'
        three = Cluster.parse(f"{CLUSTER}latency_s = 0.02{crash}")
        run = offbeat.run(
            lambda: _train(ALGORITHMS[algorithm], CODECS[codec], steps=6, survive=True), three
        )
        survivors = [each for each in run.results if each is not None]
        lost += 3 - len(survivors)
        for mine, stats in survivors:
            assert stats.replicas_identical
            assert same(mine, survivors[0][0])
            assert stats.applied_samples + stats.dropped_samples == stats.computed_samples
    assert lost > 4


@pytest.mark.parametrize("codec", ["int4", "foretold", "auto"])
def test_a_worker_that_was_lost_resumes_with_what_the_others_had_agreed_on(codec: str) -> None:
    """Else it tries, or agrees on a scale, where they do not; slices are others, too."""
    crash = '\n[[event]]\nkind = "crash"\nworker = 2\nat_s = 3.5'
    three = Cluster.parse(f"{CLUSTER}latency_s = 0.02{crash}")
    saved: dict[int, Any] = {}

    def worker(first: int, last: int) -> list[Tensor]:
        model = net()
        opt = sgd(model)
        rank = offbeat.rank()
        if first:
            state, of_model, of_optimizer = copy.deepcopy(saved[min(rank, 1)])
            model.load_state_dict(of_model)
            opt.load_state_dict(of_optimizer)
        with offbeat.attach(model, opt, codec=CODECS[codec], survive=not first) as dp:
            if first:
                dp.load_state_dict(state)
            for step in range(first, last):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
            if not first:
                states = dp.state_dict(), model.state_dict(), opt.state_dict()
                saved[rank] = copy.deepcopy(states)
        return parameters(model)

    offbeat.run(lambda: worker(0, 14), three)
    assert saved.keys() == {0, 1}
    results = offbeat.run(lambda: worker(14, 20), THREE).results
    assert all(same(each, results[0]) for each in results)


def test_a_gradient_that_is_changed_after_its_bucket_went_goes_again() -> None:
    def worker(codec: Any) -> list[Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, codec=codec, bucket_bytes=64) as dp:
            for step in range(4):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)  # type: ignore[union-attr]
                opt.step()
        return parameters(model)

    exact = offbeat.run(lambda: worker(None), AT_ONCE).results[0]
    for codec in (Int8(), Int4(), GlobalQSGD(bits=16), GlobalQSGD(bits=16, margin=1.5)):
        results = offbeat.run(lambda codec=codec: worker(codec), AT_ONCE).results
        assert all(same(each, results[0]) for each in results)
        for mine, other in zip(results[0], exact, strict=True):
            assert float((mine - other).norm() / other.norm()) < 0.1


# --- bad input ---------------------------------------------------------------------------------


def test_workers_with_different_codecs_are_told_at_attach() -> None:
    def worker() -> None:
        model = net()
        with pytest.raises(DisagreementError, match=r"disagree about the codec.*block=64"):
            offbeat.attach(model, sgd(model), codec=Int8(block=256 if offbeat.rank() else 64))

    offbeat.run(worker, THREE)


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [*(("sync", codec) for codec in CODECS), ("eager-solo", "int8"), ("abs", "int4")],
)
def test_a_gradient_that_is_not_finite_is_told_as_without_a_codec(
    algorithm: str, codec: str
) -> None:
    def worker(codec: Any) -> str:
        model = net()
        opt = sgd(model)
        with pytest.raises(NonFiniteGradientError) as told:
            with offbeat.attach(
                model, opt, ALGORITHMS[algorithm], codec=codec, bucket_bytes=64
            ) as dp:
                for step in range(8):
                    opt.zero_grad()
                    loss(model, dp.rank, step).backward()
                    if dp.rank == 1 and step == 3:
                        model[0].weight.grad[0, 0] = torch.nan  # type: ignore[index]
                    opt.step()
        return str(told.value)

    cluster = Cluster.parse("workers = 3\n[compute]\nstep_s = 1.0")
    told = offbeat.run(lambda: worker(CODECS[codec]), cluster).results
    assert told == offbeat.run(lambda: worker(None), cluster).results
    assert all("worker 1" in words and "0.weight" in words for words in told)


@pytest.mark.parametrize("codec", ["int8", "int4", "exponential"])
def test_a_round_that_is_skipped_spoils_no_later_one(codec: str) -> None:
    def worker() -> list[Tensor]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, codec=CODECS[codec], nonfinite="skip") as dp:
            for step in range(8):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                if dp.rank == 1 and step == 3:
                    model[0].weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
                opt.step()
        return parameters(model)

    results = offbeat.run(worker, THREE).results
    assert all(same(each, results[0]) for each in results)
    assert all(each.isfinite().all() for each in results[0])


def test_sparse_gradients_are_refused_as_without_a_codec() -> None:
    def worker() -> None:
        model = nn.Embedding(10, 4, sparse=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt, codec=Int8()):
            model(torch.tensor([1, 2])).sum().backward()
            opt.step()

    with pytest.raises(GradientError, match="is sparse"):
        offbeat.run(worker, THREE)


@pytest.mark.parametrize(
    "algorithm", [offbeat.WAGMASGD(), offbeat.DPSGD(), offbeat.ASGD(), offbeat.RennalaSGD(3)]
)
def test_methods_that_do_not_sum_over_all_refuse_a_codec(algorithm: offbeat.Algorithm) -> None:
    def worker() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"Int8.*sum over all workers.*leave codec out"):
            offbeat.attach(model, opt, algorithm, codec=Int8())

    offbeat.run(worker, THREE)


def test_something_else_than_a_codec_is_refused() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"such as offbeat.Int8"):
        offbeat.attach(model, sgd(model), codec="int8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"such as offbeat.Int8"):
        offbeat.attach(model, sgd(model), codec=Int8)  # type: ignore[arg-type]


def test_too_many_workers_for_a_codecs_levels_are_told_at_attach() -> None:
    def worker() -> None:
        model = net()
        with pytest.raises(ValueError, match="has 1 levels, and 3 workers need 3"):
            offbeat.attach(model, sgd(model), codec=GlobalQSGD("exponential", bits=2))

    offbeat.run(worker, THREE)
