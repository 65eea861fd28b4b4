"""Methods that move models: WAGMA-SGD, DaSGD, DecentLaM, DiLoCo and their relatives; virtual time.

Six parts. Each trains Fashion-MNIST (on Debian: apt-get install dataset-fashion-mnist; without it,
digits) at 14 x 14 pixels by a net of one hidden layer, or nothing at all where only time counts.

    wagma      64 workers, two of them, drawn anew for every step, 320 ms late; 0.66 s a step and an
               exchange, as in the paper's balanced runs (WAGMA-SGD, arXiv 2005.00124). Throughput,
               and accuracy after the same number of samples. The paper: 1.25 times local SGD with
               period 1, 75.3 % where all-reduce has 75.9
    long       the same for twice as many samples: all-reduce, WAGMA-SGD, and that as printed
    unequal    64 workers, steps of 1.7 to 43.5 s, as its reinforcement-learning task has them: an
               exponential above 1.7 s, cut off at 43.5, mean 9.4. Throughput alone. The paper:
               2.33 times local SGD with period 1, on 1,024 workers
    dasgd      16 workers, an exchange takes as long as 2.5 steps: what is waited for, by delay
    decentlam  16 workers on a ring, data split by Dirichlet(0.1) over classes, 8 and 16 times as
               many samples a step: accuracy of the mean model, by momentum
    ablation   4 workers, two at half speed, an exchange takes as long as 5 steps: overlap x shares
               by speed x own steps, virtual seconds to a target

Equal terms. Every method has the same micro-batches, initial model and noise. Its learning rate is
the best of a grid on validation images, with a seed of its own; a best rate at the edge of the grid
widens it. Then come fresh seeds, and test images. Runs end after the same number of samples of all
workers. What is evaluated is the mean of all workers' models, off the clock.

    python benchmarks/models.py [--part NAME ...] [--quick] [--json FILE]

FILE keeps what it holds of other parts: they may be run one by one.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

import offbeat
from offbeat.lab import digits

Row = dict[str, Any]
TUNING_SEED = 0
SMOOTHED = 3
"""Evaluations whose mean must reach a target, and count as the accuracy at the end."""


# --- clusters ------------------------------------------------------------------------------


def _network(exchange_s: float, workers: int) -> str:
    """One whose all-reduce of our model takes so long: a ring moves nearly two models."""
    model_bytes = 4 * sum(each.numel() for each in net().parameters())
    wide = 2 * (workers - 1) / workers * model_bytes / exchange_s
    return f"[network]\nlatency_s = 5e-6\nbandwidth_bytes_per_s = {wide}\n"


def _unequal_rows(workers: int, seed: int) -> str:
    """Seconds of steps, drawn for each seed."""
    draw = random.Random(seed)
    rows = [
        [min(1.7 + draw.expovariate(1 / 7.9), 43.5) for _ in range(workers)] for _ in range(200)
    ]
    return f'[[noise]]\nkind = "trace"\nunit = "seconds"\nrows = {json.dumps(rows)}\n'


def cluster_of(name: str, workers: int, seed: int) -> offbeat.Cluster:
    """The cluster of a part."""
    head, calm = f"workers = {workers}\n", '[[noise]]\nkind = "lognormal"\nsigma = 0.05\n'
    late = '[[noise]]\nkind = "random_delay"\nk = 2\ndelay_s = 0.32\n'
    half = f"speed = {[1.0] * (workers // 2) + [0.5] * (workers // 2)}\n"
    delayed = head + f"[compute]\nstep_s = 0.62\n{calm}{late}" + _network(0.04, workers)
    texts = {
        "wagma": delayed,
        "long": delayed,
        "unequal": head
        + f"[compute]\nstep_s = 9.4\n{_unequal_rows(workers, seed)}"
        + _network(0.04, workers),
        "dasgd": head + f"[compute]\nstep_s = 0.1\n{calm}" + _network(0.25, workers),
        "decentlam": head + f"[compute]\nstep_s = 0.1\n{calm}" + _network(0.01, workers),
        "ablation": head + half + f"[compute]\nstep_s = 0.1\n{calm}" + _network(0.5, workers),
    }
    return offbeat.Cluster.parse(texts[name])


# --- the task ------------------------------------------------------------------------------

Images = tuple[Tensor, Tensor]


@cache
def images() -> tuple[Images, Images, Images]:
    """To train, to tune and to test on."""
    if (folder := common.fashion_folder()) is None:
        train_x, train_y, test_x, test_y = digits.split()
        cut = len(test_x)
        return (train_x[cut:], train_y[cut:]), (train_x[:cut], train_y[:cut]), (test_x, test_y)
    (x, y), (test_x, test_y) = (common.fashion(folder, part) for part in ("train", "t10k"))
    x, test_x = (nn.functional.avg_pool2d(some, 2).flatten(1) for some in (x, test_x))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    tuned_on, trained_on = order[:10_000], order[10_000:]
    return (x[trained_on], y[trained_on]), (x[tuned_on], y[tuned_on]), (test_x, test_y)


def net() -> nn.Module:
    """One hidden layer."""
    wide = images()[0][0].shape[1]
    return nn.Sequential(nn.Linear(wide, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def shards(workers: int, alpha: float, seed: int) -> list[Tensor]:
    """By worker, which samples are its own: every class is split by a Dirichlet."""
    _, y = images()[0]
    torch.manual_seed(seed)
    mine: list[list[Tensor]] = [[] for _ in range(workers)]
    for kind in range(10):
        its = (y == kind).nonzero().flatten()
        its = its[torch.randperm(len(its))]
        split = torch.distributions.Dirichlet(torch.full((workers,), alpha)).sample()
        ends = (split.cumsum(0) * len(its)).long().tolist()
        for worker, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            mine[worker].append(its[begin:end])
    return [torch.cat(each) if sum(map(len, each)) else torch.zeros(1).long() for each in mine]


def batches(x: Tensor, y: Tensor, which: Tensor, size: int, seed: int) -> Iterator[Images]:
    """Micro-batches without end, drawn from those samples."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        some = which[torch.randint(len(which), (size,), generator=draw)]
        yield x[some], y[some]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


