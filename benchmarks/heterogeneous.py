"""Workers of different and changing speed: who computes all the time, and who learns first?

Four workers, two of them at half speed, or slowed down now and then, or both. Three parts:

    utilisation  real paced processes, and the same cluster and noise in virtual time: the share of
                 the time that is spent computing, and the samples per second, over the sum of what
                 the workers would compute without each other
    agreement    the same figures: samples per second predicted in virtual time over those measured
    convergence  in virtual time, Fashion-MNIST (on Debian: apt-get install dataset-fashion-mnist;
                 without it, digits) at 14 x 14 pixels by a ResNet of 20,000 parameters: virtual
                 seconds until a target accuracy

ABS-SGD here is "as we understand its abstract" (arXiv 2308.15164): 1.30 times as fast to converge
as the best baseline, on average over three kinds of cluster, with ResNet-18 and four workers.

The clusters of `convergence`: a micro-batch takes 0.1 s; `static` has two workers at half speed and
next to no noise; `dynamic` has equal workers with log-normal noise, and now and then one of them is
at a third of its speed for some seconds; `both` has both. The network is that of a ResNet-18: its
gradient of 46.8 MB takes 0.56 s over Gigabit Ethernet, and 0.056 s over a `cheap` one of ten times
the bandwidth; the bandwidth is scaled to our small model. Where messages are cheap and speeds
hardly vary, ABS-SGD's delay buys nothing: expect it to lose there.

Equal terms. Every algorithm has the same micro-batches, initial model and noise, SGD with averaged
gradients clipped at norm 1, and a grid of its own of the same size: learning rate times size of a
round. That is M micro-batches of each worker, which for ABS-SGD means a `min_batch` of as many
samples of all; ASGD, which has no such size, has four learning rates. What lies beyond the grid was
tried for those that it might suit, with one seed: rates of 0.1, 0.2 and 1.6, M of 1, 32 and 64.
Better were DDP with 1.6, by 2 %, and local SGD with an M of 32 on `dynamic`, by 18 %. The point
with the shortest time to the target on validation images is taken, with a seed of its own; then
come fresh seeds and test images. Every worker draws from all the data: static shards would favour
the data of fast workers. The target counts as reached when the mean of five evaluations is, and
there a run ends. The rows hold all evaluations.

    ddp          SyncSGD in virtual time; in the real world DistributedDataParallel, paced by hand
    abs, paper   ABSSGD(in_flight="finish", patience=0): all is one round late, as in its abstract
    abs, local   WaitFreeLocalSGD(): one's own gradients at once, the others' a round later
    ..., bank    what the round would have waited for rides in the next one

    python benchmarks/heterogeneous.py [--part utilisation|convergence] [--quick] [--json FILE]

All of `convergence` takes hours. It writes what it has after every algorithm, and leaves alone what
FILE holds of other algorithms and clusters: it may be run in pieces (--clusters, --algorithms).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat import testing
from offbeat.lab import digits

WORKERS = 4
BATCH = 4
"""Samples of a micro-batch."""
CLIP_NORM = 1.0
SMOOTHED = 5
"""Evaluations whose mean must reach the target."""
WINDOW_ROUNDS = 10
"""Of DropCompute's automatic threshold: the runs are short."""

Row = dict[str, Any]
CONTESTANTS: dict[str, Callable[[int], offbeat.Algorithm]] = {
    "ddp": lambda m: offbeat.SyncSGD(micro_batches=m),
    "lbbsp": lambda m: offbeat.LBBSP(m),
    "local": lambda m: offbeat.LocalSGD(m),
    "dropcompute": lambda m: offbeat.DropCompute(m, window_rounds=WINDOW_ROUNDS),
    "nonblocking": lambda m: offbeat.NonblockingSGD(m),
    "nonblocking, bank": lambda m: offbeat.NonblockingSGD(m, in_flight="bank"),
    "asgd": lambda m: offbeat.ASGD(),
    "asgd, adaptive": lambda m: offbeat.ASGD(delay_adaptive=True),
    "abs": lambda m: offbeat.ABSSGD(min_batch=samples_of(m)),
    "abs, paper": lambda m: offbeat.ABSSGD("finish", patience=0.0, min_batch=samples_of(m)),
    "abs, local": lambda m: offbeat.WaitFreeLocalSGD(min_batch=samples_of(m)),
}
RATES_ALONE = (0.8, 0.4, 0.2, 0.1)
"""Of ASGD, whose every micro-batch is a round."""
BASELINES = ("ddp", "lbbsp", "local", "dropcompute")


