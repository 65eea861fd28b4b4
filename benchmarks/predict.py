"""Whether virtual time says what paced real processes do: samples a second of every algorithm.

Four real processes are paced by a cluster, one algorithm after the other. Before that, `offbeat
profile` measures the network and the host on the same processes, in a few seconds; with both in the
cluster file, the same function runs in virtual time. A worker's samples are counted between two of
its rounds, so that neither the first connections nor a round that was cut short are in it.

    uniform      four equal workers, 60 ms a micro-batch
    half-speed   two of them at half the speed, log-normal noise of 0.2
    bytedance    the first four ranks of the recorded job, in proportion: 60 ms on average
    ucf101       the recorded lengths of videos, in proportion: 60 ms on average

Printed are samples a second, real and virtual, and virtual over real: with the host's cost in the
file, and without. Then the order: pairs of algorithms whose real intervals (of four stretches of
time, over all seeds) do not overlap, and how many of them virtual time puts in the same order.

    python benchmarks/predict.py [--quick] [--json FILE] [--show | --real | --again]
                                 [--clusters NAMES] [--seeds NUMBERS]

With `--json`, what the file holds of other clusters and seeds stays in it. `--show` measures
nothing; `--real` leaves out the virtual runs, and `--again` makes those of what the file holds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat import testing
from offbeat.clusters import Cluster
from offbeat.lab import contestants
from offbeat.lab.profile import FEWEST, WARM_UP, profile
from offbeat.records import Line
from offbeat.worlds import enter_world, leave_world

Row = dict[str, Any]

# --- settings, the same for every result ---------------------------------------------------

WORKERS = 4
STEP_S = 0.06
BATCH = 16
WARM_UP_S = 0.6
SECONDS = 4.0
STRETCHES = 4
CLUSTERS = ("uniform", "half-speed", "bytedance", "ucf101")
SEEDS = (1, 2)
ALGORITHMS = (
    *("sync", "sync:micro_batches=4", "lbbsp:micro_batches=4", "dropcompute:micro_batches=4"),
    *("eager", "eager:quorum=solo", "eager:quorum=majority", "msync:m=3"),
    *("abs", "abs:in_flight=finish,patience=0", "waitfree", "nonblocking:micro_batches=4"),
    *("local:steps=4", "diloco:steps=4", "dasgd:steps=4", "wagma"),
    *("asgd", "ringmaster:max_delay=4", "rennala:batch=8", "ringleader", "rescaled"),
    *("dpsgd", "decentlam", "dmsgd", "edm", "tracking"),
)
QUICK = ("sync", "eager", "abs", "asgd")
QUICK_CLUSTERS = ("half-speed", "bytedance")
QUICK_SECONDS = 1.5


def cluster_of(name: str) -> Cluster:
    """A cluster to pace by; its network is that of this machine."""
    text = f"name = '{name}'\nworkers = {WORKERS}\n"
    match name:
        case "uniform":
            return Cluster.parse(f"{text}[compute]\nstep_s = {STEP_S}\n")
        case "half-speed":
            noise = "[[noise]]\nkind = 'lognormal'\nsigma = 0.2\n"
            return Cluster.parse(
                f"{text}speed = [1.0, 1.0, 0.5, 0.5]\n[compute]\nstep_s = {STEP_S}\n{noise}"
            )
        case "bytedance":
            rows = [row[:WORKERS] for row in Cluster.load("bytedance-32").noise[0].rows]
            per_s = STEP_S / statistics.fmean(value for row in rows for value in row)
            scaled = [[value * per_s for value in row] for row in rows]
            noise = f"[[noise]]\nkind = 'trace'\nunit = 'seconds'\nrows = {scaled}\n"
            return Cluster.parse(f"{text}{noise}")
        case "ucf101":
            lengths = Cluster.load("ucf101-8").compute.length
            per_unit_s = STEP_S / statistics.fmean(lengths.values)
            length = f"kind = 'listed'\nvalues = {list(lengths.values)}\nper_unit_s = {per_unit_s}"
            return Cluster.parse(f"{text}[compute.length]\n{length}\n")
    raise ValueError(f"there is no cluster {name!r}: choose among {', '.join(CLUSTERS)}")


# --- one worker, in either world -----------------------------------------------------------


@dataclass
class Part:
    """What one worker did: its rate in each stretch of its time, and what of it was dropped."""

    samples_per_s: float
    stretches: list[float]
    computed: float
    dropped: float


def trained(spec: str, cluster: Cluster, seed: int, seconds: float) -> Part:
    """Train for so long, in whichever world this is."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    momentum = 0.9 if spec == "dmsgd" else 0.0  # it is named after it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    x, y = torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))
    lines: list[Line] = []
    world = enter_world(cluster, seed)
    world.records = lines.append
    with offbeat.attach(model, optimizer, contestants.parse(spec).algorithm) as dp:
        begins_s = dp.seconds
        ends_s = begins_s + WARM_UP_S + seconds
        while dp.seconds < ends_s:
            optimizer.zero_grad()
            dp.samples(BATCH)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends_s = dp.seconds
    stats = dp.stats()
    world.records = None
    leave_world(world)
    return part_of(lines, begins_s + WARM_UP_S, ends_s, stats)