# --- one run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run; it says all, so that another process can make it."""

    part: str
    method: str
    workers: int
    batch: int
    samples: int
    """Of all workers, until the end."""
    rate: float = 0.1
    momentum: float = 0.0
    beta: float = 0.0
    """Of methods that have a momentum of their own."""
    alpha: float | None = None
    """Of the Dirichlet that splits the data; None: everybody draws from all."""
    every: int = 0
    """Samples between two evaluations; 0: none."""
    target: float | None = None
    seed: int = TUNING_SEED
    tunes: bool = True


@dataclass
class Run:
    """What came of it."""

    seconds: float = 0.0
    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    accuracy: float = 0.0
    target_s: float | None = None
    target_samples: int | None = None
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    """Seconds, samples, accuracy."""


def run(job: Job) -> Run:
    """Train in virtual time; all workers live in this process, and count samples together."""
    torch.set_num_threads(1)
    x, y = images()[0]
    scored = images()[1 if job.tunes else 2]
    models: list[nn.Module] = []
    done, total = Run(), [0]
    timing = not job.every
    everything = torch.arange(len(x))

    def evaluate(now: float) -> None:
        mean = net()
        with torch.no_grad():
            each = zip(*(model.parameters() for model in models), strict=True)
            for parameter, all_of_it in zip(mean.parameters(), each, strict=True):
                parameter.copy_(torch.stack(list(all_of_it)).mean(0))
        done.curve.append((now, total[0], accuracy(mean, *scored)))
        smooth = statistics.fmean(value for _, _, value in done.curve[-SMOOTHED:])
        reached = job.target is not None and smooth >= job.target
        if reached and len(done.curve) >= SMOOTHED and done.target_s is None:
            done.target_s, done.target_samples = now, total[0]

    def work() -> None:
        rank = offbeat.rank()
        torch.manual_seed(job.seed)
        model = net()
        models.append(model)
        rate = 0.0 if timing else job.rate
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=job.momentum)
        which = everything
        if job.alpha is not None:
            which = shards(job.workers, job.alpha, job.seed)[rank]
        mine = batches(x, y, which, job.batch, 1000 * job.seed + rank)
        inputs = x[:1]
        with offbeat.attach(model, optimizer, METHODS[job.part][job.method](job)) as dp:
            while total[0] < job.samples and done.target_s is None:
                optimizer.zero_grad()
                dp.samples(job.batch)
                if timing:
                    model(inputs).sum().backward()
                else:
                    some, labels = next(mine)
                    nn.functional.cross_entropy(model(some), labels).backward()
                optimizer.step()
                before, total[0] = total[0], total[0] + job.batch
                done.seconds = max(done.seconds, dp.seconds)
                if not timing and total[0] // job.every > before // job.every:
                    evaluate(dp.seconds)
            stats = dp.stats()
            done.steps += stats.steps
            done.compute_s += stats.compute_s
            done.wait_s += stats.wait_s

    cluster = cluster_of(job.part, job.workers, job.seed)
    offbeat.run(work, cluster, seed=job.seed, own_random_state=False)
    if not timing:
        done.accuracy = statistics.fmean(value for _, _, value in done.curve[-SMOOTHED:])
    return done


