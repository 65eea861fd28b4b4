"""Cluster files: what they promise about costs, randomness and error messages."""

import pickle
import re
from itertools import combinations
from math import exp, inf, log
from pathlib import Path
from statistics import NormalDist, correlation, fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from offbeat.clusters import Cluster, device, draws, events, model, named, network, noise, resize
from offbeat.errors import ClusterError

DOCS = Path(__file__).parents[1] / "docs" / "clusters.md"
EIGHT = "workers = 8\n[compute]\nstep_s = 1\n"
FOUR = "workers = 4\n[compute]\nstep_s = 1\n"


def seconds(cluster: Cluster, step: int, at_s: float = 0.0, seed: int = 1) -> list[float]:
    """The cost of one step on every worker."""
    return [cluster.device(rank, seed).seconds(step, 1, at_s) for rank in range(cluster.workers)]


def factors(table: str, count: int = 20_000) -> list[float]:
    """Many draws of one kind of noise on a step of one second."""
    worker = Cluster.parse(EIGHT + f"[[noise]]\n{table}").device(3, seed=5)
    return sorted(worker.seconds(step, 1, 0.0) for step in range(count))


def quantile(ordered: list[float], share: float) -> float:
    return ordered[int(share * len(ordered))]


# ---------------------------------------------------------------- randomness


def test_draws_are_splitmix64() -> None:
    assert [draws.bits(0, index) for index in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("extreme", [0, (1 << 64) - 1])
def test_an_inverse_cdf_never_sees_0_or_1(extreme: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "bits", lambda key, index: extreme)
    assert 0.0 < draws.uniform(0, 0) < 1.0
    assert abs(draws.normal(0, 0)) < 9
    assert draws.below(7, 0, 0) == (6 if extreme else 0)


def test_uniform_draws_fill_the_interval_evenly() -> None:
    drawn = sorted(draws.uniform(draws.key(1, 2, 3), step) for step in range(20_000))
    assert fmean(drawn) == pytest.approx(0.5, abs=0.008)
    assert pstdev(drawn) == pytest.approx(12**-0.5, abs=0.004)
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) at 1 %
    assert max(abs(x - i / len(drawn)) for i, x in enumerate(drawn)) < 1.63 / len(drawn) ** 0.5


def test_neighbouring_streams_and_steps_are_independent() -> None:
    count = 10_000
    stream = [draws.normal(draws.key(1, 0, 0), step) for step in range(count)]
    others = {
        "next rank": [draws.normal(draws.key(1, 1, 0), step) for step in range(count)],
        "next seed": [draws.normal(draws.key(2, 0, 0), step) for step in range(count)],
        "next noise": [draws.normal(draws.key(1, 0, 1), step) for step in range(count)],
        "next step": [draws.normal(draws.key(1, 0, 0), step + 1) for step in range(count)],
    }
    for name, other in others.items():
        assert abs(correlation(stream, other)) < 4 / count**0.5, name
    ranks = [draws.normal(draws.key(1, rank, 0), 0) for rank in range(count)]
    assert abs(correlation(ranks[:-1], ranks[1:])) < 4 / count**0.5
    assert fmean(ranks) == pytest.approx(0, abs=0.04)
    assert pstdev(ranks) == pytest.approx(1, abs=0.03)


def test_every_subset_is_equally_likely() -> None:
    counts = dict.fromkeys(map(frozenset, combinations(range(5), 2)), 0)
    for index in range(5_000):
        counts[draws.subset(2, 5, 9, index)] += 1
    assert all(abs(count - 500) < 100 for count in counts.values())


def test_a_step_costs_the_same_whoever_asks_and_when() -> None:
    text = EIGHT + '[[noise]]\nkind = "lognormal"\nsigma = 0.5'
    once = Cluster.parse(text)
    again = Cluster.parse(text)
    forward = [once.device(2, seed=4).seconds(step, 1, 0.0) for step in range(10)]
    backward = [again.device(2, seed=4).seconds(step, 9, 7.0) for step in reversed(range(10))]
    assert forward == backward[::-1]
    assert len(set(forward)) == 10
    assert once.device(2, seed=5).seconds(0, 1, 0.0) != forward[0]


# ---------------------------------------------------------------- compute and noise


def test_half_the_speed_takes_twice_as_long() -> None:
    cluster = Cluster.parse("workers = 3\nspeed = [1, 0.5, 2]\n[compute]\nstep_s = 0.1")
    assert seconds(cluster, step=0) == [0.1, 0.2, 0.05]


def test_one_speed_holds_for_all() -> None:
    cluster = Cluster.parse("workers = 2\nspeed = 4\n[compute]\nstep_s = 1")
    assert seconds(cluster, step=0) == [0.25, 0.25]


def test_groups_are_numbered_in_order_and_have_noise_of_their_own() -> None:
    cluster = Cluster.parse(
        """
        workers = 3
        [compute]
        step_s = 1
        [[group]]
        workers = 2
        [[group]]
        workers = 1
        speed = 0.5
        [[group.noise]]
        kind = "random_delay"
        k = 1
        delay_s = 10
        """
    )
    assert seconds(cluster, step=0) == [1, 1, 12]


def test_samples_cost_extra() -> None:
    cluster = Cluster.parse("workers = 1\n[compute]\nstep_s = 1\nsample_s = 0.5")
    assert cluster.device(0, seed=0).seconds(0, 1, 0.0) == 1.5
    assert cluster.device(0, seed=0).seconds(0, 32, 0.0) == 17.0


def length_draws(table: str) -> list[float]:
    text = f"workers = 2\n[compute]\nstep_s = 0\n[compute.length]\nper_unit_s = 1\n{table}"
    worker = Cluster.parse(text).device(1, seed=3)
    return sorted(worker.seconds(step, 1, 0.0) for step in range(20_000))


