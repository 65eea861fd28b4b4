"""What every algorithm promises, in both worlds, from one table.

A new algorithm gets a row here. The promises:

- with no slow worker and everyone in every round it equals plain synchronous SGD, bit for bit
  where the order of additions allows it;
- replicas are bit-identical at the end, whatever the cluster does;
- no gradient is lost: computed = applied + pending + dropped, at the end with nothing pending;
- nobody hangs when workers have unequal amounts of data, or none;
- nobody trains on alone when a worker is lost: all learn of it, and who it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from nets import close, loss, net, plain, same, sgd, threads_left, train

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.events import Join
from offbeat.errors import WorkerLostError
from offbeat.testing import processes


@dataclass(frozen=True)
class Contract:
    """One algorithm with its settings, and the settings that make it synchronous."""

    make: Callable[[int], offbeat.Algorithm]
    """For a number of workers."""
    synchronous: Callable[[int], offbeat.Algorithm]
    exact: bool = True
    """Whether two workers give the same bits; a mean of models rounds differently."""
    delayed: bool = False
    """There is no synchronous form: with the same data on all workers it equals plain training."""
    alone: bool = False
    """There is no synchronous form but that of one worker: every gradient comes by itself."""


WAGMA: dict[str, dict[str, Any]] = {
    "pairs": {"group": 2, "period": 3},
    "fours": {"group": 4, "period": 5},
    "default": {},
    "alone": {"group": 1, "period": 2},
    "solo": {"period": 3, "period_quorum": "solo"},
    "delay": {"group": 2, "delay": 1},
    "quorum": {"group": 4, "quorum": 0.5},
    "paper": {"group": 2, "late": "paper"},
    "momentum": {"group": 2, "momentum": "averaged"},
}


def _fitting(workers: int, group: int | None) -> int | None:
    """As many, where that divides the workers."""
    return None if group is None or workers % group else group


ASYNCHRONOUS: dict[str, dict[str, dict[str, Any]]] = {
    "ASGD": {"plain": {}, "adaptive": {"delay_adaptive": True}, "twos": {"micro_batches": 2}},
    "RingmasterASGD": {
        "auto": {},
        "never": {"max_delay": 2, "stop": "never"},
        "expired": {"max_delay": 3, "stop": "expired"},
        "longer": {"max_delay": 1, "stop": "longer"},
        "twos": {"max_delay": 2, "stop": "expired", "micro_batches": 2},
    },
    "RennalaSGD": {"auto": {}, "five": {"batch": 5}, "unstopped": {"batch": 3, "stop": False}},
    "RingleaderASGD": {"plain": {}, "twos": {"micro_batches": 2}},
    "RescaledASGD": {"plain": {}, "bounded": {"max_delay": 3}},
}
_SEVERAL = ("micro_batches", "batch")  # what has one worker, too, make a step of several gradients

ALGORITHMS: dict[str, Contract] = {
    "sync": Contract(lambda _: offbeat.SyncSGD(), lambda _: offbeat.SyncSGD()),
    "sync-no-overlap": Contract(
        lambda _: offbeat.SyncSGD(overlap=False), lambda _: offbeat.SyncSGD(overlap=False)
    ),
    "sync-accumulate": Contract(
        lambda _: offbeat.SyncSGD(micro_batches=2), lambda _: offbeat.SyncSGD()
    ),
    **{
        f"eager-{quorum}": Contract(
            lambda _, quorum=quorum: offbeat.EagerSGD(quorum),  # type: ignore[misc]
            lambda workers: offbeat.EagerSGD(workers),
        )
        for quorum in ("solo", "majority", "first:2", "last:2", 2, 0.6, "all")
    },
    "eager-drop": Contract(
        lambda _: offbeat.EagerSGD("solo", late="drop"),
        lambda _: offbeat.EagerSGD("all", late="drop"),
    ),
    "eager-bounded": Contract(
        lambda _: offbeat.EagerSGD("solo", max_staleness_rounds=2),
        lambda _: offbeat.EagerSGD("solo", max_staleness_rounds=0),
    ),
    "eager-workers": Contract(
        lambda _: offbeat.EagerSGD("majority", average="workers"),
        lambda _: offbeat.EagerSGD("all", average="workers"),
    ),
    "eager-delay": Contract(
        lambda _: offbeat.EagerSGD("solo", delay=1), lambda _: offbeat.EagerSGD("all")
    ),
    "eager-delay-bounded": Contract(
        lambda _: offbeat.EagerSGD(2, delay=1, max_staleness_rounds=1),
        lambda _: offbeat.EagerSGD("solo", max_staleness_rounds=0),
    ),
    **{
        f"abs-{name}": Contract(
            lambda _, settings=settings: offbeat.ABSSGD(**settings),  # type: ignore[misc]
            lambda _, settings=settings, full=full: offbeat.ABSSGD(  # type: ignore[misc]
                **{**settings, **full, "patience": inf, "max_micro_batches": 1}
            ),
        )
        for name, settings, full in (
            ("ready", {}, {}),
            ("never-waits", {"patience": 0.0}, {}),
            ("paper", {"in_flight": "finish", "patience": 0.0}, {}),
            ("undelayed", {"in_flight": "finish", "patience": inf}, {}),
            ("bounds", {"min_batch": 9}, {"in_flight": "finish"}),
            ("cap", {"max_wait_s": 0.2}, {}),
        )
    },
    **{
        f"waitfree-{name}": Contract(
            lambda _, settings=settings: offbeat.WaitFreeLocalSGD(**settings),  # type: ignore[misc]
            lambda _, settings=settings: offbeat.WaitFreeLocalSGD(  # type: ignore[misc]
                **{**settings, "delay": 0, "max_steps": 1}
            ),
            exact=False,
        )
        for name, settings in {
            "ready": {},
            "workers": {"fixed_point": "workers"},
            "full": {"max_steps": 3},
            "undelayed": {"delay": 0, "min_batch": 9},
        }.items()
    },
    **{
        f"nonblocking-{in_flight}": Contract(
            lambda _, in_flight=in_flight: offbeat.NonblockingSGD(3, in_flight),  # type: ignore[misc]
            lambda _, in_flight=in_flight: offbeat.NonblockingSGD(1, in_flight),  # type: ignore[misc]
        )
        for in_flight in ("finish", "bank")
    },
    "eager-step": Contract(
        lambda _: offbeat.EagerSGD("majority", lateness="step"),
        lambda _: offbeat.EagerSGD("all", lateness="step"),
    ),
    "dropcompute": Contract(
        lambda _: offbeat.DropCompute(3, threshold_s=0.15), lambda _: offbeat.DropCompute(1)
    ),
    "dropcompute-auto": Contract(
        lambda _: offbeat.DropCompute(2, window_rounds=2), lambda _: offbeat.DropCompute(1)
    ),
    "dropcompute-constant": Contract(
        lambda _: offbeat.DropCompute(3, threshold_s=0.15, normalise="constant"),
        lambda _: offbeat.DropCompute(1, normalise="constant"),
    ),
    "lbbsp": Contract(lambda _: offbeat.LBBSP(2), lambda _: offbeat.LBBSP(1)),
    "local": Contract(lambda _: offbeat.LocalSGD(3), lambda _: offbeat.LocalSGD(1), exact=False),
    "local-speed": Contract(
        lambda _: offbeat.LocalSGD(3, shares="speed"),
        lambda _: offbeat.LocalSGD(1, shares="speed"),
        exact=False,
    ),
    **{
        f"dasgd-{name}": Contract(
            lambda _, settings=settings: offbeat.DaSGD(**settings),  # type: ignore[misc]
            lambda _, settings=settings: offbeat.DaSGD(  # type: ignore[misc]
                **{**settings, "merge": "delta", "quorum": "all"}
            ),
            exact=False,
            delayed=True,
        )
        for name, settings in {
            "auto": {"steps": 3},
            "late": {"steps": 2, "delay": 2},
            "paper": {"steps": 2, "delay": 1, "merge": "paper"},
            "solo": {"steps": 2, "delay": 1, "quorum": "solo"},
            "quorum": {"steps": 2, "delay": 2, "quorum": 2},
        }.items()
    },
    **{
        f"diloco-{name}": Contract(
            lambda _, settings=settings: offbeat.DiLoCo(**settings),  # type: ignore[misc]
            lambda workers, settings=settings: offbeat.DiLoCo(  # type: ignore[misc]
                1, lr=1.0, momentum=0.0, quorum=workers if "quorum" in settings else "all"
            ),
            exact=False,
        )
        for name, settings in {
            "plain": {"steps": 3},
            "overlap": {"steps": 2, "overlap": 1},
            "quorum": {"steps": 2, "lr": 0.5, "momentum": 0.5, "quorum": 2},
            "grace": {"steps": 3, "overlap": 2, "quorum": "solo", "grace_s": 0.2},
            "fragments": {"steps": 4, "fragments": 2, "overlap": 1},
            "streams": {"steps": 3, "fragments": 3, "overlap": 1, "quorum": 2},
        }.items()
    },
    **{
        f"{name.lower()}-{graph}": Contract(
            lambda _, name=name, graph=graph: getattr(offbeat, name)(graph),  # type: ignore[misc]
            lambda _, name=name: getattr(offbeat, name)("complete"),  # type: ignore[misc]
            exact=False,
        )
        for name, graph in {
            "DPSGD": "one-peer",
            "DmSGD": "ring",
            "DecentLaM": "mesh",
            "EDM": "lazy-ring",
            "MomentumTracking": "exponential",
        }.items()
    },
    **{
        f"wagma-{name}": Contract(
            lambda workers, settings=settings: offbeat.WAGMASGD(  # type: ignore[misc]
                **{**settings, "group": _fitting(workers, settings.get("group"))}
            ),
            lambda workers, settings=settings: offbeat.WAGMASGD(  # type: ignore[misc]
                **{**settings, "group": workers, "quorum": "all", "delay": 0}
            ),
            exact=False,
        )
        for name, settings in WAGMA.items()
    },
    "msync": Contract(lambda _: offbeat.MSyncSGD(2), lambda workers: offbeat.MSyncSGD(workers)),
    "msync-topup": Contract(
        lambda _: offbeat.MSyncSGD(2, top_up=True),
        lambda workers: offbeat.MSyncSGD(workers, top_up=True),
        alone=True,
    ),
    **{
        f"{name.lower()}-{kind}": Contract(
            lambda _, name=name, settings=settings: getattr(offbeat, name)(**settings),  # type: ignore[misc]
            lambda _, name=name, settings=settings: getattr(offbeat, name)(  # type: ignore[misc]
                **{key: value for key, value in settings.items() if key not in _SEVERAL}
            ),
            alone=True,
        )
        for name, kinds in ASYNCHRONOUS.items()
        for kind, settings in kinds.items()
    },
}

BUCKETS = 16
"""Bytes: small, so that there are three of them."""

CLUSTERS = [
    "uniform-8",
    "two-slow-of-eight",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("noisy-neighbours-16", "eager-cifar-8", "changing-8")
    ),
]

# Of each algorithm one or two in the fast subset, its other settings in the whole suite.
SOON = {
    *("sync", "eager-solo", "eager-majority", "eager-2", "msync", "abs-ready", "abs-bounds"),
    *("nonblocking-finish", "dropcompute", "dropcompute-auto", "lbbsp", "local"),
    *("local-speed", "dasgd-auto", "dasgd-quorum", "diloco-plain", "diloco-grace"),
    *("dpsgd-one-peer", "decentlam-mesh", "momentumtracking-exponential"),
    "diloco-streams",
    *("wagma-pairs", "wagma-fours"),
    *("asgd-plain", "ringmasterasgd-expired", "rennalasgd-five", "ringleaderasgd-plain"),
    *("rescaledasgd-plain", "msync-topup"),
}
every_algorithm = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOON else pytest.mark.slow) for name in ALGORITHMS],
)


def _uneven(rank: int) -> int:
    return (7, 3, 0, 5, 6, 1, 4, 2)[rank % 8]


def _kept(results: list[Any], steps: Callable[[int], int]) -> None:
    for rank, (trajectory, stats) in enumerate(results):
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.replicas_identical
        assert stats.steps == steps(rank)
        assert stats.pending_samples == 0
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[] if name in SOON else pytest.mark.slow)
        for name, contract in ALGORITHMS.items()
        for workers in ([1] if contract.alone else [1, 2, 3, 8])
    ],
)
def test_without_a_slow_worker_it_equals_synchronous_sgd(name: str, workers: int) -> None:
    algorithm = ALGORITHMS[name].synchronous(workers)
    delayed = ALGORITHMS[name].delayed
    data = (lambda rank: 0) if delayed else None
    run = offbeat.run(lambda: train(algorithm=algorithm, data=data), Cluster.uniform(workers))
    for trajectory, _ in run.results:
        for mine, expected in zip(trajectory, plain(1 if delayed else workers), strict=True):
            # One or two contributions have one sum; of more, the order decides the last bit.
            exact = workers == 1 or (workers == 2 and ALGORITHMS[name].exact)
            assert same(mine, expected) if exact else close(mine, expected)


@every_algorithm
def test_alone_it_equals_plain_pytorch_bit_for_bit(name: str) -> None:
    trajectory, stats = train(algorithm=ALGORITHMS[name].synchronous(1), size=lambda _: 7)
    for mine, expected in zip(trajectory, plain(1, size=lambda _: 7), strict=True):
        assert same(mine, expected)
    assert stats.pending_samples == 0
    assert threads_left() == []


@every_algorithm
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_nothing_is_lost_and_replicas_are_identical_on_any_cluster(name: str, cluster: str) -> None:
    algorithm = ALGORITHMS[name].make(Cluster.load(cluster).workers)
    run = offbeat.run(
        lambda: train(algorithm=algorithm, steps=_uneven, bucket_bytes=BUCKETS), cluster, seed=5
    )
    _kept(run.results, _uneven)


@every_algorithm
def test_a_run_is_deterministic(name: str) -> None:
    algorithm = ALGORITHMS[name].make(8)
    first, again = (
        offbeat.run(
            lambda: train(algorithm=algorithm, bucket_bytes=BUCKETS), "two-slow-of-eight", seed=1
        )
        for _ in range(2)
    )
    assert first.seconds == again.seconds
    assert same(first.results[3][0][-1], again.results[3][0][-1])


def _train_with_joiner(algorithm: offbeat.Algorithm) -> tuple[int, Any]:
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm, bucket_bytes=BUCKETS, survive=True) as dp:
        began = dp.round
        for step in dp.rounds(10):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
    return began, dp.stats()


@every_algorithm
def test_a_worker_may_join_and_is_like_the_others(name: str) -> None:
    """Without a line of the algorithm's own."""
    at_s = offbeat.run(
        lambda: _train_with_joiner(ALGORITHMS[name].make(3)), Cluster.uniform(3)
    ).seconds
    events = (Join(kind="join", worker=1, at_s=at_s / 3),)
    cluster = Cluster.uniform(3).model_copy(update={"events": events})
    told = offbeat.run(lambda: _train_with_joiner(ALGORITHMS[name].make(3)), cluster).results
    assert told[1][0] > 0  # it has begun in the middle
    for _, stats in told:
        assert stats.replicas_identical
        assert stats.steps > 0
        assert stats.computed_samples == stats.applied_samples + stats.dropped_samples


