"""DropCompute: the choice of the threshold, and rounds that keep it, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf
from random import Random
from statistics import fmean
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, train
from test_abs import quadratic, resumes_bit_for_bit

import offbeat
from offbeat.algorithms.dropcompute import (
    best_threshold,
    effective_speedup,
    expected_kept,
    expected_round_s,
    expected_speedup,
    whole_rounds,
)
from offbeat.clusters import Cluster
from offbeat.records import Line

DC = offbeat.DropCompute
NOISY = Cluster.parse(
    """
    workers = 4
    [compute]
    step_s = 1.0
    [[noise]]
    kind = "exponential"
    scale = 0.5
    [network]
    latency_s = 1e-3
    """
)


def _thresholds(algorithm: offbeat.Algorithm, steps: int, cluster: Cluster, seed: int = 0) -> Any:
    """By rank: the threshold after every step, and the stats."""

    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        with offbeat.attach(model, opt, algorithm) as dp:
            for step in range(steps):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                seen.append((dp.round, dp._replica.memory["threshold_s"]))
        return seen, dp.stats()

    return offbeat.run(worker, cluster, seed=seed).results


# --- the model -----------------------------------------------------------------------------


def test_the_effective_speed_up_by_hand() -> None:
    times = [[[1.0, 2.0]], [[1.0, 4.0]]]
    # Three of four micro-batches in half of the time.
    assert effective_speedup(times, 2.0 + 1e-9) == pytest.approx(1.5)
    assert effective_speedup(times, 5.0) == 1.0
    # The micro-batch that passes the threshold is computed to its end: nothing is gained.
    assert effective_speedup(times, 2.0 + 1e-9, completes=True) == 1.0
    # At 0.5 each completes one: half of the micro-batches in a quarter of the time.
    assert effective_speedup(times, 0.5, completes=True) == 2.0
    assert effective_speedup(times, 0.5, serial_s=1.0, completes=True) == 0.5 * 5 / 2


@pytest.mark.parametrize(
    ("workers", "sd_s", "round_s", "best_s", "speedup", "kept"),
    [
        (16, 0.05, 5.712, 5.500, 1.0121, 0.977),
        (64, 0.05, 5.810, 5.498, 1.0287, 0.976),
        (200, 0.05, 5.879, 5.487, 1.0403, 0.974),
        (64, 0.15, 6.631, 4.928, 1.1550, 0.871),
        (200, 0.20, 7.316, 4.695, 1.2651, 0.830),
    ],
)
def test_the_analytic_table_for_normal_times(
    workers: int, sd_s: float, round_s: float, best_s: float, speedup: float, kept: float
) -> None:
    def gain(tau: float) -> float:
        return expected_speedup(tau, workers, 12, 0.45, sd_s, serial_s=0.3)

    assert expected_round_s(workers, 12, 0.45, sd_s) == pytest.approx(round_s, abs=5e-4)
    grid = [2.7 + 0.001 * step for step in range(int((round_s - 2.7) / 0.001))]
    best = max(grid, key=gain)
    assert best == pytest.approx(best_s, abs=0.015)
    assert gain(best) == pytest.approx(speedup, abs=1e-3)
    assert expected_kept(best_s, 12, 0.45, sd_s) / 12 == pytest.approx(kept, abs=1e-3)


def _normal(workers: int, rounds: int, micro_batches: int, sd_s: float) -> list[Any]:
    draw = Random(1)
    times = []
    for _ in range(workers):
        ends = []
        for _ in range(rounds):
            at_s = 0.0
            ends.append([at_s := at_s + draw.gauss(0.45, sd_s) for _ in range(micro_batches)])
        times.append(ends)
    return times


@pytest.mark.slow
def test_drawn_times_agree_with_the_analytic_ones() -> None:
    times = _normal(64, 60, 12, 0.15)
    round_s = fmean(max(ends[-1] for ends in workers) for workers in zip(*times, strict=True))
    assert round_s == pytest.approx(expected_round_s(64, 12, 0.45, 0.15), rel=0.01)
    gain = effective_speedup(times, 4.928, serial_s=0.3)
    assert gain == pytest.approx(1.155, rel=0.01)
    assert effective_speedup(times, best_threshold(times, 0.3), 0.3) >= gain - 1e-3


def test_where_nothing_is_gained_there_is_no_threshold() -> None:
    steady = [[[1.0, 2.0, 3.0]] * 5] * 4
    assert best_threshold(steady, serial_s=0.5) == inf
    assert best_threshold(steady, serial_s=0.5, completes=True) == inf


def test_micro_batches_that_were_not_begun_take_as_long_as_others_did() -> None:
    assert whole_rounds([[1.0, 3.0], [2.0]], 3) == [[1.0, 3.0, 4.0], [2.0, 4.0, 6.0]]
    assert whole_rounds([[], []], 2) == [[0.0, 0.0], [0.0, 0.0]]


# --- rounds --------------------------------------------------------------------------------


def test_without_a_threshold_it_is_synchronous_sgd_bit_for_bit() -> None:
    ours, theirs = (
        offbeat.run(lambda: train(13, algorithm), NOISY).results  # noqa: B023
        for algorithm in (DC(4, threshold_s=inf), offbeat.SyncSGD(4))
    )
    for (mine, _), (expected, _) in zip(ours, theirs, strict=True):
        assert all(same(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("bank", [False, True])
def test_a_tiny_threshold_leaves_one_micro_batch_each(bank: bool) -> None:
    algorithm = DC(4, threshold_s=1e-9, bank=bank)
    results = offbeat.run(lambda: quadratic(algorithm, 6), NOISY).results
    for seen in results:
        assert seen.stats.dropped_samples == 0
        assert [round.samples for round in seen.stats.history] == [4] * 6


@pytest.mark.parametrize("threshold_s", [2.0, 3.5, 5.0])
def test_a_round_ends_one_micro_batch_after_the_threshold(threshold_s: float) -> None:
    lines: list[Line] = []
    offbeat.run(lambda: quadratic(DC(6, threshold_s=threshold_s), 30), NOISY, records=lines.append)
    longest = max(line["to_s"] - line["from_s"] for line in lines if line["kind"] == "compute")
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    applied = [line["at_s"] for line in rounds]
    assert len(rounds) > 5
    assert {line["samples"] for line in rounds} != {24.0}  # some were dropped
    exchange = max(line["to_s"] - line["from_s"] for line in rounds) + 4e-3
    for before, after in itertools.pairwise(applied):
        assert after - before <= threshold_s + longest + exchange


def test_micro_batches_that_were_not_begun_stay_in_the_loader() -> None:
    def worker() -> Any:
        consumed = []
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, opt, DC(6, threshold_s=2.0)) as dp:
            for item in range(20):
                consumed.append(item)
                opt.zero_grad()
                loss(model, offbeat.rank(), item).backward()
                opt.step()
        return consumed, dp.stats()

    for consumed, stats in offbeat.run(worker, NOISY).results:
        assert consumed == list(range(20))
        assert stats.applied_samples == 20
        assert stats.dropped_samples == 0
        assert stats.rounds > 20 / 6


def _halved(normalise: Any) -> Any:
    """Two workers of four micro-batches; the second stops after two: the gradient used."""

    def worker() -> Any:
        model = net()
        start = parameters(model)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, opt, DC(4, threshold_s=3.5, normalise=normalise)) as dp:
            for step in range(4 if offbeat.rank() == 0 else 2):
                opt.zero_grad()
                dp.samples(4)
                loss(model, offbeat.rank(), step).backward()
                opt.step()
            assert dp.round == 1
        return [before - after for before, after in zip(start, parameters(model), strict=True)]

    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.5]\n[compute]\nstep_s = 1.0")
    return offbeat.run(worker, cluster).results[0]


@pytest.mark.parametrize(("normalise", "divisor"), [("constant", 2 * 4), ("samples", 4 + 2)])
def test_both_ways_to_normalise_what_was_dropped(normalise: str, divisor: int) -> None:
    model = net()
    for rank, count in enumerate((4, 2)):
        for step in range(count):
            (loss(model, rank, step) / divisor).backward()
    for mine, parameter in zip(_halved(normalise), model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)


def test_a_worker_without_data_does_not_make_up_for_what_another_has_dropped() -> None:
    def worker() -> Any:
        model = net()
        start = parameters(model)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, opt, DC(4, threshold_s=3.5, normalise="constant")):
            for step in range(4 if offbeat.rank() == 0 else 2):
                opt.zero_grad()
                if offbeat.rank() == 1:
                    loss(model, 1, step).backward()
                opt.step()
        return [before - after for before, after in zip(start, parameters(model), strict=True)]

    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.5]\n[compute]\nstep_s = 1.0")
    model = net()
    for step in range(2):
        (loss(model, 1, step) / 4).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for mine, gradient in zip(offbeat.run(worker, cluster).results[0], expected, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-5, atol=1e-7)


# --- the automatic threshold ---------------------------------------------------------------


def test_all_workers_hold_the_same_automatic_threshold() -> None:
    results = _thresholds(DC(6, window_rounds=8), 100, NOISY)
    by_round = [dict(seen) for seen, _ in results]
    chosen = [tau for tau in by_round[0].values() if tau < inf]
    assert chosen
    for mine in by_round[1:]:
        common = sorted(set(mine) & set(by_round[0]))
        assert len(common) > 10
        assert all(mine[round] == by_round[0][round] for round in common)
    assert all(tau == inf for round, tau in by_round[0].items() if round < 8)


@pytest.mark.parametrize("bank", [False, True])
def test_choosing_a_threshold_is_on_nobodys_clock(bank: bool) -> None:
    def worker() -> list[float]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        with offbeat.attach(model, opt, DC(3, window_rounds=2, bank=bank)) as dp:
            for step in range(18):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                seen += dp._replica.memory["clock"][-1:]
        return seen

    cluster = Cluster.parse("workers = 2\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 0.5")
    for seen in offbeat.run(worker, cluster).results:
        assert seen == pytest.approx([1.0, 2.0] * 6)


@pytest.mark.slow
def test_the_threshold_is_chosen_again_after_a_change_of_speeds() -> None:
    cluster = Cluster.parse(
        """
        workers = 4
        [compute]
        step_s = 1.0
        [[noise]]
        kind = "exponential"
        scale = 0.5
        [[event]]
        kind = "slow"
        workers = [0, 1, 2, 3]
        factor = 3
        from_s = 150
        """
    )
    seen = _thresholds(DC(6, window_rounds=8), 150, cluster)[0][0]
    taus = [tau for _, tau in seen if tau < inf]
    assert max(taus) > 2 * min(taus)
    assert taus.index(max(taus)) > taus.index(min(taus))


def _rate(algorithm: Callable[[], offbeat.Algorithm], steps: int = 180) -> float:
    """Samples per virtual second on DropCompute's delay environment, 16 workers."""
    lines: list[Line] = []
    cluster = Cluster.load("dropcompute-64").resized(16)
    offbeat.run(lambda: quadratic(algorithm(), steps), cluster, records=lines.append)
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    settled = [line for line in rounds if line["round"] >= 6 and line["workers"] == 16]
    assert len(settled) > 5
    samples = sum(line["samples"] for line in settled[1:])
    return float(samples / (settled[-1]["at_s"] - settled[0]["at_s"]))