def test_listed_lengths_are_equally_likely() -> None:
    drawn = length_draws('kind = "listed"\nvalues = [2, 5, 11]')
    assert set(drawn) == {2.0, 5.0, 11.0}
    assert drawn.count(5.0) / len(drawn) == pytest.approx(1 / 3, abs=0.015)


def test_lognormal_lengths_have_their_mean_and_sd_and_stay_in_range() -> None:
    drawn = length_draws('kind = "lognormal"\nmean = 187\nsd = 97')
    assert fmean(drawn) == pytest.approx(187, rel=0.02)
    assert pstdev(drawn) == pytest.approx(97, rel=0.05)
    clipped = length_draws('kind = "lognormal"\nmean = 187\nsd = 97\nlow = 100\nhigh = 300')
    assert (clipped[0], clipped[-1]) == (100, 300)


def test_uniform_and_exponential_lengths() -> None:
    even = length_draws('kind = "uniform"\nlow = 2\nhigh = 4')
    assert even[0] > 2
    assert even[-1] < 4
    assert fmean(even) == pytest.approx(3, abs=0.02)
    tailed = length_draws('kind = "exponential"\nmean = 5')
    assert fmean(tailed) == pytest.approx(5, rel=0.03)
    assert quantile(tailed, 0.5) == pytest.approx(5 * log(2), rel=0.04)


def test_lengths_come_from_a_column_of_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "videos.csv").write_text("id,frames\n1,29\n2,29\n")
    text = """
        workers = 1
        [compute.length]
        kind = "listed"
        path = "videos.csv"
        column = "frames"
        per_unit_s = 0.5
        """
    assert seconds(Cluster.parse(text, folder=tmp_path), step=0) == [14.5]
    wrong = text.replace('"frames"', '"frame"')
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(wrong, folder=tmp_path)
    assert str(caught.value) == (
        "<string>: compute.length.column 'frame' is not in the file, "
        "did you mean frames? (known: id, frames)"
    )


def test_no_noise_is_exact() -> None:
    assert set(factors('kind = "none"', 10)) == {1.0}


def test_lognormal_has_mean_one_unless_told_otherwise() -> None:
    drawn = factors('kind = "lognormal"\nsigma = 0.3')
    assert fmean(drawn) == pytest.approx(1.0, abs=0.01)
    assert pstdev(drawn) == pytest.approx((exp(0.09) - 1) ** 0.5, rel=0.04)
    assert quantile(drawn, 0.95) == pytest.approx(
        exp(0.3 * NormalDist().inv_cdf(0.95) - 0.045), rel=0.02
    )
    plain = factors('kind = "lognormal"\nsigma = 0.3\nmean_one = false')
    assert quantile(plain, 0.5) == pytest.approx(1.0, abs=0.01)


def test_exponential_adds_its_scale_on_average() -> None:
    drawn = factors('kind = "exponential"\nscale = 0.5')
    assert drawn[0] > 1.0
    assert fmean(drawn) == pytest.approx(1.5, abs=0.015)
    assert pstdev(drawn) == pytest.approx(0.5, rel=0.05)
    assert quantile(drawn, 0.5) == pytest.approx(1 + 0.5 * log(2), abs=0.015)


def test_pareto_has_the_tail_of_a_lomax() -> None:
    drawn = factors('kind = "pareto"\nshape = 3\nscale = 0.2')
    assert drawn[0] > 1.0
    assert fmean(drawn) == pytest.approx(1.1, abs=0.01)
    assert quantile(drawn, 0.99) == pytest.approx(1 + 0.2 * (100 ** (1 / 3) - 1), rel=0.05)


def test_uniform_stays_between_low_and_high() -> None:
    drawn = factors('kind = "uniform"\nlow = 0.5\nhigh = 2.5')
    assert drawn[0] > 0.5
    assert drawn[-1] < 2.5
    assert fmean(drawn) == pytest.approx(1.5, abs=0.02)


def test_dropcompute_is_half_longer_on_average_and_6_5_at_worst() -> None:
    drawn = factors('kind = "dropcompute"')
    assert fmean(drawn) == pytest.approx(1.496, abs=0.015)
    assert pstdev(drawn) == pytest.approx(0.605, abs=0.03)
    assert quantile(drawn, 0.5) == pytest.approx(1 + exp(-0.5) / 2, abs=0.01)
    assert drawn[-1] == 6.5


def test_rotating_delays_shift_by_one_worker_per_step() -> None:
    cluster = Cluster.load("eager-cifar-8")
    delays_ms = [[round(1000 * (s - 0.198)) for s in seconds(cluster, step)] for step in range(3)]
    assert delays_ms == [
        [50, 100, 150, 200, 250, 300, 350, 400],
        [100, 150, 200, 250, 300, 350, 400, 50],
        [150, 200, 250, 300, 350, 400, 50, 100],
    ]


def test_rotating_on_one_worker_is_its_low_delay() -> None:
    text = FOUR + '[[noise]]\nkind = "rotating"\nlow_s = 2\nhigh_s = 9\nworkers = [1]'
    assert seconds(Cluster.parse(text), step=5) == [1, 3, 1, 1]


def test_random_delay_hits_exactly_k_distinct_workers_per_step() -> None:
    cluster = Cluster.parse(EIGHT + '[[noise]]\nkind = "random_delay"\nk = 3\ndelay_s = 5')
    late = [[s == 6.0 for s in seconds(cluster, step)] for step in range(400)]
    assert all(sum(row) == 3 for row in late)
    per_worker = [sum(column) for column in zip(*late, strict=True)]
    assert all(abs(count - 150) < 45 for count in per_worker)


