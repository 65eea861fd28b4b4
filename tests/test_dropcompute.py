"""DropCompute: the choice of the threshold, and rounds that keep it, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import e, inf, sqrt
from random import Random
from statistics import NormalDist, fmean
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, train
from test_abs import quadratic, resumes_bit_for_bit

import offbeat
from offbeat.clusters import Cluster
from offbeat.records import Line
from offbeat.thresholds import (
    best_threshold,
    chosen_threshold,
    effective_speedup,
    whole_rounds,
)

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


def expected_round_s(workers: int, micro_batches: int, mean_s: float, sd_s: float) -> float:
    """E[T]: the slowest of so many sums of normal times, by the extreme-value mean."""
    gamma, quantile = 0.5772156649, NormalDist().inv_cdf
    extreme = (1 - gamma) * quantile(1 - 1 / workers) + gamma * quantile(1 - 1 / (e * workers))
    return micro_batches * mean_s + sqrt(micro_batches) * sd_s * extreme


def expected_kept(threshold_s: float, micro_batches: int, mean_s: float, sd_s: float) -> float:
    """E[M~]: how many micro-batches a worker completes before the threshold."""
    below = NormalDist().cdf
    return sum(
        below((threshold_s - m * mean_s) / (sd_s * sqrt(m))) for m in range(1, micro_batches + 1)
    )


def expected_speedup(
    threshold_s: float,
    workers: int,
    micro_batches: int,
    mean_s: float,
    sd_s: float,
    serial_s: float = 0.0,
) -> float:
    """E[S_eff] for normal times; under-estimates what heavy tails give."""
    whole_s = expected_round_s(workers, micro_batches, mean_s, sd_s)
    kept = expected_kept(threshold_s, micro_batches, mean_s, sd_s) / micro_batches
    return kept * (whole_s + serial_s) / (min(threshold_s, whole_s) + serial_s)


def test_the_effective_speed_up_by_hand() -> None:
    times = [[[1.0, 2.0]], [[1.0, 4.0]]]
    # Three of four micro-batches in half of the time.
    assert effective_speedup(times, 2.0 + 1e-9, completes=False) == pytest.approx(1.5)
    assert effective_speedup(times, 5.0, completes=False) == 1.0
    # The micro-batch that passes the threshold is computed to its end: nothing is gained.
    assert effective_speedup(times, 2.0 + 1e-9) == 1.0
    # At 0.5 each completes one: half of the micro-batches in a quarter of the time.
    assert effective_speedup(times, 0.5) == 2.0
    assert effective_speedup(times, 0.5, serial_s=1.0) == 0.5 * 5 / 2


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
    gain = effective_speedup(times, 4.928, serial_s=0.3, completes=False)
    assert gain == pytest.approx(1.155, rel=0.01)
    best_s = best_threshold(times, 0.3, completes=False)
    assert effective_speedup(times, best_s, 0.3, completes=False) >= gain - 1e-3


def test_where_nothing_is_gained_there_is_no_threshold() -> None:
    steady = [[[1.0, 2.0, 3.0]] * 5] * 4
    assert best_threshold(steady, serial_s=0.5) == inf
    assert best_threshold(steady, serial_s=0.5, completes=False) == inf


def test_micro_batches_that_were_not_begun_take_as_long_as_others_did() -> None:
    assert whole_rounds([[1.0, 3.0], [2.0]], 3) == [[1.0, 3.0, 4.0], [2.0, 4.0, 6.0]]
    assert whole_rounds([[], []], 2) == [[0.0, 0.0], [0.0, 0.0]]


def test_the_start_up_is_in_no_window() -> None:
    """The first round takes ten times as long on one worker, before and after resuming."""
    draw = Random(2)

    def times(slow: float) -> list[list[list[float]]]:
        tables = []
        for worker in range(4):
            rounds = []
            for number in range(12):
                ends, at_s = [], 0.0
                for micro_batch in range(6):
                    first = number == micro_batch == worker == 0
                    at_s += draw.expovariate(1.0) + 0.5 + slow * first
                    ends.append(at_s)
                rounds.append([0.0, *ends])
            tables.append(rounds)
        for rows in zip(*tables, strict=True):
            for row in rows:
                row[0] = max(each[-1] for each in rows) + 0.3
        return tables

    state = draw.getstate()
    chosen = []
    for slow in (20.0, 100.0, 1000.0):
        draw.setstate(state)
        chosen.append(chosen_threshold(times(slow)))
    assert chosen[0] == chosen[1] == chosen[2] < 12


def test_whoever_has_left_has_no_say_in_the_threshold() -> None:
    here = [[[10.1, 1.0, 2.0, 3.0, 4.0]] * 2, [[10.1, 1.0, 4.0, 7.0, 10.0]] * 2]
    left = [[[99.0, 0.0, 0.0, 0.0, 0.0]] * 2]
    assert chosen_threshold(here) == chosen_threshold(here + left) < inf
    assert chosen_threshold(left) == inf
    # Only the round that does not count has times.
    assert chosen_threshold([[[9.0, 1.0, 8.0], [0.1, 0.0, 0.0]]]) == inf


# --- rounds --------------------------------------------------------------------------------


def test_without_a_threshold_it_is_synchronous_sgd_bit_for_bit() -> None:
    ours, theirs = (
        offbeat.run(lambda: train(13, algorithm), NOISY).results  # noqa: B023
        for algorithm in (DC(4, threshold_s=inf), offbeat.SyncSGD(4))
    )
    for (mine, _), (expected, _) in zip(ours, theirs, strict=True):
        assert all(same(a, b) for a, b in zip(mine, expected, strict=True))


def test_a_tiny_threshold_leaves_one_micro_batch_each() -> None:
    algorithm = DC(4, threshold_s=1e-9)
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


def test_the_share_that_is_left_out_is_counted_and_a_rest_at_the_end_is_none() -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, opt, DC(4, threshold_s=3.5)) as dp:
            for step in range(13 if offbeat.rank() == 0 else 7):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return dp.stats().rounds, dp.stats().dropped_share

    # Four and two micro-batches of four each, three times, and one of each in the end.
    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.5]\n[compute]\nstep_s = 1.0")
    assert offbeat.run(worker, cluster).results == [(4, pytest.approx(0.25))] * 2


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


def test_choosing_a_threshold_is_on_nobodys_clock() -> None:
    def worker() -> list[float]:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        with offbeat.attach(model, opt, DC(3, window_rounds=2)) as dp:
            for step in range(18):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                seen += dp._replica.own["clock"][-1:]
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
    assert cut > 1.05 * without


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"threshold_s": 3.0},
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
        ({"window_rounds": 0}, "window_rounds must be a whole number above 0, got 0"),
        ({"window_rounds": float("nan")}, "window_rounds must be a whole number above 0, got nan"),
        ({"threshold_s": None}, 'threshold_s must be seconds or "auto", got None'),
        ({"threshold_s": "slow"}, "threshold_s must be seconds or \"auto\", got 'slow'"),
        ({"threshold_s": 0.0}, "threshold_s must be above 0, got 0.0: every worker completes"),
        ({"threshold_s": -1.0}, "threshold_s must be above 0, got -1.0"),
        ({"threshold_s": float("nan")}, "threshold_s must be above 0, got nan"),
        ({"normalise": "mean"}, "normalise must be one of 'samples', 'constant', got 'mean'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DC(**settings)
