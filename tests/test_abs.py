"""ABS-SGD over an optimizer, in virtual time: the delay, the batch, and that nobody waits."""

from __future__ import annotations

import dataclasses
import io
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import close, loss, net, parameters, plain, same, sgd, train
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.contestants import algorithms, parse
from offbeat.records import Line, read
from offbeat.testing import processes

ABS = offbeat.ABSSGD
PAPER = partial(ABS, in_flight="finish", patience=0.0)
UNDELAYED = partial(ABS, in_flight="finish", patience=math.inf)
TWO_SPEEDS = Cluster.parse(
    """
    workers = 4
    speed = [1.0, 1.0, 0.5, 0.5]
    [compute]
    step_s = 1.0
    [network]
    latency_s = 1e-3
    """
)
SIZES: dict[str, dict[str, Any]] = {"ready": {}, "at least": {"min_batch": 9}}
KINDS = {"bank": ABS, "never": partial(ABS, patience=0.0), "paper": PAPER, "always": UNDELAYED}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_size = pytest.mark.parametrize("settings", SIZES.values(), ids=SIZES)


@dataclass
class Seen:
    """What a worker has seen of one run."""

    values: list[float]
    stats: offbeat.Stats
    conserved: bool
    by_round: dict[int, list[Tensor]]


def quadratic(
    algorithm: offbeat.Algorithm, steps: int = 40, lr: float = 0.25, scheduled: bool = False
) -> Seen:
    """Minimise w^2 / 2 from 1, without noise: w is scaled by integers only; count everything."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    values, conserved, by_round = [1.0], True, {}
    with offbeat.attach(model, opt, algorithm) as dp:
        for _ in range(steps):
            opt.zero_grad()
            (model.weight**2 / 2).sum().backward()
            before = dp.round
            opt.step()
            if dp.round > before:
                values.append(model.weight.item())
            now = dp.stats()
            own = now.applied_samples + now.pending_samples + now.dropped_samples
            conserved &= now.computed_samples == own and now.pending_samples >= 0
            by_round[dp.round] = parameters(model)
    return Seen([*values, model.weight.item()], dp.stats(), conserved, by_round)


def _inside(lines: list[Line]) -> list[Line]:
    """Waits in the loop: those of a worker that ended before its last micro-batch did."""
    last = {line["rank"]: line["to_s"] for line in lines if line["kind"] == "compute"}
    waits = [line for line in lines if line["kind"] == "wait"]
    return [line for line in waits if line["from_s"] < last[line["rank"]]]


# --- the delay -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        (0.25, [1, 1, 0.75, 0.5, 0.3125, 0.1875, 0.109375, 0.0625, 0.03515625]),
        (0.5, [1, 1, 0.5, 0, -0.25, -0.25, -0.125, 0, 0.0625]),
    ],
)
def test_a_gradient_is_applied_exactly_one_round_late(
    workers: int, lr: float, expected: list[float]
) -> None:
    cluster = Cluster.uniform(workers, step_s=1.0)
    for seen in offbeat.run(lambda: quadratic(PAPER(), 24, lr), cluster).results:
        # The first round leaves w as it is in the paper's count: w_1 = w_0.
        assert [1.0, *seen.values][: len(expected)] == expected


def test_different_speeds_change_the_batches_and_not_the_trajectory() -> None:
    run = offbeat.run(lambda: quadratic(PAPER(), 24), TWO_SPEEDS)
    slow = run.results[2]
    assert [1.0, *slow.values][:9] == [
        1,
        1,
        0.75,
        0.5,
        0.3125,
        0.1875,
        0.109375,
        0.0625,
        0.03515625,
    ]


@pytest.mark.parametrize(("lr", "stable"), [(0.9, True), (1.1, False)])
def test_the_delay_halves_the_largest_stable_learning_rate(lr: float, stable: bool) -> None:
    [seen] = offbeat.run(lambda: quadratic(PAPER(), 120, lr), Cluster.uniform(1)).results
    assert (abs(seen.values[-1]) < 0.05) == stable
    [sync] = offbeat.run(lambda: quadratic(offbeat.SyncSGD(), 120, lr), Cluster.uniform(1)).results
    assert abs(sync.values[-1]) < 0.05


@every_size
def test_every_gradient_is_one_round_old_after_the_first_round(settings: dict[str, Any]) -> None:
    for seen in offbeat.run(lambda: quadratic(PAPER(**settings)), TWO_SPEEDS).results:
        rounds = seen.stats.rounds
        assert rounds > 5
        assert seen.stats.staleness == {0: 1, 1: rounds - 1}


@every_size
def test_without_delay_nothing_is_stale(settings: dict[str, Any]) -> None:
    for seen in offbeat.run(lambda: quadratic(UNDELAYED(**settings)), TWO_SPEEDS).results:
        assert seen.stats.staleness == {0: seen.stats.rounds}


@every_size
@every_kind
def test_nothing_is_lost_at_any_moment_and_equal_rounds_have_equal_replicas(
    settings: dict[str, Any], kind: Any
) -> None:
    results = offbeat.run(lambda: quadratic(kind(**settings)), TWO_SPEEDS).results
    for seen in results:
        assert seen.conserved
        assert seen.stats.pending_samples == 0
        common = sorted(set(seen.by_round) & set(results[0].by_round))
        assert len(common) > 3
        assert all(same(seen.by_round[round], results[0].by_round[round]) for round in common)


def test_alone_it_is_sgd_with_a_delay_of_one() -> None:
    model = net()
    opt = sgd(model)
    expected, late = [], None
    for step in range(6):
        opt.zero_grad()
        loss(model, 0, step).backward()
        mine = [parameter.grad.clone() for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), late or mine, strict=True):
            parameter.grad = gradient
        if late is not None:
            opt.step()
        expected.append(parameters(model))
        late = mine
    [(trajectory, _)] = offbeat.run(
        lambda: train(6, PAPER(max_micro_batches=1)), Cluster.uniform(1)
    ).results
    for mine, theirs in zip(trajectory, expected, strict=False):
        assert same(mine, theirs)


# --- the default: what is in flight rides in the next round, what is near is waited for ------


def _slow_from(moment_s: float) -> Cluster:
    """Three equal workers, of which one is ten times slower for a while."""
    return Cluster.parse(
        f"""
        workers = 3
        [compute]
        step_s = 1.0
        [[event]]
        kind = "slow"
        workers = [1]
        factor = 10
        from_s = {moment_s}
        to_s = {moment_s + 1.0}
        """
    )


def test_equal_workers_wait_for_each_other_and_nothing_is_stale() -> None:
    for seen in offbeat.run(lambda: quadratic(ABS(), 20), Cluster.uniform(3)).results:
        assert seen.stats.staleness == {0: 20}
        assert seen.stats.computed_samples == 20


def test_a_round_lasts_as_long_as_the_slowest_and_the_fast_compute_meanwhile() -> None:
    cluster = Cluster.parse(
        "workers = 3\nspeed = [1.0, 1.0, 0.4]\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 1e-3"
    )
    # 2.5 s a micro-batch of the slow one: the fast end two, and are in the middle of a third one.
    steps = lambda: 20 if offbeat.rank() == 2 else 46  # noqa: E731 - all end at once, nearly
    results = offbeat.run(lambda: quadratic(ABS(patience=0.0), steps()), cluster).results
    ends = [each.ended_s for each in results[2].stats.history if each.ended_s < 40]
    assert len(ends) == 14
    lasted = [later - sooner for sooner, later in pairwise(ends)]
    assert all(each == pytest.approx(2.5, abs=0.02) for each in lasted)
    # Two and a half each of the fast, in turn two and three; those in the middle are one late.
    assert [each.samples for each in list(results[0].stats.history)[:4]] == [5, 7, 5, 7]
    assert max(results[0].stats.staleness) == 1


def test_who_is_through_shortly_before_a_round_waits_for_it_and_no_longer_than_its_patience() -> (
    None
):
    lines: list[Line] = []
    run = offbeat.run(lambda: quadratic(ABS(), 30), _slow_from(4.5), records=lines.append)
    assert run.results[1].stats.compute_s == 39  # the fault fired
    waits = [line["to_s"] - line["from_s"] for line in _inside(lines) if line["rank"] == 0]
    long = [wait for wait in waits if wait > 0.01]
    # At 5 s a round is due: it waits for half a micro-batch, then goes on until the round has been.
    assert long
    assert long[0] == pytest.approx(0.5)
    assert all(wait <= 0.51 for wait in long)
    assert run.results[0].stats.computed_samples == 30
    sizes = [each.samples for each in run.results[0].stats.history]
    assert max(sizes) == 15  # two workers have gone on for most of ten seconds


def test_an_exchange_that_takes_longer_than_patience_is_hidden() -> None:
    def took(algorithm: offbeat.Algorithm, exchange_s: float) -> tuple[float, Seen]:
        cluster = Cluster.parse(
            "workers = 4\n[compute]\nstep_s = 1.0\n"
            f"[network]\nlatency_s = {exchange_s / 2}\ncontrol_latency_s = 1e-3"
        )
        run = offbeat.run(lambda: quadratic(algorithm, 30), cluster)
        return run.seconds, run.results[0]

    seconds, seen = took(ABS(), 3.0)
    assert seconds < 2.0 * 30  # it waits for half a micro-batch before each round
    assert max(seen.stats.staleness) <= 2
    assert took(offbeat.SyncSGD(), 3.0)[0] > 4.0 * 30
    seconds, seen = took(ABS(), 0.2)
    assert seconds < 1.2 * 30 + 3
    assert seen.stats.staleness == {0: 30}


def test_one_that_waits_for_every_round_is_synchronous_sgd() -> None:
    def trained(algorithm: offbeat.Algorithm) -> Any:
        return offbeat.run(lambda: train(6, algorithm), TWO_SPEEDS).results

    ours, theirs = trained(ABS(patience=math.inf)), trained(offbeat.SyncSGD())
    for (mine, stats), (expected, _) in zip(ours, theirs, strict=True):
        assert stats.staleness == {0: 6}
        assert all(same(a, b) for a, b in zip(mine, expected, strict=True))


@every_size
@pytest.mark.parametrize("patience", [0.0, 0.5, 2.0])
def test_no_gradient_is_more_than_two_rounds_late(
    settings: dict[str, Any], patience: float
) -> None:
    for latency_s in (1e-3, 0.3):
        cluster = Cluster.parse(
            "workers = 4\nspeed = [1.0, 0.9, 0.5, 0.3]\n"
            f"[compute]\nstep_s = 1.0\n[network]\nlatency_s = {latency_s}"
        )
        for seen in offbeat.run(
            lambda: quadratic(ABS(patience=patience, **settings)), cluster
        ).results:
            assert max(seen.stats.staleness) <= 2


# --- the mean ------------------------------------------------------------------------------


def test_unequal_counts_give_the_gradient_over_the_union() -> None:
    counts = (3, 1, 7, 0)

    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        start = parameters(model)
        with offbeat.attach(model, opt, UNDELAYED(min_batch=sum(counts))):
            for step in range(counts[offbeat.rank()]):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return [before - after for before, after in zip(start, parameters(model), strict=True)]

    model = net()
    each = [(rank, step) for rank, count in enumerate(counts) for step in range(count)]
    for rank, step in each:
        (loss(model, rank, step) / len(each)).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    cluster = Cluster.parse("workers = 4\nspeed = [3.0, 1.0, 7.0, 1.0]\n[compute]\nstep_s = 1.0")
    for gradient in offbeat.run(worker, cluster).results:
        for mine, theirs in zip(gradient, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_micro_batch_each_without_delay_is_synchronous_sgd(workers: int) -> None:
    algorithm = UNDELAYED(max_micro_batches=1)
    run = offbeat.run(lambda: train(6, algorithm), Cluster.uniform(workers))
    for trajectory, _ in run.results:
        for mine, expected in zip(trajectory, plain(workers, 6), strict=True):
            assert same(mine, expected) if workers < 3 else close(mine, expected)


@pytest.mark.slow
def test_so_many_micro_batches_each_without_delay_is_accumulation() -> None:
    def trained(algorithm: offbeat.Algorithm) -> Any:
        return offbeat.run(lambda: train(12, algorithm), TWO_SPEEDS).results

    ours = trained(UNDELAYED(min_batch=12, max_micro_batches=3))
    theirs = trained(offbeat.SyncSGD(micro_batches=3))
    for (mine, stats), (expected, _) in zip(ours, theirs, strict=True):
        assert stats.rounds == 4
        assert all(same(a, b) for a, b in zip(mine, expected, strict=True))


# --- nobody waits --------------------------------------------------------------------------


@every_size
def test_nobody_waits_in_the_loop(settings: dict[str, Any]) -> None:
    lines: list[Line] = []
    offbeat.run(lambda: quadratic(PAPER(**settings)), TWO_SPEEDS, records=lines.append)
    assert {line["rank"] for line in lines if line["kind"] == "compute"} == {0, 1, 2, 3}
    assert sum(line["to_s"] - line["from_s"] for line in _inside(lines)) == 0


def test_only_a_full_pile_waits() -> None:
    lines: list[Line] = []
    algorithm = PAPER(max_micro_batches=1)
    offbeat.run(lambda: quadratic(algorithm, 10), TWO_SPEEDS, records=lines.append)
    waits = [line["to_s"] - line["from_s"] for line in _inside(lines) if line["rank"] == 0]
    assert waits
    assert all(wait == pytest.approx(1.0, abs=0.1) for wait in waits)


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [1e-4, 0.01, 0.15])
def test_samples_per_second_are_the_sum_of_speeds_whatever_the_network(latency_s: float) -> None:
    cluster = Cluster.parse(
        f"workers = 4\nspeed = [1.0, 1.0, 0.5, 0.5]\n[compute]\nstep_s = 1.0\n"
        f"[network]\nlatency_s = {latency_s}"
    )

    lines: list[Line] = []
    steps = lambda: 100 if offbeat.rank() < 2 else 50  # noqa: E731 - all end at once
    offbeat.run(lambda: quadratic(PAPER(), steps()), cluster, records=lines.append)
    computed = [line for line in lines if line["kind"] == "compute"]
    began, ended = (
        f(line[key] for line in computed) for f, key in ((min, "from_s"), (max, "to_s"))
    )
    assert sum(line["samples"] for line in computed) / (ended - began) == pytest.approx(3.0)
    for rank in range(4):
        busy = sum(line["to_s"] - line["from_s"] for line in computed if line["rank"] == rank)
        assert busy / (ended - began) >= 0.99


def test_while_one_join_is_late_the_others_compute() -> None:
    cluster = Cluster.parse(
        """
        workers = 3
        [compute]
        step_s = 1.0
        [[event]]
        kind = "slow"
        workers = [1]
        factor = 10
        from_s = 4.5
        to_s = 5.5
        """
    )
    lines: list[Line] = []
    steps = lambda: 21 if offbeat.rank() == 1 else 30  # noqa: E731 - all end at once
    run = offbeat.run(lambda: quadratic(PAPER(), steps()), cluster, records=lines.append)
    assert [seen.stats.compute_s for seen in run.results] == [30, 30, 30]  # the fault fired
    assert _inside(lines) == []
    sizes = [round.samples for round in run.results[0].stats.history]
    # All that was computed meanwhile is in one round, with what came before each join.
    assert max(sizes) == 11 + 1 + 11
    assert all(seen.stats.staleness == run.results[0].stats.staleness for seen in run.results)
    assert max(run.results[0].stats.staleness) == 1


# --- bounds --------------------------------------------------------------------------------


def test_min_batch_is_kept_while_everyone_is_here() -> None:
    results = offbeat.run(lambda: quadratic(PAPER(min_batch=13)), TWO_SPEEDS).results
    history = results[0].stats.history
    here = [round.samples for round in history if round.ended_s < 38]  # the fast leave at 40 s
    # 12 after four seconds, 14 after five: called then, and handed over in the sixth.
    assert here == [18] * 5


@pytest.mark.slow
def test_the_others_go_on_without_a_dead_slow_worker_and_its_staleness_is_told() -> None:
    cluster = Cluster.parse("workers = 3\nspeed = [1.0, 1.0, 0.02]\n[compute]\nstep_s = 1.0")

    def rounds(algorithm: offbeat.Algorithm) -> offbeat.Stats:
        steps = lambda: 2 if offbeat.rank() == 2 else 100  # noqa: E731
        results = offbeat.run(lambda: quadratic(algorithm, steps()), cluster).results
        assert all(seen.conserved and seen.stats.pending_samples == 0 for seen in results)
        stats: offbeat.Stats = results[0].stats
        return stats

    assert rounds(PAPER()).rounds <= 4
    stats = rounds(PAPER(max_wait_s=2.0))
    assert stats.rounds >= 30
    stale = [round for round in stats.history if 2 in round.ranks]
    assert len(stale) == 2
    between = [n for n, round in enumerate(stats.history) if 2 in round.ranks]
    # Its first gradient knows of nothing: as many rounds late as there were before it.
    assert stale[0].staleness_rounds == stale[0].round
    assert between[0] > 15


@every_kind
def test_a_full_pile_does_not_wait_for_ever_for_a_dead_slow_worker(kind: Any) -> None:
    cluster = Cluster.parse("workers = 2\nspeed = [1.0, 0.05]\n[compute]\nstep_s = 1.0")
    algorithm = kind(max_micro_batches=1, max_wait_s=1.5)
    steps = lambda: 1 if offbeat.rank() else 10  # noqa: E731
    run = offbeat.run(lambda: quadratic(algorithm, steps()), cluster)
    assert run.results[0].stats.steps == 10
    assert run.results[0].stats.rounds >= 8
    assert run.results[0].stats.wait_s < 12  # at most 0.5 s a step, and the join


@pytest.mark.parametrize(
    "settings",
    [
        {"min_batch": 100},
        {"min_batch": 2.5, "max_micro_batches": None},
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_nobody_hangs_where_full_piles_are_less_than_a_round_needs(
    settings: dict[str, Any], workers: int
) -> None:
    algorithm = ABS(**{"max_micro_batches": 2, **settings})
    for seen in offbeat.run(lambda: quadratic(algorithm, 9), Cluster.uniform(workers)).results:
        assert seen.stats.steps == 9
        assert seen.stats.rounds >= 3
        assert seen.stats.pending_samples == 0


@every_kind
def test_full_piles_do_not_wait_for_the_samples_of_a_worker_that_was_lost(kind: Any) -> None:
    cluster = Cluster.parse(
        """
        workers = 3
        [compute]
        step_s = 1.0
        [network]
        latency_s = 1e-3
        [[event]]
        kind = "crash"
        worker = 1
        at_s = 3.5
        """
    )

    def worker() -> int:
        model = net()
        opt = sgd(model)
        algorithm = kind(min_batch=100, max_micro_batches=2)
        with offbeat.attach(model, opt, algorithm, survive=True) as dp:
            for step in range(12):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return dp.stats().rounds

    assert min(each for each in offbeat.run(worker, cluster).results if each is not None) >= 5


# --- checkpoints ---------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    **SIZES,
    "paper": {"in_flight": "finish", "patience": 0.0},
    "never waits": {"patience": 0.0},
    "full": {"max_micro_batches": 2},
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, id=name, marks=() if name in ("ready", "paper") else pytest.mark.slow)
        for name, each in RESUMED.items()
    ],
)
def test_a_run_resumes_bit_for_bit(settings: dict[str, Any]) -> None:
    resumes_bit_for_bit(ABS(**settings), TWO_SPEEDS)


def resumes_bit_for_bit(
    algorithm: offbeat.Algorithm, cluster: Cluster, half: int = 12, **settings: Any
) -> None:
    def worker(begin: int, saved: list[bytes]) -> Any:
        rank = offbeat.rank()
        model = net()
        opt = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
        state = torch.load(io.BytesIO(saved[rank]), weights_only=True) if begin else {}
        if begin:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["optimizer"])
        with offbeat.attach(model, opt, algorithm, scheduler=scheduler, **settings) as dp:
            if begin:
                dp.load_state_dict(state["dp"])
            for step in range(begin, 2 * half):
                opt.zero_grad()
                dp.samples(1 + (rank + step) % 3)
                loss(model, rank, step).backward()
                opt.step()
                if step + 1 == half:
                    dp_state = dp.state_dict()
                    file = io.BytesIO()
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "optimizer": opt.state_dict(),
                            "dp": dp_state,
                        },
                        file,
                    )
                    saved[rank] = file.getvalue()
        return parameters(model), dp.round

    saved = [b""] * cluster.workers
    whole = offbeat.run(lambda: worker(0, saved), cluster).results
    resumed = offbeat.run(lambda: worker(half, saved), cluster).results
    for (expected, rounds), (mine, again) in zip(whole, resumed, strict=True):
        assert rounds == again
        assert same(expected, mine)


# --- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_flight": "never"}, "in_flight must be one of 'bank', 'finish', got 'never'"),
        ({"patience": -1}, "patience must be 0 or more micro-batches, got -1"),
        ({"patience": math.nan}, "patience must be 0 or more micro-batches, got nan"),
        ({"patience": math.inf, "min_batch": 8}, "rounds cannot come to min_batch=8"),
        ({"max_micro_batches": 2.5}, "max_micro_batches must be a whole number above 0, got 2.5"),
        ({"max_wait_s": 0.0}, "max_wait_s must be above 0, got 0.0"),
        ({"min_batch": -1}, "min_batch must be 0 or more samples, got -1"),
        ({"min_batch": float("inf")}, "min_batch must be 0 or more samples, got inf"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ABS(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"apply_on_arrival": True}, "ABSSGD has no apply_on_arrival any more: it brought nothing"),
        ({"trigger": "timer", "period_s": 1.0}, "ABSSGD has no trigger any more: by default a"),
        ({"delay": 1}, 'no delay any more: for 1 say in_flight="finish", patience=0'),
        ({"max_batch": 64}, "no max_batch any more: the default is faster"),
    ],
)
def test_a_setting_that_is_gone_says_what_to_do_without_it(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        ABS(**settings)
    written = ",".join(f"{name}={value}" for name, value in settings.items())
    with pytest.raises(ValueError, match=message):  # on the command line of a race
        parse(f"abs:{written}")


def test_a_setting_that_is_gone_is_none_that_there_is() -> None:
    for algorithm in algorithms().values():
        names = {field.name for field in dataclasses.fields(algorithm)}
        assert not names & set(algorithm.removed)
        assert {name.partition("=")[0] for name in algorithm.removed if "=" in name} <= names
        assert len(names) <= 8  # DiLoCo: three papers in one file


# --- real processes ------------------------------------------------------------------------


def _paced() -> Any:
    model = net(seed=offbeat.rank())
    opt = sgd(model)
    steps = (40, 40, 20)[offbeat.rank()]
    with offbeat.attach(model, opt, PAPER()) as dp:
        for step in range(steps):
            opt.zero_grad()
            loss(model, offbeat.rank(), step).backward()
            opt.step()
    return parameters(model), dp.stats()


@pytest.mark.real
def test_nobody_waits_on_real_processes_either(tmp_path: Path) -> None:
    cluster = tmp_path / "three.toml"
    cluster.write_text("workers = 3\nspeed = [1.0, 1.0, 0.5]\n[compute]\nstep_s = 0.05\n")
    environment = {"OFFBEAT_PACE": str(cluster), "OFFBEAT_RECORDS": str(tmp_path / "records")}
    ended = processes(_paced, 3, environment=environment)
    lines = list(read(tmp_path / "records"))
    for rank, each in enumerate(ended):
        (mine, stats), (first, _) = each.result, ended[0].result
        assert same(mine, first)
        assert stats.replicas_identical
        assert set(stats.staleness) <= {0, 1}
        computed = [line for line in lines if line["kind"] == "compute" and line["rank"] == rank]
        assert len(computed) == stats.steps
        gaps = sum(after["from_s"] - before["to_s"] for before, after in pairwise(computed))
        # In lockstep the fast ones wait for half of the time; a busy machine costs a little, too.
        assert gaps < 0.25 * (computed[-1]["to_s"] - computed[0]["from_s"])


def _trained(*_: Any) -> list[Tensor]:
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, ABS()):
        for step in range(60):
            opt.zero_grad()
            loss(model, offbeat.rank(), step).backward()
            opt.step()
    return parameters(model)


def test_one_worker_alone_waits_for_its_rounds_however_short_its_steps_are() -> None:
    shorter = "workers = 1\n[compute]\nstep_s = 0.001\n[overhead]\nexchange_s = 0.01"
    (alone,) = offbeat.run(_trained, Cluster.parse(shorter)).results
    assert same(alone, plain(1, 60)[-1])


@pytest.mark.parametrize(("latency_s", "times"), [(0.01, 0), (0.3, 1)])
def test_who_is_late_in_most_rounds_is_told_once_what_that_asks_of_momentum(
    latency_s: float, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    net_s = f"[compute]\nstep_s = 1.0\n[network]\nlatency_s = {latency_s}"
    offbeat.run(_trained, Cluster.parse(f"workers = 2\n{net_s}"))
    told = [each.getMessage() for each in caplog.records if "one update late" in each.getMessage()]
    assert len(told) == times