def _train_each(names: list[str], workers: int) -> dict[str, Any]:
    return {
        name: train(algorithm=ALGORITHMS[name].make(workers), steps=_uneven, bucket_bytes=BUCKETS)
        for name in names
    }


def _family(name: str) -> str:
    return name.partition("-")[0]


every_family = pytest.mark.parametrize("family", sorted({_family(name) for name in ALGORITHMS}))


@pytest.mark.real
@every_family
def test_the_same_holds_on_real_processes(family: str) -> None:
    names = [name for name in ALGORITHMS if _family(name) == family]
    ended = processes(_train_each, 3, names, 3)
    for name in names:
        _kept([each.result[name] for each in ended], _uneven)


def _lose_one(algorithm: offbeat.Algorithm, victim: int, at: int) -> float:
    """Train until a worker fails; return the seconds until this one has learned of it."""
    model = net()
    opt = sgd(model)
    step, began = 0, time.monotonic()
    try:
        with offbeat.attach(model, opt, algorithm, bucket_bytes=BUCKETS) as dp:
            while True:
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                began = time.monotonic()
                if step == at and dp.rank == victim:
                    raise KeyError("a bad batch")
                opt.step()
                step += 1
    except WorkerLostError as error:
        lost = error.rank
    except KeyError:
        lost = offbeat.rank()
    told_s = time.monotonic() - began
    assert lost == victim
    assert threads_left() == []
    return told_s


def _lose_one_with_each(names: list[str], workers: int, times: int) -> list[float]:
    return [
        _lose_one(ALGORITHMS[name].make(workers), victim=number % workers, at=number % 5)
        for number, name in enumerate(names * times)
    ]


@pytest.mark.real
@every_family
def test_all_learn_of_a_lost_worker(family: str) -> None:
    names = [name for name in ALGORITHMS if _family(name) == family]
    for ended in processes(_lose_one_with_each, 4, names, 4, -(-6 // len(names))):
        assert max(ended.result) < 20