def samples_of(micro_batches: int) -> float:
    """The samples of a round in which every worker has so many micro-batches; 2 is no bound."""
    return float(micro_batches * WORKERS * BATCH) if micro_batches > 2 else 0.0


# --- clusters ------------------------------------------------------------------------------

MICRO_BATCH_S = 0.1
RESNET18_BYTES = 46.8e6
GIGABIT_BYTES_PER_S = 125e6


def convergence_clusters() -> dict[str, offbeat.Cluster]:
    """The clusters to learn on; the network carries our gradient as slowly as a ResNet-18's."""
    ours_bytes = 4 * sum(parameter.numel() for parameter in resnet().parameters())
    bandwidth = GIGABIT_BYTES_PER_S * ours_bytes / RESNET18_BYTES
    half = "speed = [1.0, 1.0, 0.5, 0.5]\n"
    calm, noisy = _lognormal(0.05), _lognormal(0.4) + _slowed_now_and_then()
    texts = {
        "static": (half, calm, bandwidth),
        "dynamic": ("", noisy, bandwidth),
        "both": (half, noisy, bandwidth),
        "static, cheap": (half, calm, 10 * bandwidth),
        "both, cheap": (half, noisy, 10 * bandwidth),
    }
    return {
        name: offbeat.Cluster.parse(
            f"workers = {WORKERS}\n{speed}[compute]\nstep_s = {MICRO_BATCH_S}\n{noise}"
            f"[network]\nlatency_s = 200e-6\nbandwidth_bytes_per_s = {wide}\n"
        )
        for name, (speed, noise, wide) in texts.items()
    }


def _lognormal(sigma: float) -> str:
    return f'[[noise]]\nkind = "lognormal"\nsigma = {sigma}\n'


def _slowed_now_and_then() -> str:
    """In every stretch of 8 s another worker, drawn, is at a third of its speed for 4 s."""
    draw = random.Random(0)
    return "".join(
        f'[[event]]\nkind = "slow"\nworkers = [{draw.randrange(WORKERS)}]\n'
        f"from_s = {start}\nto_s = {start + 4}\nfactor = 3\n"
        for start in range(0, 400, 8)
    )


def paced_cluster() -> offbeat.Cluster:
    """Two at half speed, with noise, over a network like Gloo's on one machine."""
    return offbeat.Cluster.parse(
        f"workers = {WORKERS}\nspeed = [1.0, 1.0, 0.5, 0.5]\n[compute]\nstep_s = 0.04\n"
        f"{_lognormal(0.2)}[network]\nlatency_s = 500e-6\nbandwidth_bytes_per_s = 1e9\n"
    )


def own_speed(cluster: offbeat.Cluster, rank: int, seed: int, steps: int) -> float:
    """Samples per second of a worker that never waits, over its first steps."""
    device, now = cluster.device(rank, seed), 0.0
    for step in range(steps):
        now += device.seconds(step, BATCH, now)
    return steps * BATCH / now


# --- the task ------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.around: nn.Module = nn.Identity()
        if stride > 1 or narrow != wide:
            self.around = nn.Conv2d(narrow, wide, 1, stride, bias=False)
        self.through = nn.Sequential(
            *(nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.GroupNorm(4, wide), nn.ReLU()),
            *(nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.GroupNorm(4, wide)),
        )

        nn.init.zeros_(self.through[-1].weight)  # begin as the way around: usual, and smoother

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.around(x) + self.through(x))


