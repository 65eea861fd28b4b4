"""Theory as code: the papers' table to the digits printed, and what must hold of any workers."""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import Cluster, theory
from offbeat.theory import Power

ROOT = Path(__file__).parents[1]
Tau = Callable[[int], float]

PROFILES: dict[str, Tau] = {
    "1": lambda i: 1.0,
    "sqrt i": lambda i: math.sqrt(i),
    "i": lambda i: float(i),
    "i^2": lambda i: float(i * i),
}
SECONDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40)
NOISE = st.floats(0.0, 1e4)
CLOSE = 1 + 1e-12


def workers(tau: Tau, n: int) -> list[float]:
    """Their seconds a gradient, in no order."""
    seconds = [tau(i) for i in range(1, n + 1)]
    Random(0).shuffle(seconds)
    return seconds


# --- fixed speeds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "optimal", "m_opt", "m_sync", "m", "sync", "asynchronous"),
    [
        ("1", 1.1, 1000, 1.1, 1000, 1.1, 1.1),
        ("sqrt i", 10.7318, 115, 20.0, 100, 34.7851, 17.7991),
        ("i", 32.5244, 32, 101.0, 1, 1100.0, 146.9513),
        ("i^2", 70.7074, 8, 101.0, 1, 1.1e6, 669.1264),
    ],
)
def test_the_times_are_those_of_the_table(
    profile: str,
    optimal: float,
    m_opt: int,
    m_sync: float,
    m: int,
    sync: float,
    asynchronous: float,
) -> None:
    seconds = workers(PROFILES[profile], 1000)
    best = theory.optimal_time(seconds, noise=100)
    assert best == (pytest.approx(optimal, abs=5e-5), m_opt)
    assert theory.m_sync_time(seconds, noise=100) == pytest.approx(m_sync, rel=1e-12)
    assert theory.best_m(seconds, noise=100) == m
    assert theory.sync_time(seconds, noise=100) == pytest.approx(sync, abs=5e-5)
    assert theory.async_time(seconds, noise=100) == pytest.approx(asynchronous, abs=5e-5)


@settings(deadline=None)
@given(SECONDS, NOISE)
def test_the_best_m_is_within_the_harmonic_number_of_the_optimum(
    seconds: list[float], noise: float
) -> None:
    best, m_sync = theory.optimal_time(seconds, noise), theory.m_sync_time(seconds, noise)
    bound = theory.harmonic_number(len(seconds))
    assert best.time_s <= m_sync * CLOSE
    assert m_sync <= bound * best.time_s * CLOSE
    assert bound <= (1 + math.log(len(seconds))) * CLOSE


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 30)), min_size=1, max_size=4), NOISE)
def test_the_best_m_costs_at_most_as_many_times_the_optimum_as_there_are_speeds(
    groups: list[tuple[float, int]], noise: float
) -> None:
    seconds = [tau for tau, size in groups for _ in range(size)]
    optimal = theory.optimal_time(seconds, noise).time_s
    assert theory.m_sync_time(seconds, noise) <= len(set(seconds)) * optimal * CLOSE


@pytest.mark.parametrize("noise", [0.0, 1.0, 1e4])
def test_one_worker_alone_is_optimal_by_any_method(noise: float) -> None:
    times = (theory.m_sync_time, theory.sync_time, theory.async_time, theory.heterogeneous_time)
    assert {time([3.0], noise) for time in times} == {3.0 * (1 + noise)}
    assert theory.optimal_time([3.0], noise) == (3.0 * (1 + noise), 1)


@pytest.mark.parametrize(
    ("n", "ratio", "bound"),
    [
        (10, 1.96, 2.93),
        (100, 3.34, 5.19),
        (1000, 5.08, 7.49),
        (10_000, 7.00, 9.79),
        (100_000, 9.01, 12.09),
    ],
)
def test_there_are_workers_for_whom_the_best_m_is_far_from_the_optimum(
    n: int, ratio: float, bound: float
) -> None:
    seconds = workers(lambda i: i / (i + n), n)
    found = theory.m_sync_time(seconds, n) / theory.optimal_time(seconds, n).time_s
    assert found == pytest.approx(ratio, abs=0.005)
    assert theory.harmonic_number(n) == pytest.approx(bound, abs=0.005)


def test_workers_each_slower_than_the_last_are_nearly_as_bad() -> None:
    seconds = workers(PROFILES["i"], 100_000)
    ratio = theory.m_sync_time(seconds, 1e5) / theory.optimal_time(seconds, 1e5).time_s
    assert ratio == pytest.approx(8.90, abs=0.005)