def test_spells_slow_exactly_k_workers_for_a_while_and_others_with_every_seed() -> None:
    spells = '[[noise]]\nkind = "spells"\nk = 3\nfactor = 4\nevery_s = 8\nfor_s = 2'
    cluster = Cluster.parse(EIGHT + spells)

    def slowed(seed: int, at_s: float, step: int = 0) -> list[int]:
        devices = [cluster.device(rank, seed) for rank in range(8)]
        calm = [device.seconds(step, 1.0, 7.0) for device in devices]
        now = [device.seconds(step, 1.0, at_s) for device in devices]
        assert {b / a for a, b in zip(calm, now, strict=True)} <= {1.0, 4.0}
        return [rank for rank in range(8) if now[rank] > calm[rank]]

    assert all(len(slowed(0, 8.0 * stretch)) == 3 for stretch in range(20))
    assert slowed(0, 0.0) == slowed(0, 1.9, step=7)
    assert slowed(0, 2.0) == []
    assert len({tuple(slowed(0, 8.0 * stretch)) for stretch in range(20)}) > 10
    assert [slowed(0, 8.0 * n) for n in range(9)] != [slowed(1, 8.0 * n) for n in range(9)]


def test_random_delay_picks_among_the_listed_workers_only() -> None:
    text = EIGHT + '[[noise]]\nkind = "random_delay"\nk = 1\ndelay_s = 5\nworkers = [6, 2]'
    late = [seconds(Cluster.parse(text), step).index(6.0) for step in range(50)]
    assert set(late) == {2, 6}


def test_eager_hyperplane_gives_the_synchronous_rate_of_the_paper() -> None:
    cluster = Cluster.load("eager-hyperplane-8")
    assert 1 / max(seconds(cluster, step=0)) == pytest.approx(1.65, abs=0.005)


def test_noise_of_several_kinds_combines_in_any_order() -> None:
    factor = '[[noise]]\nkind = "trace"\nunit = "factor"\nrows = [[3]]\n'
    delay = '[[noise]]\nkind = "random_delay"\nk = 4\ndelay_s = 10\n'
    replaced = '[[noise]]\nkind = "trace"\nunit = "seconds"\nrows = [[2]]\n'
    slow = '[[event]]\nkind = "slow"\nworkers = [0]\nfactor = 2\n'
    for parts in (slow + delay + factor + replaced, replaced + factor + delay + slow):
        assert seconds(Cluster.parse(FOUR + parts), step=0) == [32, 16, 16, 16]


def test_windows_hold_from_their_start_until_before_their_end() -> None:
    text = FOUR + (
        '[[noise]]\nkind = "trace"\nunit = "factor"\nrows = [[3]]\nfrom_s = 10\nto_s = 20\n'
        '[[event]]\nkind = "slow"\nworkers = [1]\nfactor = 5\nfrom_s = 20\n'
    )
    worker = Cluster.parse(text).device(1, seed=0)
    moments = (0.0, 9.9, 10.0, 19.9, 20.0, 1e9)
    assert [worker.seconds(0, 1, at_s) for at_s in moments] == [1, 1, 3, 3, 5, 5]


def test_traces_wrap_around_and_reuse_columns(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("a,b\n\n# a comment\n0.1,0.2\n0.3,0.4\n")
    text = 'workers = 3\n[[noise]]\nkind = "trace"\nunit = "seconds"\npath = "trace.csv"'
    (tmp_path / "cluster.toml").write_text(text)
    cluster = Cluster.load(tmp_path / "cluster.toml")
    assert seconds(cluster, step=0) == [0.1, 0.2, 0.3]  # the third starts half-way down
    assert seconds(cluster, step=1) == [0.3, 0.4, 0.1]
    assert seconds(cluster, step=2) == [0.1, 0.2, 0.3]
    assert cluster.name == "cluster"
    (tmp_path / "trace.csv").unlink()
    assert seconds(cluster.resized(4), step=0) == [0.1, 0.2, 0.3, 0.4]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**70), 2**70),
    rank=st.integers(0, 63),
    step=st.integers(0, 2**40),
    at_s=st.floats(0, 1e6),
)
def test_no_draw_is_ever_negative_or_infinite(seed: int, rank: int, step: int, at_s: float) -> None:
    for name in named():
        worker = Cluster.load(name).resized(64).device(rank, seed)
        assert 0 < worker.seconds(step, 1, at_s) < 1e5


# ---------------------------------------------------------------- network


def test_the_default_network_is_free() -> None:
    free = Cluster.parse(EIGHT).network
    assert free.point_to_point_s(0, 1, 10**9) == 0
    assert free.all_reduce_s(range(8), 10**9) == 0
    assert free.broadcast_s(range(8), 10**9) == 0
    assert free.control_latency_s == 0


def wired(extra: str = "", workers: int = 8) -> network.Network:
    """Latency 1 s and 10 bytes/s."""
    return Cluster.parse(
        f"workers = {workers}\n[compute]\nstep_s = 1\n"
        f"[network]\nlatency_s = 1\nbandwidth_bytes_per_s = 10\n{extra}"
    ).network


def test_a_message_costs_latency_plus_bytes_over_bandwidth() -> None:
    assert wired().point_to_point_s(0, 1, 40) == 5.0
    assert wired().point_to_point_s(1, 1, 40) == 0.0
    assert wired().control_latency_s == 1.0
    assert wired("control_latency_s = 0.25").control_latency_s == 0.25


def test_a_ring_has_2_p_minus_1_phases_of_a_pth() -> None:
    ring = wired('all_reduce = "ring"')
    assert ring.all_reduce_s(range(8), 80) == 14 * (1 + 1)
    assert ring.all_reduce_s([3, 5], 80) == 2 * (1 + 4)
    assert ring.all_reduce_s([3], 80) == 0.0