def resnet() -> nn.Module:
    """Three stages; GroupNorm, since running statistics would differ between workers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.GroupNorm(4, 8), nn.ReLU()),
        *(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, 10)),
    )


@dataclass(frozen=True)
class Images:
    """What to train on, what to tune on, and what to test on."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@cache
def images(train: int, scored: int) -> Images:
    """So many training images, and so many for validation and test each."""
    if (folder := common.fashion_folder()) is None:
        train_x, train_y, test_x, test_y = digits.split()
        x, test_x = ((some - 0.305) / 0.376 for some in (train_x, test_x))
        x, test_x = x.view(-1, 1, 8, 8), test_x.view(-1, 1, 8, 8)
        cut = len(test_x)
        validation = x[:cut], train_y[:cut]
        return Images((x[cut:], train_y[cut:]), validation, (test_x, test_y))
    (x, y), (test_x, test_y) = (common.fashion(folder, part) for part in ("train", "t10k"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    tuned_on, trained_on = order[:scored], order[scored : scored + train]
    return Images(
        (_halved(x[trained_on]), y[trained_on]),
        (_halved(x[tuned_on]), y[tuned_on]),
        (_halved(test_x[:scored]), test_y[:scored]),
    )


def _halved(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(x, 2)


def batches(x: Tensor, y: Tensor, rank: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end, of all the data, in this worker's own order."""
    order = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        epoch = torch.randperm(len(x), generator=order)
        for some in epoch[: len(x) // BATCH * BATCH].split(BATCH):
            yield x[some], y[some]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


# --- what a run comes to -------------------------------------------------------------------


@dataclass
class Part:
    """What one worker did in a run."""

    seconds: float = 0.0
    steps: int = 0
    samples: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    dropped_samples: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)
    round_samples: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, dp: offbeat.Attachment, since_s: float) -> Part:
        """What has been done from `since_s` to now, with the totals of the whole run."""
        stats = dp.stats()
        return cls(
            dp.seconds - since_s,
            stats.steps,
            stats.computed_samples,
            stats.compute_s,
            stats.wait_s,
            stats.dropped_samples,
            dict(stats.staleness),
            [each.samples for each in stats.history],
        )


def figures(parts: list[Part], cluster: offbeat.Cluster, seed: int) -> Row:
    """Put the workers of a run together."""
    compute_s, wait_s = (sum(getattr(one, key) for one in parts) for key in ("compute_s", "wait_s"))
    computed = sum(one.samples for one in parts)
    staleness, rounds = Counter(parts[0].staleness), sorted(parts[0].round_samples)
    return {
        "utilization": compute_s / (compute_s + wait_s),
        "samples_per_s": sum(one.samples / one.seconds for one in parts),
        "sum_of_speeds": sum(
            own_speed(cluster, rank, seed, one.steps) for rank, one in enumerate(parts)
        ),
        "round_samples_p10_p50_p90": [
            rounds[int(share * (len(rounds) - 1))] for share in (0.1, 0.5, 0.9) if rounds
        ],
        "staleness_rounds": {str(age): count for age, count in sorted(staleness.items())},
        "dropped_share": sum(one.dropped_samples for one in parts) / computed,
    }


# --- convergence ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    clusters: tuple[str, ...]
    train: int
    scored: int
    target: float
    horizon_s: float
    every_s: float
    """An evaluation at most so often."""
    rates: tuple[float, ...]
    """From the one to begin with."""
    micro_batches: tuple[int, ...]
    seeds: tuple[int, ...]
    paced_s: float


FULL = Sizes(
    clusters=("static", "dynamic", "both", "static, cheap"),
    train=12_000,
    scored=800,
    target=0.70,
    horizon_s=250.0,
    every_s=2.5,
    rates=(0.8, 0.4),
    micro_batches=(2, 4, 8, 16),
    seeds=(1, 2, 3),
    paced_s=10.0,
)
QUICK = Sizes(
    clusters=("both",),
    train=2_000,
    scored=100,
    target=0.15,
    horizon_s=8.0,
    every_s=0.5,
    rates=(0.2,),
    micro_batches=(2,),
    seeds=(1,),
    paced_s=1.0,
)
TUNING_SEED = 0


@dataclass(frozen=True)
class Point:
    """A point of the grid."""

    rate: float
    micro_batches: int


@dataclass
class Learnt:
    """How a run's accuracy came about."""

    seconds_to_target: float | None
    final_accuracy: float
    evaluations: list[tuple[float, float]]
    """Seconds and accuracy."""
    parts: list[Part]


def learn(
    name: str,
    cluster: offbeat.Cluster,
    point: Point,
    seed: int,
    sizes: Sizes,
    scored: tuple[Tensor, Tensor],
    until_s: float,
) -> Learnt:
    """Train in virtual time until then, or until the target; worker 0 evaluates, for free."""
    x, y = images(sizes.train, sizes.scored).train
    seen: list[tuple[float, float]] = []
    reached: list[float] = []

    def evaluate(model: nn.Module, now: float) -> None:
        seen.append((now, accuracy(model, *scored)))
        smooth = statistics.fmean(value for _, value in seen[-SMOOTHED:])
        if len(seen) >= SMOOTHED and smooth >= sizes.target and not reached:
            reached.append(now)

    def work() -> Part:
        torch.manual_seed(seed)
        model, rank, evaluated = resnet(), offbeat.rank(), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=point.rate)
        mine = batches(x, y, rank, seed)
        algorithm = CONTESTANTS[name](point.micro_batches)
        with offbeat.attach(
            model, optimizer, algorithm, clip_norm=CLIP_NORM, nonfinite="skip"
        ) as dp:
            # All workers live in this process: that the target is reached, all know at once.
            while dp.seconds < until_s and not reached:
                inputs, targets = next(mine)
                optimizer.zero_grad()
                dp.samples(len(inputs))
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                due = (seen[-1][0] if seen else 0.0) + sizes.every_s
                if rank == 0 and dp.round > evaluated and dp.seconds >= due:
                    evaluated = dp.round
                    with dp.agreed():
                        evaluate(model, dp.seconds)
            return Part.of(dp, 0.0)

    run = offbeat.run(work, cluster, seed=seed, own_random_state=False)
    last = [value for _, value in seen[-SMOOTHED:]]
    final = statistics.fmean(last) if last else 0.0
    return Learnt(reached[0] if reached else None, final, seen, run.results)


def tuned(name: str, cluster: offbeat.Cluster, sizes: Sizes) -> Point:
    """The point that is first at the target on the validation images.

    A run ends when it is later than the best one before it: it cannot win any more.
    """
    validation = images(sizes.train, sizes.scored).validation
    best, best_s, best_accuracy = None, sizes.horizon_s, 0.0
    alone = name.startswith("asgd")
    counts, rates = ((1,), RATES_ALONE) if alone else (sizes.micro_batches, sizes.rates)
    for micro_batches, rate in product(counts, rates):
        point = Point(rate, micro_batches)
        learnt = learn(name, cluster, point, TUNING_SEED, sizes, validation, best_s)
        if learnt.seconds_to_target is not None:
            best, best_s, best_accuracy = point, learnt.seconds_to_target, 1.0
        elif best is None or learnt.final_accuracy > best_accuracy:
            best, best_accuracy = point, learnt.final_accuracy
    assert best is not None, "a grid without points"
    return best


def convergence_of(case: str, name: str, sizes: Sizes) -> list[Row]:
    """Tune one algorithm on one cluster, then train it with the fresh seeds."""
    torch.set_num_threads(1)
    cluster = convergence_clusters()[case]
    point = tuned(name, cluster, sizes)
    rows = []
    for seed in sizes.seeds:
        test = images(sizes.train, sizes.scored).test
        learnt = learn(name, cluster, point, seed, sizes, test, sizes.horizon_s)
        rows.append(
            {
                "part": "convergence",
                "cluster": case,
                "world": "virtual",
                "algorithm": name,
                "seed": seed,
                **asdict(point),
                "seconds_to_target": learnt.seconds_to_target,
                "final_accuracy": learnt.final_accuracy,
                **figures(learnt.parts, cluster, seed),
                "evaluations": learnt.evaluations,
            }
        )
    return rows


def convergence(sizes: Sizes, algorithms: list[str], processes: int) -> Iterator[list[Row]]:
    """All algorithms on all clusters, as many at a time as there are processes."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawning) as pool:
        futures = [
            pool.submit(convergence_of, case, name, sizes)
            for case, name in product(sizes.clusters, algorithms)
        ]
        for future in as_completed(futures):
            found = future.result()
            times = [row["seconds_to_target"] for row in found]
            point = f"lr {found[0]['rate']:g}, M {found[0]['micro_batches']}"
            print(f"{found[0]['cluster']}: {found[0]['algorithm']}: {point}: {times}", flush=True)
            yield found


# --- utilisation and agreement -------------------------------------------------------------

ROUND_MICRO_BATCHES = 8
WARM_UP_S = 0.5  # not in the figures: connections are made in the first rounds


def small_task(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model that costs next to nothing: the cluster says what a micro-batch takes."""
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))