@settings(deadline=None)
@given(SECONDS, NOISE, st.floats(1e-3, 1e3))
def test_one_more_worker_never_harms_who_may_leave_it_out(
    seconds: list[float], noise: float, another: float
) -> None:
    more = [*seconds, another]
    before, after = theory.optimal_time(seconds, noise), theory.optimal_time(more, noise)
    assert after.time_s <= before.time_s * CLOSE
    assert theory.m_sync_time(more, noise) <= theory.m_sync_time(seconds, noise) * CLOSE


@settings(deadline=None)
@given(SECONDS, NOISE)
def test_no_method_is_faster_than_the_optimum_and_synchronous_is_the_slowest(
    seconds: list[float], noise: float
) -> None:
    best, sync = theory.optimal_time(seconds, noise), theory.sync_time(seconds, noise)
    assert best.time_s <= theory.async_time(seconds, noise) * CLOSE
    assert theory.async_time(seconds, noise) <= sync * CLOSE
    assert best.time_s <= theory.heterogeneous_time(seconds, noise) * CLOSE
    assert theory.heterogeneous_time(seconds, noise) <= sync * CLOSE


@settings(deadline=None)
@given(SECONDS, NOISE)
def test_the_m_of_the_optimum_is_where_it_is_reached(seconds: list[float], noise: float) -> None:
    best = theory.optimal_time(seconds, noise)
    ordered = sorted(seconds)
    for m in range(1, len(seconds) + 1):
        time_s = theory.harmonic_mean(seconds, m) * (1 + noise / m)
        assert best.time_s <= time_s * CLOSE
        assert theory.harmonic_mean(seconds, m) <= ordered[m - 1] * CLOSE
        if m == best.m:  # plain asynchronous on these alone
            assert best.time_s == pytest.approx(time_s, rel=1e-12)
            assert theory.async_time(ordered[:m], noise) == pytest.approx(time_s, rel=1e-12)


def test_a_worker_that_never_answers_holds_up_only_who_waits_for_it() -> None:
    seconds = [1.0, 1.0, math.inf]
    assert theory.optimal_time(seconds, 2.0) == (2.0, 2)
    assert theory.m_sync_time(seconds, 2.0) == 2.0
    assert theory.sync_time(seconds, 2.0) == theory.heterogeneous_time(seconds, 2.0) == math.inf


@pytest.mark.parametrize(("n", "m"), [(1, 1), (8, 1), (8, 6), (8, 8)])
def test_a_round_of_exponential_workers_takes_the_mean_of_an_order_statistic(
    n: int, m: int
) -> None:
    draw = Random(n + m)
    rounds = [sorted(draw.expovariate(1.0) for _ in range(n))[m - 1] for _ in range(40_000)]
    assert theory.exponential_round_time(n, m) == pytest.approx(fmean(rounds), rel=0.02)


# --- Ringmaster ASGD, simulated ------------------------------------------------------------


def moments_of_updates(
    limit: int, updates: int, ends: Callable[[int, float], float], n: int
) -> list[float]:
    """When Ringmaster ASGD that interrupts makes its updates; the first moment is 0.

    `ends` says when a worker that begins a gradient at a moment has it.
    """
    moments, begun, tokens = [0.0], [0] * n, [0] * n
    coming = [(ends(rank, 0.0), rank, 0) for rank in range(n)]
    heapq.heapify(coming)
    while len(moments) <= updates:
        now, rank, token = heapq.heappop(coming)
        if token != tokens[rank]:
            continue  # interrupted
        moments.append(now)
        version = len(moments) - 1
        stale = [each for each in range(n) if begun[each] == version - limit]
        for each in {rank, *stale}:
            begun[each], tokens[each] = version, tokens[each] + 1
            heapq.heappush(coming, (ends(each, now), each, tokens[each]))
    return moments


def longest_of(seconds: Sequence[float], limit: int) -> float:
    """The longest that any so many updates in a row have taken."""
    moments = moments_of_updates(
        limit, 15 * limit, lambda rank, now: now + seconds[rank], len(seconds)
    )
    return max(b - a for a, b in zip(moments, moments[limit:], strict=False))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("limit", [1, 10, 50])
def test_so_many_updates_never_take_longer_than_their_time(profile: str, limit: int) -> None:
    seconds = workers(PROFILES[profile], 50)
    bound = theory.updates_time(seconds, limit)
    assert bound / 10 < longest_of(seconds, limit) <= bound * CLOSE


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=8), st.integers(1, 12))
def test_so_many_updates_of_any_workers_never_take_longer_than_their_time(
    seconds: list[float], limit: int
) -> None:
    assert longest_of(seconds, limit) <= theory.updates_time(seconds, limit) * CLOSE