@pytest.mark.slow
def test_in_its_own_environment_the_automatic_threshold_gains() -> None:
    without = _rate(lambda: DC(12, threshold_s=inf))
    cut = _rate(lambda: DC(12, window_rounds=5))
    banked = _rate(lambda: DC(12, window_rounds=5, bank=True))
    assert cut > 1.05 * without
    assert banked > 0.98 * cut


def test_banking_keeps_everything_and_only_the_banked_part_is_stale() -> None:
    results, rounds = _recorded(DC(6, threshold_s=4.0, bank=True))
    for seen in results:
        assert seen.conserved
        assert seen.stats.applied_samples == 40
        assert max(seen.stats.staleness) == 1
    assert all(line["mean_staleness_rounds"] * line["samples"] <= 4 + 1e-6 for line in rounds)
    assert _between(rounds) < _between(_recorded(DC(6, threshold_s=4.0))[1])


def test_with_a_banked_micro_batch_a_round_does_not_wait_for_the_next_one_either() -> None:
    # Micro-batches of 1.0 and 1.5 s. At 2.1 the slow one has one and banks its second, which ends
    # at 3.0; at 4.2 it has that one, and banks its third, which ends at 4.5; at 6.3 that one and
    # the fourth, and it banks the fifth.
    lines: list[Line] = []
    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.666667]\n[compute]\nstep_s = 1.0")
    results = offbeat.run(
        lambda: quadratic(DC(4, threshold_s=2.1, bank=True), 15 - 5 * offbeat.rank()),
        cluster,
        records=lines.append,
    ).results
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    assert [line["to_s"] for line in rounds[:4]] == pytest.approx([2.1, 4.2, 6.3, 8.4])
    assert [line["samples"] for line in rounds[:4]] == [3, 3, 4, 3]
    for seen in results:
        assert seen.conserved
        assert seen.stats.pending_samples == 0
        assert max(seen.stats.staleness) == 1