def attached(name: str, cluster: offbeat.Cluster, seed: int, seconds: float) -> Part:
    """Train one worker for so long, in whichever world this is."""
    model, optimizer, x, y = small_task(seed)
    algorithm = {**CONTESTANTS, "sync": CONTESTANTS["ddp"]}[name](ROUND_MICRO_BATCHES)
    with offbeat.attach(model, optimizer, algorithm, pace=cluster, seed=seed) as dp:
        before, began = Part(), dp.seconds
        until_s = began + WARM_UP_S + seconds
        while dp.seconds < until_s:
            if not before.steps and dp.seconds >= began + WARM_UP_S:
                before = Part.of(dp, began)
            optimizer.zero_grad()
            dp.samples(BATCH)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        part = Part.of(dp, began)
    part.seconds -= before.seconds
    part.samples -= before.samples
    part.compute_s -= before.compute_s
    part.wait_s -= before.wait_s
    return part


def distributed_data_parallel(cluster: offbeat.Cluster, seed: int, seconds: float) -> Part:
    """Train one real worker with DistributedDataParallel, its compute paced by hand."""
    model, optimizer, x, y = small_task(seed)
    ddp, device = DistributedDataParallel(model), cluster.device(dist.get_rank(), seed)
    part, round_s = Part(), 2 * ROUND_MICRO_BATCHES * cluster.compute.step_s
    for _ in range(2):  # connections are made, then buckets are made anew
        nn.functional.cross_entropy(ddp(x), y).backward()
    optimizer.zero_grad()
    dist.barrier()
    opened = time.monotonic()
    for _ in range(max(1, round(seconds / round_s))):  # all workers make as many rounds
        for micro_batch in range(ROUND_MICRO_BATCHES):
            began = time.monotonic()
            last = micro_batch == ROUND_MICRO_BATCHES - 1
            with nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(x), y)
                ends = began + device.seconds(part.steps, BATCH, began - opened)
                time.sleep(max(0.0, ends - time.monotonic()))
                part.compute_s += time.monotonic() - began
                loss.backward()
            part.steps += 1
        optimizer.step()
        optimizer.zero_grad()
        part.round_samples.append(samples_of(ROUND_MICRO_BATCHES))
    part.seconds = time.monotonic() - opened
    part.wait_s = part.seconds - part.compute_s
    part.samples = float(part.steps * BATCH)
    part.staleness[0] = len(part.round_samples)
    return part