# --- who takes part --------------------------------------------------------------------------

Make = Callable[[Job], offbeat.Algorithm]
AS_PRINTED: dict[str, Any] = {"late": "paper", "period_quorum": "all"}
NINE_TENTHS: dict[str, Any] = {"quorum": 0.9, "period_quorum": 0.9}
"""Every round waits for nine of ten workers: chosen on validation images and seeds of their own."""
M = 4
"""Micro-batches of a worker between two rounds, in the ablation; more, where shares go by speed."""
METHODS: dict[str, dict[str, Make]] = {
    "wagma": {
        "all-reduce": lambda _: offbeat.SyncSGD(),
        "local SGD, period 1": lambda _: offbeat.LocalSGD(1),
        "D-PSGD, ring": lambda _: offbeat.DPSGD("ring"),
        "eager-SGD": lambda _: offbeat.EagerSGD(),
        "WAGMA-SGD": lambda _: offbeat.WAGMASGD(period=10),
        "WAGMA-SGD, nine tenths": lambda _: offbeat.WAGMASGD(period=10, **NINE_TENTHS),
        "WAGMA-SGD, momentum averaged": lambda _: offbeat.WAGMASGD(period=10, momentum="averaged"),
        "WAGMA-SGD, delay 1": lambda _: offbeat.WAGMASGD(period=10, delay=1),
        "WAGMA-SGD, as printed": lambda _: offbeat.WAGMASGD(period=10, **AS_PRINTED),
        "wait-free local SGD": lambda _: offbeat.WaitFreeLocalSGD(),
    },
    "long": {
        "all-reduce": lambda _: offbeat.SyncSGD(),
        "WAGMA-SGD": lambda _: offbeat.WAGMASGD(period=10),
        "WAGMA-SGD, as printed": lambda _: offbeat.WAGMASGD(period=10, **AS_PRINTED),
    },
    "unequal": {
        "local SGD, period 1": lambda _: offbeat.LocalSGD(1),
        "D-PSGD, ring": lambda _: offbeat.DPSGD("ring"),
        "WAGMA-SGD": lambda _: offbeat.WAGMASGD(period=8),
        "WAGMA-SGD, nine tenths": lambda _: offbeat.WAGMASGD(period=8, **NINE_TENTHS),
        "WAGMA-SGD, as printed": lambda _: offbeat.WAGMASGD(period=8, **AS_PRINTED),
        "wait-free local SGD": lambda _: offbeat.WaitFreeLocalSGD(),
    },
    "dasgd": {
        "local SGD": lambda _: offbeat.LocalSGD(8),
        "DaSGD, d = 1": lambda _: offbeat.DaSGD(8, 1),
        "DaSGD, d by itself": lambda _: offbeat.DaSGD(8),
        "DaSGD, d by itself, half": lambda _: offbeat.DaSGD(8, quorum=0.5),
        "wait-free local SGD": lambda _: offbeat.WaitFreeLocalSGD(),
    },
    "decentlam": {
        "DmSGD": lambda _: offbeat.DmSGD("ring"),
        "DecentLaM": lambda job: offbeat.DecentLaM("ring", beta=job.beta),
    },
    # overlap, shares by speed, own steps
    "ablation": {
        "---: SyncSGD": lambda _: offbeat.SyncSGD(micro_batches=M),
        "-s-: LB-BSP": lambda _: offbeat.LBBSP(M),
        "o--: EagerSGD(all, delay=1)": lambda _: offbeat.EagerSGD("all", delay=1),
        "os-: ABSSGD": lambda _: offbeat.ABSSGD(),
        "--w: LocalSGD": lambda _: offbeat.LocalSGD(M),
        "-sw: LocalSGD by speed": lambda _: offbeat.LocalSGD(M, shares="speed"),
        "o-w: DaSGD, d = tau (CoCoD)": lambda _: offbeat.DaSGD(M, M),
        "osw: wait-free local SGD": lambda _: offbeat.WaitFreeLocalSGD(),
        "o-w: DiLoCo, overlapped": lambda _: offbeat.DiLoCo(M, overlap=M - 1, lr=1.0, momentum=0.0),
    },
}


