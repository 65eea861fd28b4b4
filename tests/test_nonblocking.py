"""Non-blocking SGD over an optimizer, in virtual time: rounds that the fastest worker calls."""

from __future__ import annotations

from typing import Any

import pytest
from nets import close, plain, same, train
from test_abs import quadratic, resumes_bit_for_bit

import offbeat
from offbeat.clusters import Cluster
from offbeat.records import Line

NB = offbeat.NonblockingSGD


def _cluster(*speeds: float) -> Cluster:
    """Micro-batches of 1 s at speed 1, and messages that take no time."""
    return Cluster.parse(
        f"workers = {len(speeds)}\nspeed = {list(speeds)}\n[compute]\nstep_s = 1.0"
    )


def _sizes(algorithm: offbeat.Algorithm, steps: tuple[int, ...], *speeds: float) -> list[Any]:
    """By round: samples by rank, and when it ended."""
    lines: list[Line] = []
    run = offbeat.run(
        lambda: quadratic(algorithm, steps[offbeat.rank()]),
        _cluster(*speeds),
        records=lines.append,
    )
    assert all(seen.conserved and seen.stats.pending_samples == 0 for seen in run.results)
    return [
        (line["samples"], line["to_s"])
        for line in lines
        if line["kind"] == "round" and line["rank"] == 0
    ]


in_flight = pytest.mark.parametrize("in_flight", ["finish", "bank"])


def test_nothing_is_ever_stale() -> None:
    run = offbeat.run(lambda: quadratic(NB(4), 24), "two-slow-of-eight")
    for seen in run.results:
        assert seen.stats.rounds > 5
        assert seen.stats.staleness == {0: seen.stats.rounds}


def test_banking_loses_nothing_and_only_what_was_banked_is_one_round_old() -> None:
    lines: list[Line] = []
    run = offbeat.run(
        lambda: quadratic(NB(4, "bank"), 24), "two-slow-of-eight", records=lines.append
    )
    for seen in run.results:
        assert set(seen.stats.staleness) == {0, 1}
        assert seen.stats.dropped_samples == 0
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    assert len(rounds) > 5
    # At most one micro-batch of each worker but the one that called it.
    assert all(line["mean_staleness_rounds"] * line["samples"] <= 7 + 1e-6 for line in rounds)


@in_flight
def test_a_batch_of_one_micro_batch_is_called_by_whoever_has_it_first(in_flight: Any) -> None:
    rounds = _sizes(NB(1, in_flight), (6, 2), 1.0, 0.3)
    assert len(rounds) >= 3
    assert sum(samples for samples, _ in rounds) == 8


@in_flight
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_alone_it_is_plain_sgd(in_flight: Any, micro_batches: int) -> None:
    ours, theirs = (
        offbeat.run(lambda: train(6, algorithm), Cluster.uniform(1)).results[0][0]  # noqa: B023
        for algorithm in (NB(micro_batches, in_flight), offbeat.SyncSGD(micro_batches))
    )
    assert all(same(mine, expected) for mine, expected in zip(ours, theirs, strict=True))
    if micro_batches == 1:
        assert all(same(mine, each) for mine, each in zip(ours, plain(1, 6), strict=True))


@pytest.mark.slow
@in_flight
@pytest.mark.parametrize("workers", [2, 4])
def test_at_equal_speeds_every_round_has_every_micro_batch_and_is_synchronous(
    in_flight: Any, workers: int
) -> None:
    ours, theirs = (
        offbeat.run(
            lambda: train(12, algorithm),  # noqa: B023
            _cluster(*[1.0] * workers),
        ).results
        for algorithm in (NB(4, in_flight), offbeat.SyncSGD(4))
    )
    for (mine, stats), (expected, _) in zip(ours, theirs, strict=True):
        assert [round.samples for round in stats.history] == [4 * workers] * 3
        assert stats.dropped_samples == 0
        assert close(mine[-1], expected[-1])


def test_half_the_speed_brings_half_of_the_batch() -> None:
    # 8 and 4. When the fast one calls, the slow one finishes its fourth.
    assert _sizes(NB(8), (24, 12), 1.0, 1 / 2.1) == [
        (12, pytest.approx(8.4)),
        (12, pytest.approx(16.8)),
        (12, pytest.approx(25.2)),
    ]


def test_only_the_fast_one_calls() -> None:
    # Batches of three: 1 s and 1.6 s each. The fast one calls at 3; the slow one gives 2 at 3.2.
    anew = _sizes(NB(3), (9, 6), 1.0, 1 / 1.6)
    assert [samples for samples, _ in anew] == [5, 5, 5]
    assert [ended for _, ended in anew] == pytest.approx([3.2, 6.4, 9.6])


def test_the_exchange_comes_after_the_fastest_workers_batch() -> None:
    cluster = Cluster.parse(
        "workers = 3\nspeed = [1.0, 0.6, 0.3]\n[compute]\nstep_s = 1.0\n"
        "[network]\nlatency_s = 0.02\ncontrol_latency_s = 0.01"
    )
    lines: list[Line] = []
    steps = (12, 9, 9)
    offbeat.run(
        lambda: quadratic(NB(4, "bank"), steps[offbeat.rank()]), cluster, records=lines.append
    )
    own = [line for line in lines if line["rank"] == 0]
    called = [line["to_s"] for line in own if line["kind"] == "compute"][3]
    first = next(line for line in own if line["kind"] == "round")
    # One way to the store, one back; then recursive doubling among three, twice the latency.
    assert first["from_s"] - called == pytest.approx(0.02)
    assert first["to_s"] - first["from_s"] == pytest.approx(0.04)


def test_two_that_finish_together_make_one_round() -> None:
    rounds = _sizes(NB(2), (4, 4, 2), 1.0, 1.0, 0.4)
    assert rounds == [(5, 2.5), (5, 5.0)]


def test_whoever_has_nothing_finished_sends_nothing_and_nobody_hangs() -> None:
    rounds = _sizes(NB(2, "bank"), (8, 2), 1.0, 0.1)
    assert rounds[0] == (2, 2.0)


@pytest.mark.slow
@in_flight
def test_a_run_resumes_bit_for_bit(in_flight: Any) -> None:
    resumes_bit_for_bit(NB(3, in_flight), _cluster(1.0, 0.7, 0.4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number above 0, got 0"),
        ({"micro_batches": float("nan")}, "micro_batches must be a whole number above 0, got nan"),
        ({"in_flight": "wait"}, "in_flight must be one of 'finish', 'bank', got 'wait'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NB(**settings)