def real_worker(names: list[str], seed: int, seconds: float) -> dict[str, Part]:
    """One of the real processes: all contestants, one after the other."""
    dist.init_process_group("gloo")
    cluster = paced_cluster()
    parts = {"ddp": distributed_data_parallel(cluster, seed, seconds)}
    for name in ("sync", *names):
        if name != "ddp":
            parts[name] = attached(name, cluster, seed, seconds)
    dist.destroy_process_group()
    return parts


def utilisation(sizes: Sizes, names: list[str]) -> list[Row]:
    """The same cluster and noise on real processes and in virtual time."""
    cluster, rows = paced_cluster(), []
    for seed in sizes.seeds:
        ended = testing.processes(
            *(real_worker, WORKERS, names, seed, sizes.paced_s),
            environment={"OMP_NUM_THREADS": "1"},
            time_out_s=120 + 3 * len(names) * sizes.paced_s,
        )
        worlds: dict[str, dict[str, list[Part]]] = {"real": {}, "virtual": {}}
        for name in ended[0].result:
            worlds["real"][name] = [one.result[name] for one in ended]
            work = partial(attached, name, cluster, seed, sizes.paced_s)
            worlds["virtual"][name] = offbeat.run(work, cluster, seed=seed).results
        rows += [
            {
                "part": "utilisation",
                "cluster": "paced",
                "world": world,
                "algorithm": name,
                "seed": seed,
                "seconds_to_target": None,
                "final_accuracy": None,
                **figures(parts, cluster, seed),
            }
            for world, by_name in worlds.items()
            for name, parts in by_name.items()
        ]
    return rows