def jobs_of(part: str, quick: bool) -> list[Job]:
    """What to run: one job for each method and setting, to be tuned and repeated."""
    epoch = 6_000 if quick else 50_000
    sizes: dict[str, Job] = {
        "wagma": Job(part, "", 64, 16, 2 * epoch, momentum=0.9, every=epoch // 4),
        "long": Job(part, "", 64, 16, 4 * epoch, momentum=0.9, every=epoch // 4),
        "unequal": Job(part, "", 64, 1, 640 if quick else 3_200),
        "dasgd": Job(part, "", 16, 1, 1_600 if quick else 8_000),
        "decentlam": Job(part, "", 16, 8, 2 * epoch, alpha=0.1, every=epoch // 4),
        "ablation": Job(part, "", 4, 8, 3 * epoch, every=epoch // 20, target=80.0),
    }
    basis = sizes[part]
    if part != "decentlam":
        return [replace(basis, method=name) for name in METHODS[part]]
    return [
        replace(
            basis,
            method=name,
            batch=batch,
            beta=beta,
            momentum=beta if name == "DmSGD" else 0.0,
        )
        for batch, beta, name in product((128, 8), (0.5, 0.9), METHODS[part])
    ]


GRID = (0.05, 0.15, 0.45)
SEEDS = (1, 2, 3, 4, 5)


def tuned(job: Job, pool: ProcessPoolExecutor) -> Job:
    """The rate that is best on validation images; times three beyond the edge, if that is best."""
    if not job.every:
        return job
    seen: dict[float, tuple[float, float]] = {}
    rates = list(GRID)
    while rates:
        tried = pool.map(run, [replace(job, rate=rate) for rate in rates])
        for rate, came in zip(rates, tried, strict=True):
            late = -came.target_s if came.target_s is not None else float("-inf")
            seen[rate] = (late if job.target is not None else 0.0, came.accuracy)
        best = max(seen, key=lambda rate: seen[rate])
        beyond = {min(seen): best / 3, max(seen): best * 3}.get(best)
        rates = [beyond] if beyond is not None and len(seen) < 7 else []
    return replace(job, rate=best)


def measured(job: Job, pool: ProcessPoolExecutor, seeds: tuple[int, ...]) -> Row:
    """A method's row: medians over seeds, with the spread."""
    runs = list(pool.map(run, [replace(job, seed=seed, tunes=False) for seed in seeds]))
    row: Row = {
        **{"part": job.part, "method": job.method, "rate": job.rate, "batch": job.batch},
        "beta": max(job.beta, job.momentum),
        "samples_per_s": _medians([came.steps * job.batch / came.seconds for came in runs]),
        "waited_share": _medians([came.wait_s / (came.wait_s + came.compute_s) for came in runs]),
    }
    if job.every:
        row["accuracy"] = _medians([came.accuracy for came in runs])
        row["accuracies"] = [came.accuracy for came in runs]
    if job.target is not None:
        row["target_s"] = [came.target_s for came in runs]
        row["target_samples"] = [came.target_samples for came in runs]
    return row


def _medians(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show(row: Row) -> None:
    shown = [f"{row['part']:9} {row['method']:30} rate {row['rate']:<6.3g}"]
    if row["part"] == "decentlam":
        shown.append(f"batch {row['batch']:3} beta {row['beta']:<4}")
    for name in ("samples_per_s", "waited_share", "accuracy"):
        if name in row:
            of = row[name]
            shown.append(f"{name} {of['median']:.3f} ({of['low']:.3f}..{of['high']:.3f})")
    if "target_s" in row:
        times = [each for each in row["target_s"] if each is not None]
        shown.append(f"target {len(times)} of {len(row['target_s'])}")
        shown.append(f"{statistics.median(times):.1f} s" if times else "-")
    print("  ".join(shown), flush=True)


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--methods", nargs="*", help="only these")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    rows: list[Row] = _kept(args.json, args.part, args.methods)
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for part in args.part:
            for job in jobs_of(part, args.quick):
                if args.methods and job.method not in args.methods:
                    continue
                tuned_job = job if args.quick else tuned(job, pool)
                rows.append(measured(tuned_job, pool, SEEDS[:1] if args.quick else SEEDS))
                show(rows[-1])
                common.write(args.json, {"rows": rows})
    print(f"{time.perf_counter() - began:.0f} s")


def _kept(path: Path | None, parts: list[str], methods: list[str] | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    found: list[Row] = json.loads(path.read_text())["rows"]
    return [
        row
        for row in found
        if row["part"] not in parts or (methods and row["method"] not in methods)
    ]


if __name__ == "__main__":
    main()