def _recorded(algorithm: offbeat.Algorithm) -> tuple[list[Any], list[Line]]:
    """What workers have seen, and the rounds of all four, as worker 0 applied them."""
    lines: list[Line] = []
    results = offbeat.run(lambda: quadratic(algorithm, 40), NOISY, records=lines.append).results
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    return results, [line for line in rounds if line["workers"] == 4]


def _between(rounds: list[Line]) -> float:
    """Seconds from one round to the next, on average."""
    return float(rounds[-1]["at_s"] - rounds[0]["at_s"]) / (len(rounds) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"threshold_s": 3.0},
        {"threshold_s": 3.0, "bank": True},
        {"window_rounds": 2},
        {"threshold_s": 3.0, "normalise": "constant"},
    ],
)
def test_a_run_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    cluster = Cluster.parse(
        "workers = 3\nspeed = [1.0, 0.7, 0.4]\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 1e-3"
    )
    resumes_bit_for_bit(DC(3, **settings), cluster)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches must be a whole number above 0, got 0"),
        ({"micro_batches": 2.5}, "micro_batches must be a whole number above 0, got 2.5"),
        ({"bank": "no"}, "bank must be True or False, got 'no'"),
        ({"window_rounds": 0}, "window_rounds must be a whole number above 0, got 0"),
        ({"window_rounds": float("nan")}, "window_rounds must be a whole number above 0, got nan"),
        ({"threshold_s": None}, 'threshold_s must be seconds or "auto", got None'),
        ({"threshold_s": "slow"}, "threshold_s must be seconds or \"auto\", got 'slow'"),
        ({"threshold_s": 0.0}, "threshold_s must be above 0, got 0.0: every worker completes"),
        ({"threshold_s": -1.0}, "threshold_s must be above 0, got -1.0"),
        ({"threshold_s": float("nan")}, "threshold_s must be above 0, got nan"),
        ({"normalise": "mean"}, "normalise must be samples or constant, got 'mean'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DC(**settings)