def test_they_can_take_longer_than_half_their_time() -> None:
    """So the 2 in it is needed: updates that come one after the other interrupt nearly everyone."""
    seconds = [0.91, 1.0, 1.0, 1.01, 1.2, 2.0, 3.67, 5.0]
    assert longest_of(seconds, 2) > 1.2 * theory.updates_time(seconds, 2) / 2


def random_power(draw: Random) -> list[tuple[float, float]]:
    """A worker that changes its speed, and now and then pauses."""
    moment, power = 0.0, []
    for _ in range(30):
        power.append((moment, draw.choice([0.0, 0.2, 1.0, 5.0]) * draw.random()))
        moment += draw.expovariate(0.1)
    return [*power, (moment, 0.1)]


@pytest.mark.parametrize("seed", range(10))
def test_at_changing_speeds_updates_are_made_by_the_moments_of_the_recursion(seed: int) -> None:
    draw = Random(seed)
    powers, limit = [random_power(draw) for _ in range(6)], draw.choice([1, 3, 8])

    def ends(rank: int, begin: float) -> float:
        return gradient_end(powers[rank], begin)

    moments = moments_of_updates(limit, 8 * limit, ends, len(powers))
    bounds = theory.universal_times(powers, limit, rounds=8)
    assert all(a <= b for a, b in zip(moments[limit::limit], bounds, strict=True))


def gradient_end(power: Sequence[tuple[float, float]], begin: float) -> float:
    """When the integral over the power since `begin` is 1; in small steps of its own."""
    left, now = 1.0, begin
    for (_, speed), (until, _) in pairwise([*power, (math.inf, 0.0)]):
        if until <= now:
            continue
        if speed and left <= speed * (until - now):
            return now + left / speed
        left, now = left - speed * (until - now), until
    raise AssertionError("the last speed is above 0")


# --- changing speeds -----------------------------------------------------------------------


def test_rennala_has_six_gradients_when_three_workers_of_unlike_speed_have_computed_for_four() -> (
    None
):
    assert theory.universal_times([1.0, 0.5, 0.25], updates=6, rounds=3, share=1.0) == [4, 8, 12]


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12), st.integers(1, 40))
def test_at_fixed_speeds_a_round_of_the_recursion_is_the_optimum_up_to_two(
    seconds: list[float], updates: int
) -> None:
    optimal = theory.optimal_time(seconds, updates).time_s
    powers = [1 / tau for tau in seconds]
    [whole] = theory.universal_times(powers, updates, 1, share=1.0)
    [quarter] = theory.universal_times(powers, updates, 1)
    assert optimal / 2 <= whole * CLOSE
    assert whole <= optimal * CLOSE
    assert quarter == pytest.approx(4 * whole, rel=1e-9)


def test_m_synchronous_rounds_at_fixed_speeds_take_as_long_as_the_mth_fastest() -> None:
    powers = [1.0, 0.5, 0.25, 0.125]
    for m, tau in enumerate([1.0, 2.0, 4.0, 8.0], start=1):
        times = theory.universal_m_sync_times(powers, m, rounds=3)
        assert times == [tau, 2 * tau, 3 * tau]


def test_workers_that_take_turns_to_pause_harm_who_needs_them_both() -> None:
    """One computes in even stretches of 10 s, the other in odd ones, 10 gradients in each."""
    turns = [[(10.0 * i, float(i % 2 == first)) for i in range(100)] for first in (0, 1)]
    assert theory.universal_times(turns, updates=2, rounds=10, share=1.0)[-1] == 20.0
    assert theory.universal_m_sync_times(turns, m=2, rounds=3) == [11.0, 21.0, 31.0]


def test_a_power_means_the_same_however_it_is_given() -> None:
    constant: list[Power] = [0.5, [(0, 0.5)], [(0.0, 0.5), (3.0, 0.5)], lambda t: 0.5 * t]
    for power in constant:
        times = theory.universal_times([power, 1.0], updates=3, rounds=2)
        assert times == pytest.approx([8.0, 16.0], rel=1e-12)
    late: list[Power] = [[(5.0, 2.0)], lambda t: max(0.0, 2 * (t - 5))]
    for power in late:
        times = theory.universal_m_sync_times([power], m=1, rounds=2)
        assert times == pytest.approx([5.5, 6.0], rel=1e-12)