def test_recursive_doubling_and_broadcast_have_log_p_phases() -> None:
    doubling = wired('all_reduce = "recursive_doubling"')
    assert doubling.all_reduce_s(range(8), 80) == 3 * (1 + 8)
    assert doubling.all_reduce_s(range(5), 80) == 3 * (1 + 8)
    assert doubling.all_reduce_s([2], 80) == 0.0
    assert doubling.broadcast_s(range(8), 80) == 3 * (1 + 8)
    assert doubling.broadcast_s(range(6), 80) == 3 * (1 + 8)
    assert doubling.broadcast_s([2], 80) == 0.0


def test_auto_takes_the_cheaper_all_reduce() -> None:
    assert wired().all_reduce_s(range(8), 8) == pytest.approx(3 * (1 + 0.8))
    assert wired().all_reduce_s(range(8), 8000) == 14 * (1 + 100)


def test_a_slow_link_slows_the_collectives_that_use_it() -> None:
    slow = "[[network.link]]\nbetween = [2, 1]\nbandwidth_bytes_per_s = 1"
    ring = wired('all_reduce = "ring"\n' + slow)
    assert ring.point_to_point_s(1, 2, 10) == ring.point_to_point_s(2, 1, 10) == 11.0
    assert ring.all_reduce_s([0, 1, 2, 3], 40) == 6 * (1 + 10)
    assert ring.all_reduce_s([0, 2, 3, 1], 40) == 6 * (1 + 1)  # 1 and 2 are no neighbours
    doubling = wired('all_reduce = "recursive_doubling"\n' + slow)
    # phase 1: 0-1 and 2-3; phase 2: 0-2 and 1-3
    assert doubling.all_reduce_s([0, 1, 2, 3], 10) == 2 + 2
    # phase 1: 0-3 and 1-2; phase 2: 0-1 and 3-2
    assert doubling.all_reduce_s([0, 3, 1, 2], 10) == 11 + 2
    # a tree from 1: to 2; then 1 to 0 and 2 to 3
    assert doubling.broadcast_s((1, 2, 0, 3), 10) == 11 + 2


def test_a_link_goes_before_a_zone_and_a_zone_before_the_network() -> None:
    net = wired(
        "[[network.zone]]\nworkers = [0, 1, 2]\nlatency_s = 0.5\n"
        "[[network.link]]\nbetween = [0, 1]\nlatency_s = 0.25\nbandwidth_bytes_per_s = inf"
    )
    assert net.point_to_point_s(0, 1, 10) == 0.25
    assert net.point_to_point_s(0, 2, 10) == 1.5
    assert net.point_to_point_s(0, 3, 10) == 2.0
    assert net.point_to_point_s(3, 4, 10) == 2.0


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    size_bytes=st.integers(0, 10**6),
    kind=st.sampled_from(["ring", "recursive_doubling", "auto"]),
)
def test_links_equal_to_the_network_change_nothing(count: int, size_bytes: int, kind: str) -> None:
    plain = wired(f'all_reduce = "{kind}"', workers=40)
    linked = wired(f'all_reduce = "{kind}"\n[[network.link]]\nbetween = [0, 1]', workers=40)
    members = range(count)
    assert linked.all_reduce_s(members, size_bytes) == pytest.approx(
        plain.all_reduce_s(members, size_bytes)
    )
    assert linked.broadcast_s(list(members), size_bytes) == pytest.approx(
        plain.broadcast_s(members, size_bytes)
    )


def test_using_a_cluster_does_not_change_it() -> None:
    text = EIGHT + "[[network.link]]\nbetween = [0, 1]\nlatency_s = 1"
    used, fresh = Cluster.parse(text), Cluster.parse(text)
    used.network.all_reduce_s(range(8), 100)
    used.device(0, seed=0)
    assert used == fresh
    assert pickle.loads(pickle.dumps(used)) == fresh


# ---------------------------------------------------------------- events, resizing, loading


def test_events_say_when_a_worker_comes_and_goes() -> None:
    cluster = Cluster.parse(
        EIGHT
        + '[[event]]\nkind = "join"\nworker = 3\nat_s = 5\n'
        + '[[event]]\nkind = "crash"\nworker = 3\nat_s = 9\n'
        + '[[event]]\nkind = "leave"\nworker = 1\nat_s = 2.5\n'
    )
    assert (cluster.join_at(3), cluster.crash_at(3), cluster.leave_at(3)) == (5, 9, None)
    assert (cluster.join_at(1), cluster.crash_at(1), cluster.leave_at(1)) == (None, None, 2.5)
    assert len(cluster.events) == 3


def test_uniform_makes_equal_workers() -> None:
    cluster = Cluster.uniform(3, step_s=0.5, latency_s=1, bandwidth_bytes_per_s=10)
    assert seconds(cluster, step=7) == [0.5, 0.5, 0.5]
    assert cluster.network.point_to_point_s(0, 1, 10) == 2
    assert cluster.name == "uniform-3"
    assert Cluster.uniform(3).network.bandwidth_bytes_per_s == inf


def test_ten_thousand_workers_are_no_trouble() -> None:
    cluster = Cluster.load("two-slow-of-eight").resized(10_000)
    assert cluster.speeds.count(0.5) == 2_500
    assert len([cluster.device(rank, seed=0) for rank in range(0, 10_000, 10)]) == 1_000


def test_resizing_keeps_the_proportions_of_groups() -> None:
    cluster = Cluster.load("two-slow-of-eight")
    assert cluster.resized(4).speeds == (1, 1, 1, 0.5)
    assert cluster.resized(16).speeds == (1,) * 12 + (0.5,) * 4
    assert cluster.resized(2).speeds == (1, 0.5)
    assert cluster.resized(8) is cluster
    assert cluster.resized(16).name == "two-slow-of-eight@16"
    assert cluster.resized(16).resized(4).name == "two-slow-of-eight@4"


def test_resizing_keeps_a_rare_group() -> None:
    text = "workers = 64\n[compute]\nstep_s = 1\n[[group]]\nworkers = 63\n[[group]]\nworkers = 1\n"
    cluster = Cluster.parse(text + "speed = 0.1").resized(8)
    assert cluster.speeds == (1,) * 7 + (0.1,)