def part_of(lines: list[Line], begins_s: float, ends_s: float, stats: offbeat.Stats) -> Part:
    """Count samples between the first and the last round of this time, parts of a step as parts."""
    applied = [
        line["at_s"]
        for line in lines
        if line["kind"] == "round" and begins_s <= line["at_s"] <= ends_s
    ]
    if len(applied) > 1:
        begins_s, ends_s = min(applied), max(applied)
    computed = [line for line in lines if line["kind"] == "compute"]

    def rate(from_s: float, to_s: float) -> float:
        done = sum(
            line["samples"]
            * max(0.0, min(line["to_s"], to_s) - max(line["from_s"], from_s))
            / (line["to_s"] - line["from_s"])
            for line in computed
        )
        return done / (to_s - from_s)

    edges = [begins_s + (ends_s - begins_s) * at / STRETCHES for at in range(STRETCHES + 1)]
    stretches = [rate(*pair) for pair in pairwise(edges)]
    whole = rate(begins_s, ends_s)
    return Part(whole, stretches, stats.computed_samples, stats.dropped_samples)


def together(parts: Sequence[Part]) -> tuple[float, list[float]]:
    """Samples a second of all workers that were not dropped; and by stretch."""
    kept = 1 - sum(part.dropped for part in parts) / sum(part.computed for part in parts)
    whole = kept * sum(part.samples_per_s for part in parts)
    return whole, [
        kept * sum(each) for each in zip(*(part.stretches for part in parts), strict=True)
    ]


# --- both worlds ---------------------------------------------------------------------------


def real_worker(
    specs: list[str], name: str, seed: int, seconds: float, folder: str
) -> tuple[dict[str, Any], dict[str, Part]]:
    """One of the real processes: the profile, then all algorithms, one after the other."""
    dist.init_process_group("gloo")
    cluster, pace = cluster_of(name), Path(folder) / f"pace-{offbeat.rank()}.toml"
    pace.write_text(f"workers = {WORKERS}\n[compute]\nstep_s = {STEP_S}\n")
    os.environ["OFFBEAT_PACE"] = str(pace)
    found = profile(Path(folder) / "found.toml", steps=WARM_UP + FEWEST)
    del os.environ["OFFBEAT_PACE"]
    parts = {spec: trained(spec, cluster, seed, seconds) for spec in specs}
    dist.destroy_process_group()
    if found is None:
        return {}, parts
    tables = found.cluster.model_dump(
        by_alias=True, exclude_defaults=True, include={"network", "overhead"}
    )
    return tables, parts


def measured(name: str, seed: int, specs: list[str], seconds: float) -> list[Row]:
    """One cluster and seed on real processes, and what the profile says of them."""
    with tempfile.TemporaryDirectory() as folder:
        ended = testing.processes(
            *(real_worker, WORKERS, specs, name, seed, seconds, folder),
            environment={"OMP_NUM_THREADS": "1"},
            time_out_s=60 + 2 * len(specs) * (seconds + WARM_UP_S),
        )
    rows = []
    for spec in specs:
        real, stretches = together([one.result[1][spec] for one in ended])
        rows.append(
            {"cluster": name, "seed": seed, "algorithm": spec, "seconds": seconds, "real": real}
            | {"stretches": stretches, "host": ended[0].result[0]}
        )
    return rows


def predicted(row: Row) -> Row:
    """The same in virtual time: with the network and the host as measured, and without the host."""
    cluster, spec, seed = cluster_of(row["cluster"]), row["algorithm"], row["seed"]
    with_host = cluster.model_copy(update=_tables(row["host"]))
    without = with_host.model_copy(update={"overhead": cluster.overhead})
    work = partial(trained, spec, cluster, seed, row["seconds"])
    virtual, bare = (
        together(offbeat.run(work, each, seed=seed).results)[0] for each in (with_host, without)
    )
    real = row["real"]
    print(
        f"{cluster.name:11} {seed} {spec:28} {real:8.1f} {virtual / real:6.3f} {bare / real:6.3f}",
        flush=True,
    )
    return {**row, "virtual": virtual, "virtual_without_host": bare}