def test_what_is_never_computed_takes_for_ever() -> None:
    ending: list[Power] = [[(0.0, 1.0), (10.0, 0.0)], lambda t: min(t, 10.0)]
    for power in ending:
        assert theory.universal_times([power], updates=1, rounds=3) == [4.0, 8.0, math.inf]
        assert theory.universal_m_sync_times([power, 1.0], m=2, rounds=11)[-1] == math.inf
    far = theory.universal_times([1e-6], updates=1, rounds=1, horizon_s=1e6)
    assert far == [math.inf]


# --- limits and steps ----------------------------------------------------------------------


def test_limits_are_those_of_the_paper() -> None:
    assert [theory.staleness_limit(noise) for noise in (0.0, 1.0, 1.5, 100.0)] == [1, 1, 2, 100]
    seconds = workers(PROFILES["sqrt i"], 1000)  # m = 115
    assert theory.staleness_limit_by_speed(seconds, 100) == math.ceil(math.sqrt(115 * 100)) == 108
    assert theory.staleness_limit_by_speed(seconds, 0.0) == 1


@settings(deadline=None)
@given(SECONDS, st.floats(1.0, 1e3), st.integers(1, 1000))
def test_no_threshold_is_better_than_that_which_knows_speeds(
    seconds: list[float], noise: float, other: int
) -> None:
    """Of those for its m workers, and but for being whole."""
    m = theory.optimal_time(seconds, noise).m

    def cost(limit: float) -> float:
        return (1 + limit / m) * (1 + noise / limit)

    assert cost(max(1.0, math.sqrt(m * noise))) <= cost(other) * CLOSE
    chosen = theory.staleness_limit_by_speed(seconds, noise)
    assert chosen == max(1, math.ceil(math.sqrt(m * noise)))


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_steps_and_updates_are_those_of_the_papers(limit: int) -> None:
    smoothness, gap, variance, target = 3.0, 7.0, 2.0, 0.05
    noise, difficulty = variance / target, smoothness * gap / target
    r, lip, var, eps = limit, smoothness, variance, target
    by_noise = eps / (4 * lip * var)
    assert theory.ringmaster_step_size(r, noise, lip, "ringmaster") == pytest.approx(
        min(1 / (2 * r * lip), by_noise)
    )
    stale = [1 / (2 * (r - 1) * lip)] if r > 1 else []
    assert theory.ringmaster_step_size(r, noise, lip, "birch") == pytest.approx(
        min(1 / (2 * lip), *stale, by_noise)
    )
    scale = lip * gap / eps
    for analysis, k in (
        ("ringmaster", 8 * r * scale + 16 * var * lip * gap / eps**2),
        ("birch", 4 * r * scale + 8 * var * lip * gap / eps**2),
    ):
        found = theory.ringmaster_updates(r, noise, difficulty, analysis)
        assert k * (1 - 1e-12) <= found < k + 1


def mean_square(step: float, staleness: int, variance: float, updates: int, gap: float) -> float:
    """The mean of E |gradient|^2 over the updates, on x^2 / 2; every gradient is so stale.

    Exact: what is left of x_0, and of every update's noise.
    """
    start, noise = [math.sqrt(2 * gap)], [0.0, step]
    for k in range(updates):
        start.append(start[-1] - step * start[max(k - staleness, 0)])
        noise.append(noise[-1] - step * noise[max(len(noise) - 1 - staleness, 0)])
    total, seen = 0.0, 0.0
    for k in range(updates):
        seen += noise[k] ** 2 * variance
        total += start[k] ** 2 + seen
    return total / updates