def test_resizing_stretches_and_thins_a_list_of_speeds() -> None:
    cluster = Cluster.load("half-speed-4")
    assert cluster.resized(8).speeds == (1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5)
    assert cluster.resized(2).speeds == (1, 0.5)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=5), total=st.integers(5, 300))
def test_shares_are_whole_and_within_one_of_the_proportion(counts: list[int], total: int) -> None:
    shares = resize._shares(counts, total)
    assert sum(shares) == total
    assert min(shares) >= 1
    if all(count * total >= sum(counts) for count in counts):
        for count, share in zip(counts, shares, strict=True):
            assert abs(share - count * total / sum(counts)) < 1 + 1e-9


def test_resizing_keeps_the_share_of_random_delays() -> None:
    cluster = Cluster.load("eager-hyperplane-8")
    hit = [sum(s > 0.5 for s in seconds(cluster.resized(n), step=0)) for n in (2, 8, 32, 64)]
    assert hit == [1, 1, 4, 8]


def test_resizing_away_a_worker_that_is_named_is_an_error() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load("changing-8").resized(4)
    assert str(caught.value) == (
        "changing-8 resized to 4 workers: "
        "event[0].workers names worker 5, but the workers are 0 to 3"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_resizing_to_fewer_workers_than_groups_is_an_error(workers: int) -> None:
    with pytest.raises(ClusterError, match=f"resized to {workers} workers: needs at least 2"):
        Cluster.load("two-slow-of-eight").resized(workers)


def test_the_shipped_clusters_load_and_describe_themselves() -> None:
    assert named() == [
        "bytedance-32",
        "changing-8",
        "dropcompute-64",
        "eager-cifar-8",
        "eager-hyperplane-8",
        "half-speed-4",
        "mixed-4",
        "noisy-neighbours-16",
        "text-8",
        "two-slow-of-eight",
        "ucf101-8",
        "uniform-8",
    ]
    for name in named():
        cluster = Cluster.load(name)
        assert cluster.name == name
        assert cluster.description in cluster.describe()
        assert len(cluster.description) > 30


def test_describe_fits_a_terminal() -> None:
    assert Cluster.load("changing-8").describe().splitlines() == [
        "changing-8: 8 workers",
        "  Eight workers whose cluster changes: calm, then noisy, then two are slow, then calm.",
        "  compute  0.1 s per micro-batch",
        "  speed    1 (x8)",
        "  noise    lognormal sigma=0.05",
        "  noise    exponential from_s=60.0 to_s=120.0 scale=0.5",
        "  network  latency 5e-05 s, 1.25e+09 bytes/s, all-reduce auto",
        "  event    slow [2, 5] x3 from 120 to 180 s",
    ]
    trace = 'workers = 1\n[[noise]]\nkind = "trace"\nunit = "seconds"\nrows = [[1.0]]'
    assert Cluster.parse(trace).describe().splitlines() == [
        "unnamed: 1 worker",
        "  compute  from a trace",
        "  speed    1 (x1)",
        "  noise    trace unit=seconds (1 rows, 1 columns)",
        "  network  latency 0 s, unlimited bandwidth, all-reduce auto",
    ]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.load("two-slow-of-eigth")
    assert str(caught.value) == (
        "two-slow-of-eigth: neither a file nor a cluster that ships with offbeat; "
        f"did you mean two-slow-of-eight? (known: {', '.join(named())})"
    )


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match=r"binary\.toml: cannot be read \(not UTF-8 text\)"):
        Cluster.load(tmp_path / "binary.toml")
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.load(tmp_path)


def test_messages_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("workers = 0")
    with pytest.raises(ClusterError) as caught:
        Cluster.load(str(tmp_path / "mine.toml"))
    assert str(caught.value) == f"{tmp_path}/mine.toml: workers must be at least 1, got 0"


def test_a_rank_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ClusterError, match="rank must be between 0 and 7, got 8"):
        Cluster.load("uniform-8").device(8, seed=0)


def test_uniform_checks_its_arguments() -> None:
    with pytest.raises(ClusterError, match=r"Cluster\.uniform: workers must be at least 1, got 0"):
        Cluster.uniform(0)
    with pytest.raises(ClusterError, match=r"compute\.step_s must be at least 0, got -1"):
        Cluster.uniform(2, step_s=-1)


# ---------------------------------------------------------------- messages

NOISE_KINDS = (
    "none, lognormal, exponential, pareto, uniform, dropcompute, rotating, random_delay, spells, "
    "trace"
)
NOISE = EIGHT + "[[noise]]\n"
EVENT = EIGHT + "[[event]]\n"
TRACE = NOISE + 'kind = "trace"\nunit = "factor"\n'