def _tables(host: dict[str, Any]) -> dict[str, Any]:
    found = Cluster.model_validate({"workers": 1, "compute": {"step_s": 1.0}, **host})
    return {"network": found.network, "overhead": found.overhead}


# --- showing -------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Twice the standard error around the mean."""
    middle = statistics.fmean(values)
    wide = 2 * statistics.stdev(values) / len(values) ** 0.5
    return middle - wide, middle + wide


def order(rows: list[Row]) -> tuple[int, int]:
    """Of the pairs whose real intervals do not overlap: how many are ordered alike, and all."""
    alike = pairs = 0
    for name in dict.fromkeys(row["cluster"] for row in rows):
        own: dict[str, list[Row]] = {}
        for row in rows:
            if row["cluster"] == name:
                own.setdefault(row["algorithm"], []).append(row)
        for one, other in combinations(own.values(), 2):
            (low, high), (other_low, other_high) = (
                interval([value for row in each for value in row["stretches"]])
                for each in (one, other)
            )
            if low <= other_high and other_low <= high:
                continue
            predicted = [statistics.fmean(row["virtual"] for row in each) for each in (one, other)]
            pairs += 1
            alike += (low > other_high) == (predicted[0] > predicted[1])
    return alike, pairs


def show(rows: list[Row]) -> dict[str, float]:
    """Print errors by algorithm, and what they come to; return the latter."""
    print(f"\n{'virtual over real':28} {'':9}" + "".join(f"{name:>20}" for name in CLUSTERS))
    for spec in dict.fromkeys(row["algorithm"] for row in rows):
        cells = []
        for name in CLUSTERS:
            own = [row for row in rows if row["algorithm"] == spec and row["cluster"] == name]
            ratios = [row["virtual"] / row["real"] for row in own]
            cells.append(f"{min(ratios):.3f} to {max(ratios):.3f}" if own else "")
        print(f"{spec:28} {'':9}" + "".join(f"{cell:>20}" for cell in cells))
    errors = {
        key: [abs(row[key] / row["real"] - 1) for row in rows]
        for key in ("virtual", "virtual_without_host")
    }
    alike, pairs = order(rows)
    found = {
        "runs": len(rows),
        "median_error": statistics.median(errors["virtual"]),
        "largest_error": max(errors["virtual"]),
        "within_5_percent": sum(error <= 0.05 for error in errors["virtual"]) / len(rows),
        "median_error_without_host": statistics.median(errors["virtual_without_host"]),
        "largest_error_without_host": max(errors["virtual_without_host"]),
        "pairs_apart": pairs,
        "ordered_alike": alike / pairs if pairs else 1.0,
    }
    print(
        f"\n{found['runs']} runs: error {found['median_error']:.1%} in the median, "
        f"{found['largest_error']:.1%} at most, {found['within_5_percent']:.0%} within 5 %; "
        f"without the host's cost {found['median_error_without_host']:.1%} and "
        f"{found['largest_error_without_host']:.1%}\n"
        f"order: {found['ordered_alike']:.1%} of {pairs} pairs that are apart"
    )
    return found


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--clusters", help=f"of {','.join(CLUSTERS)}; all, if not --quick")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--show", action="store_true", help="what --json has, without measuring")
    parser.add_argument("--real", action="store_true", help="the real runs alone; then --again")
    parser.add_argument("--again", action="store_true", help="the virtual runs of what --json has")
    arguments = parser.parse_args()
    rows = [] if arguments.quick else common.held(arguments.json)
    if arguments.again:
        rows = [predicted(row) for row in rows]
        common.write(arguments.json, {"summary": show(rows), "rows": rows})
    elif arguments.show:
        show(rows)
    else:
        measure(arguments, rows)


def measure(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Add what was asked for to the rows; written after every cluster and seed."""
    specs = list(QUICK if arguments.quick else ALGORITHMS)
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    seeds = [1] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    clusters = QUICK_CLUSTERS if arguments.quick else CLUSTERS
    if arguments.clusters:
        clusters = tuple(arguments.clusters.split(","))
    for name, seed in product(clusters, seeds):
        new = measured(name, seed, specs, seconds)
        rows = [row for row in rows if (row["cluster"], row["seed"]) != (name, seed)]
        if arguments.real:
            rows += new
            common.write(arguments.json, {"rows": rows})
        else:
            rows += [predicted(row) for row in new]
            common.write(arguments.json, {"summary": show(rows), "rows": rows})


if __name__ == "__main__":
    main()