# --- showing -------------------------------------------------------------------------------


def grouped(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def middle(rows: list[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def show_utilisation(rows: list[Row]) -> None:
    print("\nfour paced workers, two at half speed: medians over seeds")
    print(f"{'':18} {'computing':>17} {'of sum of speeds':>17} {'samples/s':>17} {'virtual':>8}")
    print(f"{'':18} {'real    virtual':>17} {'real    virtual':>17} {'real    virtual':>17} /real")
    by_name = grouped(rows, "algorithm", "world")
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        real, virtual = by_name[name, "real"], by_name[name, "virtual"]
        shares = [
            statistics.median(row["samples_per_s"] / row["sum_of_speeds"] for row in world)
            for world in (real, virtual)
        ]
        ratio = statistics.median(
            predicted["samples_per_s"] / measured["samples_per_s"]
            for measured, predicted in zip(real, virtual, strict=True)
        )
        print(
            f"{name:18} {middle(real, 'utilization'):8.1%} {middle(virtual, 'utilization'):8.1%} "
            f"{shares[0]:8.1%} {shares[1]:8.1%} {middle(real, 'samples_per_s'):8.0f} "
            f"{middle(virtual, 'samples_per_s'):8.0f} {ratio:8.3f}"
        )


def to_target(rows: list[Row]) -> float | None:
    """The median; None if half of the seeds did not get there."""
    inf = float("inf")
    found = statistics.median(row["seconds_to_target"] or inf for row in rows)
    return None if found == inf else found


def speedups(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By cluster and algorithm: the best baseline's time to the target over its own."""
    found: dict[str, dict[str, float]] = {}
    for (case,), same in grouped(rows, "cluster").items():
        times = {name: to_target(own) for (name,), own in grouped(same, "algorithm").items()}
        known = [times[name] for name in BASELINES if times.get(name) is not None]
        best = min((seconds for seconds in known if seconds), default=None)
        if best is not None:
            found[case] = {name: best / seconds for name, seconds in times.items() if seconds}
    return found


def show_convergence(rows: list[Row], target: float) -> None:
    gains = speedups(rows)
    for (case,), same in grouped(rows, "cluster").items():
        print(f"\n{case}: virtual seconds to {target:.0%}, median and range over seeds")
        print(
            f"{'':18} {'seconds':>8} {'range':>13} {'speed-up':>8} {'final':>6} {'lr':>6} {'M':>2} "
            f"{'computing':>9} {'samples/s':>9} {'dropped':>7} {'round, samples':>16}  staleness"
        )
        for (name,), own in grouped(same, "algorithm").items():
            seconds = to_target(own)
            times = [row["seconds_to_target"] for row in own if row["seconds_to_target"]]
            spread = f"{min(times):.1f}..{max(times):.1f}" if times else "not reached"
            gain = gains.get(case, {}).get(name)
            stale: Counter[str] = Counter()
            for row in own:
                stale.update(row["staleness_rounds"])
            ages = ", ".join(f"{age}: {n / stale.total():.0%}" for age, n in sorted(stale.items()))
            rounds = "/".join(f"{size:.0f}" for size in own[0]["round_samples_p10_p50_p90"])
            print(
                f"{name:18} {'' if seconds is None else f'{seconds:8.1f}':>8} {spread:>13} "
                f"{'' if gain is None else f'{gain:8.2f}':>8} {middle(own, 'final_accuracy'):6.1%} "
                f"{own[0]['rate']:6g} {own[0]['micro_batches']:2} "
                f"{middle(own, 'utilization'):9.1%} "
                f"{middle(own, 'samples_per_s'):9.0f} {middle(own, 'dropped_share'):7.1%} "
                f"{rounds:>16}  {ages}"
            )
    print(f"\nspeed-up over the best of {', '.join(BASELINES)}, mean over clusters")
    for kind, cases in (
        ("Gigabit", [case for case in gains if "cheap" not in case]),
        ("cheap network", [case for case in gains if "cheap" in case]),
    ):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            if cases and all(name in gains[case] for case in cases):
                mean = statistics.fmean(gains[case][name] for case in cases)
                print(f"{kind:14} {name:18} {mean:.2f}")


def before(path: Path | None) -> list[Row]:
    """What the file holds already."""
    return json.loads(path.read_text())["rows"] if path is not None and path.exists() else []


def with_new(rows: list[Row], found: list[Row]) -> list[Row]:
    """Rows, with those found in place of older ones of the same algorithm on the same cluster."""
    new = grouped(found, "part", "cluster", "algorithm")
    kept = [row for row in rows if (row["part"], row["cluster"], row["algorithm"]) not in new]
    return kept + found


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument(
        "--part",
        choices=("all", "utilisation", "agreement", "convergence"),
        default="all",
        help="agreement is shown with utilisation",
    )
    parser.add_argument("--clusters", help="only those, such as static/both")
    parser.add_argument("--algorithms", help="only those, such as ddp/lbbsp/abs")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    if arguments.clusters:
        sizes = replace(sizes, clusters=tuple(arguments.clusters.split("/")))
    names = arguments.algorithms.split("/") if arguments.algorithms else list(CONTESTANTS)
    for what, chosen, known in (
        ("clusters", sizes.clusters, convergence_clusters()),
        ("algorithms", names, CONTESTANTS),
    ):
        if unknown := set(chosen) - set(known):
            parser.error(f"--{what}: no {'/'.join(unknown)} among {'/'.join(known)}")
    if common.fashion_folder() is None:
        print("no Fashion-MNIST here (apt-get install dataset-fashion-mnist): digits instead")
    rows = before(arguments.json)
    if arguments.part != "convergence":
        rows = with_new(rows, utilisation(sizes, names))
        show_utilisation([row for row in rows if row["part"] == "utilisation"])
        common.write(arguments.json, {"rows": rows})
    if arguments.part in ("all", "convergence"):
        for found in convergence(sizes, names, arguments.processes):
            rows = with_new(rows, found)
            common.write(arguments.json, {"rows": rows})
        show_convergence([row for row in rows if row["part"] == "convergence"], sizes.target)


if __name__ == "__main__":
    main()