MISTAKES: list[tuple[str, str]] = [
    # syntax
    ("workers = 8\nspeed = = 1", "not valid TOML: Invalid value (at line 2, column 9)"),
    ("[compute]\nstep_s = 1", "workers is missing"),
    ("workers = 8", "compute costs nothing: give compute.step_s, sample_s or length"),
    # unknown keys
    (
        "wrokers = 8",
        "wrokers is not a known key, did you mean workers? (known: name, description, "
        "workers, speed, compute, group, noise, network, overhead, event)",
    ),
    (
        "workers = 8\n[[events]]\nkind = 'crash'",
        "events is not a known key, did you mean event? (known: name, description, workers, "
        "speed, compute, group, noise, network, overhead, event)",
    ),
    (
        EIGHT + "steps = 3",
        "compute.steps is not a known key, did you mean step_s? (known: step_s, sample_s, length)",
    ),
    (EIGHT + "zzz = 3", "compute.zzz is not a known key (known: step_s, sample_s, length)"),
    (
        EIGHT + "speed = 3",
        "compute.speed is not a known key here; speed belongs at the top of the file, before "
        "the first [table]",
    ),
    (
        NOISE + 'kind = "none"\n[[noise]]\nkind = "lognormal"\nsgima = 1',
        "noise[1].sgima is not a known key, did you mean sigma? (known: from_s, to_s, "
        "workers, kind, sigma, mean_one)",
    ),
    (
        EIGHT + "[network]\nlatency = 1",
        "network.latency is not a known key, did you mean latency_s? (known: latency_s, "
        "bandwidth_bytes_per_s, control_latency_s, all_reduce, sharing, codec_bytes_per_s, link, "
        "zone)",
    ),
    # workers and speeds
    ("workers = 0", "workers must be at least 1, got 0"),
    ("workers = 2.5", "workers must be a whole number, got 2.5"),
    ("workers = 2_000_000", "workers must be at most 1000000, got 2000000"),
    ("workers = true", "workers must be a whole number, got True"),
    ('workers = "8"', "workers must be a whole number, got '8'"),
    (
        "speed = [1, 1, 1, 1, 1, 1, 1]\n" + EIGHT,
        "speed must have one value per worker: 8 workers, got 7 values",
    ),
    ("speed = 0\n" + EIGHT, "speed must be more than 0, got 0"),
    ("speed = nan\n" + EIGHT, "speed must be a finite number, got nan"),
    ('speed = "fast"\n' + EIGHT, "speed must be a number, got 'fast'"),
    ("speed = [1, 1, -0.5]\n" + EIGHT, "speed[2] must be more than 0, got -0.5"),
    (
        EIGHT + "[[group]]\nworkers = 7",
        "group: the workers of the groups must add up to workers = 8, got 7",
    ),
    (
        "speed = 1\n" + EIGHT + "[[group]]\nworkers = 8",
        "speed and group exclude each other: give the groups a speed",
    ),
    (EIGHT + "[[group]]\nworkers = 8\nspeed = 0", "group[0].speed must be more than 0, got 0"),
    (
        EIGHT + "[[group]]\nworkers = 8\n[[group.noise]]\nkind = 'none'\nworkers = [1]",
        "group[0].noise[0].workers must be left out: the noise of a group covers the workers "
        "of that group",
    ),
    (
        EIGHT
        + "[[group]]\nworkers = 8\n[[group.noise]]\nkind = 'random_delay'\nk = 9\ndelay_s = 1",
        "group[0].noise[0].k must be between 1 and the 8 workers it covers, got 9",
    ),
    (
        EIGHT + "[group]\nworkers = 8",
        "group must be a list, got {'workers': 8} (write [[group]], with two brackets)",
    ),
    # compute
    ("workers = 8\ncompute = 3", "compute must be a table, got 3"),
    ("workers = 8\n[compute]\nstep_s = inf", "compute.step_s must be a finite number, got inf"),
    ("workers = 8\n[compute]\nstep_s = -1", "compute.step_s must be at least 0, got -1"),
    (
        EIGHT + "[compute.length]\nper_unit_s = 1",
        "compute.length.kind is missing (known: listed, lognormal, uniform, exponential)",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'listed'\nper_unit_s = 1",
        "compute.length.values is missing: list the lengths (or give the path of a CSV file)",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'listed'\nper_unit_s = 1\nvalues = []",
        "compute.length.values must have at least 1 value, got []",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'listed'\nper_unit_s = 1\nvalues = [1]\npath = 'x'",
        "compute.length.values and path exclude each other: give one of them",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'uniform'\nper_unit_s = 1\nlow = 3\nhigh = 2",
        "compute.length.low must be less than high, got 3 and 2",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'exponential'\nmean = 1",
        "compute.length.per_unit_s is missing",
    ),
    # noise
    (NOISE + "sigma = 1", f"noise[0].kind is missing (known: {NOISE_KINDS})"),
    (
        NOISE + 'kind = "lognorml"',
        f"noise[0].kind is 'lognorml', did you mean lognormal? (known: {NOISE_KINDS})",
    ),
    (NOISE + 'kind = "lognormal"', "noise[0].sigma is missing"),
    (NOISE + 'kind = "lognormal"\nsigma = -1', "noise[0].sigma must be more than 0, got -1"),
    (NOISE + 'kind = "lognormal"\nsigma = 11', "noise[0].sigma must be at most 10, got 11"),
    (
        NOISE + 'kind = "pareto"\nshape = 0.05\nscale = 1',
        "noise[0].shape must be at least 0.1, got 0.05",
    ),
    (
        EIGHT + "[compute.length]\nkind = 'lognormal'\nper_unit_s = 1\nmean = 1\nsd = 1001",
        "compute.length.sd must be at most 1000 x mean, got 1001 and 1",
    ),
    (TRACE + "rows = [['1']]", "noise[0].rows[0][0] must be a number, got '1'"),
    (NOISE + 'kind = "lognormal"\nsigma = nan', "noise[0].sigma must be a finite number, got nan"),
    (
        NOISE + 'kind = "lognormal"\nsigma = 1\nmean_one = 1',
        "noise[0].mean_one must be true or false, got 1",
    ),
    (
        NOISE + 'kind = "none"\nfrom_s = 5\nto_s = 5',
        "noise[0].from_s must be before to_s, got 5 and 5",
    ),
    (NOISE + 'kind = "none"\nto_s = nan', "noise[0].to_s must be more than 0, got nan"),
    (
        NOISE + 'kind = "none"\nworkers = [8]',
        "noise[0].workers names worker 8, but the workers are 0 to 7",
    ),
    (NOISE + 'kind = "none"\nworkers = [-1]', "noise[0].workers[0] must be at least 0, got -1"),
    (NOISE + 'kind = "none"\nworkers = [3, 1, 3]', "noise[0].workers names worker 3 twice"),
    (NOISE + 'kind = "none"\nworkers = []', "noise[0].workers must have at least 1 value, got []"),
    (NOISE + 'kind = "none"\nworkers = 3', "noise[0].workers must be a list, got 3"),
    (
        NOISE + 'kind = "uniform"\nlow = 2\nhigh = 1',
        "noise[0].low must be less than high, got 2 and 1",
    ),
    (
        NOISE + 'kind = "rotating"\nlow_s = 2\nhigh_s = 1',
        "noise[0].low_s must not be more than high_s, got 2 and 1",
    ),
    (
        NOISE + 'kind = "random_delay"\nk = 9\ndelay_s = 1',
        "noise[0].k must be between 1 and the 8 workers it covers, got 9",
    ),
    (
        NOISE + 'kind = "random_delay"\nk = 3\ndelay_s = 1\nworkers = [1, 2]',
        "noise[0].k must be between 1 and the 2 workers it covers, got 3",
    ),
    # traces
    (TRACE, "noise[0].path is missing: the CSV file of the trace (or list its rows)"),
    (TRACE + "path = 3", "noise[0].path must be a text in quotes, got 3"),
    (TRACE + "rows = []", "noise[0].rows must hold at least one value"),
    (TRACE + "rows = [[1, 2], [3]]", "noise[0].rows[1] has 1 values, but rows[0] has 2"),
    (TRACE + "rows = [[1, 0]]", "noise[0].rows[0][1] must be more than 0, got 0"),
    (
        TRACE + "rows = [[1]]\npath = 'x.csv'",
        "noise[0].rows and path exclude each other: give one of them",
    ),
    (
        TRACE.replace("factor", "minutes") + "rows = [[1]]",
        "noise[0].unit must be 'seconds' or 'factor', got 'minutes'",
    ),
    (
        (
            TRACE + "rows = [[1]]\nto_s = 9\n" + TRACE[len(EIGHT) :] + "rows = [[1]]\nfrom_s = 5"
        ).replace("factor", "seconds"),
        "noise[1] and noise[0] both replace the compute time of worker 0 at 5 s: give each "
        "its own workers or window",
    ),
    # network
    (EIGHT + "[network]\nlatency_s = -1", "network.latency_s must be at least 0, got -1"),
    (
        EIGHT + "[network]\nbandwidth_bytes_per_s = 0",
        "network.bandwidth_bytes_per_s must be more than 0, got 0",
    ),
    (
        EIGHT + "[network]\nbandwidth_bytes_per_s = nan",
        "network.bandwidth_bytes_per_s must be more than 0, got nan",
    ),
    (
        EIGHT + '[network]\nall_reduce = "tree"',
        "network.all_reduce must be 'ring', 'recursive_doubling' or 'auto', got 'tree'",
    ),
    (
        EIGHT + "[[network.link]]\nbetween = [0, 8]",
        "network.link[0].between names worker 8, but the workers are 0 to 7",
    ),
    (
        EIGHT + "[[network.link]]\nbetween = [0]",
        "network.link[0].between must have at least 2 values, got [0]",
    ),
    (
        EIGHT + "[[network.link]]\nbetween = [0, 1, 2]",
        "network.link[0].between must have at most 2 values, got [0, 1, 2]",
    ),
    (
        EIGHT + "[[network.link]]\nbetween = [4, 4]",
        "network.link[0].between must name two workers, got [4, 4]",
    ),
    (
        EIGHT + "[[network.link]]\nbetween = [0, 1]\n[[network.link]]\nbetween = [1, 0]",
        "network.link[1].between [1, 0] repeats link[0]",
    ),
    (
        EIGHT + "[[network.zone]]\nworkers = [0, 9]",
        "network.zone[0].workers names worker 9, but the workers are 0 to 7",
    ),
    (
        EIGHT + "[[network.zone]]\nworkers = [0, 1]\n[[network.zone]]\nworkers = [1, 2]",
        "network.zone[1].workers names worker 1, which is in zone[0] already",
    ),
    # events
    (
        EVENT + 'kind = "explode"',
        "event[0].kind is 'explode' (known: slow, crash, leave, join, freeze)",
    ),
    (EVENT + 'kind = "freeze"\nworker = 1\nat_s = 2', "event[0].for_s is missing"),
    (
        EVENT + 'kind = "freeze"\nworker = 9\nat_s = 2\nfor_s = 1',
        "event[0].worker names worker 9, but the workers are 0 to 7",
    ),
    (
        EVENT
        + 'kind = "freeze"\nworker = 1\nat_s = 2\nfor_s = 2\n'
        + '[[event]]\nkind = "freeze"\nworker = 1\nat_s = 3\nfor_s = 1',
        "event[1].at_s: worker 1 cannot freeze at 3 s, event[0] has it frozen until 4 s",
    ),
    (
        EVENT
        + 'kind = "freeze"\nworker = 1\nat_s = 2\nfor_s = 2\n'
        + '[[event]]\nkind = "crash"\nworker = 1\nat_s = 1',
        "event[0].at_s: worker 1 cannot freeze at 2 s, it has to crash at 1 s",
    ),
    (
        EVENT
        + 'kind = "freeze"\nworker = 1\nat_s = 2\nfor_s = 2\n'
        + '[[event]]\nkind = "join"\nworker = 1\nat_s = 5',
        "event[0].at_s: worker 1 cannot freeze at 2 s, it joins at 5 s",
    ),
    (EVENT + 'kind = "crash"\nworker = 1', "event[0].at_s is missing"),
    (
        EVENT + 'kind = "crash"\nworker = 8\nat_s = 1',
        "event[0].worker names worker 8, but the workers are 0 to 7",
    ),
    (
        EVENT + 'kind = "slow"\nworkers = [9]\nfactor = 2',
        "event[0].workers names worker 9, but the workers are 0 to 7",
    ),
    (
        EVENT + 'kind = "slow"\nworkers = [1]\nfactor = 0.5',
        "event[0].factor must be at least 1 (2 is twice as long), got 0.5",
    ),
    (
        EVENT + 'kind = "slow"\nworkers = [1]\nfactor = 2\nfrom_s = 3\nto_s = 2',
        "event[0].from_s must be before to_s, got 3 and 2",
    ),
    (
        EVENT + 'kind = "crash"\nworker = 1\nat_s = inf',
        "event[0].at_s must be a finite number, got inf",
    ),
    (
        EVENT
        + 'kind = "crash"\nworker = 1\nat_s = 1\n[[event]]\nkind = "crash"\nworker = 1\nat_s = 2',
        "event[1].worker: worker 1 cannot crash at 2 s, event[0] lets it crash at 1 s already",
    ),
    (
        EVENT
        + 'kind = "leave"\nworker = 1\nat_s = 1\n[[event]]\nkind = "crash"\nworker = 1\nat_s = 2',
        "event[1].worker: worker 1 cannot crash at 2 s, event[0] lets it leave at 1 s already",
    ),
    (
        EVENT
        + 'kind = "crash"\nworker = 1\nat_s = 1\n[[event]]\nkind = "join"\nworker = 1\nat_s = 2',
        "event[0].at_s: worker 1 cannot crash at 1 s, it joins at 2 s",
    ),
    (
        "workers = 1\n[compute]\nstep_s = 1\n[[event]]\nkind = 'join'\nworker = 0\nat_s = 1",
        "event: all workers join later; one must be there from the start",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_explained(text: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(text, source="my.toml")
    assert str(caught.value) == f"my.toml: {message}"


JUNK = ["-1", "0", "3", "1.5", "nan", "inf", "-inf", "true", '"x"', "[]", "[[]]", "{}"]
JUNK += ["[1, 'a']", "{kind = 'none'}", "[{kind = 'slow'}]", "1" + "0" * 400, "2020-01-01"]


def test_junk_in_any_place_is_a_cluster_error_or_a_cluster_that_works() -> None:
    messages = []
    for text in blocks("toml"):
        lines = text.splitlines()
        for number, line in enumerate(lines):
            for junk in JUNK if " = " in line and "path" not in line else ():
                changed = [
                    *lines[:number],
                    f"{line.split(' = ')[0]} = {junk}",
                    *lines[number + 1 :],
                ]
                try:
                    cluster = Cluster.parse("\n".join(changed))
                except ClusterError as error:
                    messages.append(str(error))
                else:
                    cluster.describe()
                    assert all(s >= 0 for s in seconds(cluster, step=0)[:9])
                    assert cluster.network.all_reduce_s(range(cluster.workers), 100) >= 0
    assert len(messages) > 500
    assert not [message for message in messages if "nput should" in message]


def test_several_mistakes_are_listed() -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse("workers = 0\nspeed = -1\n[compute]\nstep_s = 'a'", source="my.toml")
    assert str(caught.value).splitlines() == [
        "my.toml: 3 problems",
        "  workers must be at least 1, got 0",
        "  speed must be more than 0, got -1",
        "  compute.step_s must be a number, got 'a'",
    ]
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(f"workers = 9\nspeed = {[0] * 9}")
    assert str(caught.value).splitlines()[-1] == "  and 4 more"


BAD_CSV = {
    "1,x\n3,4": "line 1: 'x' is not a number",
    "1,2\n3": "line 2: 1 value, but 2 in the first row",
    "1,2\n3,x": "line 2: 'x' is not a number",
    "1,2\n3,-4": "line 2: values must be more than 0 and finite, got -4.0",
    "1,2\n3,nan": "line 2: values must be more than 0 and finite, got nan",
}


@pytest.mark.parametrize(("content", "message"), BAD_CSV.items())
def test_a_bad_csv_file_is_explained(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(TRACE + 'path = "t.csv"', source="my.toml", folder=tmp_path)
    assert str(caught.value) == f"my.toml: noise[0].path 't.csv', {message}"


def test_a_csv_file_that_is_empty_or_missing_is_explained(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("# nothing\n")
    with pytest.raises(ClusterError, match=r"noise\[0\]\.path 'empty\.csv' holds no rows"):
        Cluster.parse(TRACE + 'path = "empty.csv"', folder=tmp_path)
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(TRACE + 'path = "none.csv"', source="my.toml", folder=tmp_path)
    assert str(caught.value) == (
        "my.toml: noise[0].path 'none.csv' cannot be read (no such file or directory); "
        f"a relative path starts at the cluster file, in '{tmp_path}'"
    )


# ---------------------------------------------------------------- the page


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), flags=re.M | re.S)
    assert found
    return found


@pytest.mark.parametrize("text", blocks("toml"))
def test_the_examples_on_the_page_are_clusters(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(blocks("csv trace.csv")[0])
    cluster = Cluster.parse(text, folder=tmp_path)
    assert all(0 < s < inf for s in seconds(cluster, step=0))


def test_the_python_on_the_page_runs() -> None:
    for code in blocks("python"):
        exec(compile(code, str(DOCS), "exec"), {})


def test_the_page_lists_every_key_kind_and_shipped_cluster() -> None:
    page = DOCS.read_text()
    words = set(re.findall(r"`([^`\n]+)`", page))
    tables = [
        found
        for module in (model, device, noise, events, network)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, BaseModel)
    ]
    for table in tables:
        for name, field in table.model_fields.items():
            key = field.alias or name
            forms = {key, f"[{key}]", f"[[{key}]]", f"[[network.{key}]]"}
            assert forms & words, f"{table.__name__}.{key}"
        kind = table.model_fields.get("kind")
        if kind is not None:
            assert re.search(rf"`{kind.annotation.__args__[0]}`", page)  # type: ignore[union-attr]
    assert set(named()) <= words