@pytest.mark.parametrize("variance", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("analysis", ["ringmaster", "birch"])
def test_ringmaster_on_a_quadratic_is_at_its_target_after_so_many_updates(
    analysis: theory.Analysis, limit: int, variance: float
) -> None:
    target, gap = 0.05, 2.0
    noise, difficulty = variance / target, gap / target
    updates = theory.ringmaster_updates(limit, noise, difficulty, analysis)
    step = theory.ringmaster_step_size(limit, noise, analysis=analysis)
    assert mean_square(step, limit - 1, variance, updates, gap) <= target


@pytest.mark.parametrize("variance", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("m", [1, 3, 50])
def test_m_synchronous_on_a_quadratic_is_at_its_target_after_so_many_rounds(
    m: int, variance: float
) -> None:
    target, gap = 0.05, 2.0
    noise, difficulty = variance / target, gap / target
    rounds = theory.m_sync_rounds(m, noise, difficulty)
    step = theory.m_sync_step_size(m, noise)
    assert mean_square(step, 0, variance / m, rounds, gap) <= target


@settings(deadline=None)
@given(SECONDS, st.integers(1, 1000), st.floats(0.1, 1e4))
def test_ringmaster_needs_at_most_a_constant_times_the_optimum(
    seconds: list[float], noise: int, difficulty: float
) -> None:
    limit = theory.staleness_limit(noise)
    bound = theory.ringmaster_time(seconds, limit, noise, difficulty)
    rounds = math.ceil(12 * difficulty)
    assert bound <= 2 * rounds * theory.optimal_time(seconds, noise).time_s * 1.0001


# --- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: theory.optimal_time([], 1.0), "at least one worker must take finitely long"),
        (lambda: theory.sync_time([math.inf], 1.0), "at least one worker must take finitely long"),
        (lambda: theory.sync_time([1.0, 0.0], 1.0), "more than 0 s, got 0.0 for worker 1"),
        (lambda: theory.best_m([1.0, math.nan], 1.0), "got nan for worker 1"),
        (lambda: theory.best_m([1.0], -1.0), "noise must be finite and at least 0, got -1.0"),
        (lambda: theory.async_time([1.0], math.inf), "noise must be finite"),
        (lambda: theory.m_sync_time([1.0], 1.0, m=2), "m must be between 1 and the 1 workers"),
        (lambda: theory.exponential_round_time(3, 0), "m must be between 1 and the 3 workers"),
        (lambda: theory.harmonic_number(-1), "n must be 0 or more, got -1"),
        (lambda: theory.updates_time([1.0], 0), "updates must be at least 1, got 0"),
        (lambda: theory.ringmaster_step_size(0, 1.0), "limit must be at least 1, got 0"),
        (lambda: theory.ringmaster_step_size(1, 1.0, 0.0), "smoothness must be finite and above"),
        (lambda: theory.ringmaster_updates(1, 1.0, 1.0, "x"), 'must be "ringmaster" or "birch"'),
        (lambda: theory.ringleader_step_size([1, 0], 1.0), "every worker must have a gradient"),
        (lambda: theory.delay_adaptive_scale(0, 1), "workers must be at least 1, got 0"),
        (lambda: theory.delay_adaptive_scale(1, -1), "staleness must be 0 or more rounds, got -1"),
        (lambda: theory.universal_times([1.0], 0, 1), "updates must be at least 1, got 0"),
        (lambda: theory.universal_times([1.0], 1, 1, share=2.0), "share must be above 0"),
        (lambda: theory.universal_times([[(1, 1), (1, 2)]], 1, 1), "moments must ascend from 0 s"),
        (lambda: theory.universal_times([-1.0], 1, 1), "speeds must be finite and 0 or more"),
        (lambda: theory.universal_m_sync_times([1.0], 2, 1), "m must be between 1 and the 1"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        call()


# --- the page ------------------------------------------------------------------------------


def test_the_page_has_what_theory_says_of_the_clusters_that_it_names() -> None:
    text, cluster = (ROOT / "docs" / "theory.md").read_text(), ""
    rows = re.findall(r"^\| (?:`([\w-]+)`.*)? ?\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for name, noise, figures in rows:
        cluster = name or cluster
        seconds, s = [1 / speed for speed in Cluster.load(cluster).speeds], float(noise)
        best, m = theory.optimal_time(seconds, s).time_s, theory.best_m(seconds, s)
        times = (theory.sync_time, theory.m_sync_time, theory.async_time)
        sync, m_sync, plain = (f"{time(seconds, s) / best:.2f}" for time in times)
        assert figures == f"{sync} | {m_sync} ({m}) | {plain}", f"{cluster}, S = {noise}"


def test_the_figures_of_the_picture_are_those_of_theory() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "theory_curves.json").read_text())
    assert len(found["profiles"]) == len(PROFILES)
    for tau, profile in zip(PROFILES.values(), found["profiles"].values(), strict=True):
        times = profile["time_s"]
        for at, n in enumerate(profile["n"]):
            seconds, noise = workers(tau, n), found["noise"]
            expected = {
                "synchronous": theory.sync_time(seconds, noise),
                "plain asynchronous": theory.async_time(seconds, noise),
                "m-synchronous, best m": theory.m_sync_time(seconds, noise),
                "optimal": theory.optimal_time(seconds, noise).time_s,
            }
            assert {name: times[name][at] for name in times} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["theory.svg", "theory-dark.svg"])
def test_the_picture_says_how_many_workers_are_worth_having(name: str) -> None:
    texts = ElementTree.parse(ROOT / "docs" / name).iter("{http://www.w3.org/2000/svg}text")
    shown = ["".join(each.itertext()) for each in texts]
    for tau in PROFILES.values():
        seconds = workers(tau, 1000)
        for m in (theory.best_m(seconds, 100), theory.optimal_time(seconds, 100).m):
            assert f"m = {m:,}" in shown
