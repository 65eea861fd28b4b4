"""What codecs cost in learning: loss and accuracy for the same rounds, over bytes and virtual time.

Four virtual workers train digits and text with SyncSGD, once for each codec and seed, for as many
rounds each. In the cluster a plain exchange of digits takes about as long as computing. Bytes are
those that a worker sends in a ring, or in two shots. All seeds see the same data with every codec,
so differences are taken seed by seed.

Then the errors of the codecs alone, for numbers with light and heavy tails (Gaussian, Student's t
with 2 degrees of freedom, and their largest 1 % only), where Global-QSGD's exponential levels are
meant to be better than its standard ones.

With `--latencies`, instead: what a scale that is foretold (`margin`) saves on links with a latency,
where agreeing on it takes messages of its own, and how often it did not hold.

    python benchmarks/bytes_learning.py [--quick] [--latencies] [--json FILE]
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import common
import torch
from torch import Tensor

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.tasks import Task, find
from offbeat.worlds import enter_world

WORKERS = 4
ROUNDS = {"digits": 120, "text": 300}
SEEDS = 5
NETWORK = "[network]\nlatency_s = 1e-4\nbandwidth_bytes_per_s = 4e6\nall_reduce = 'ring'"
CLUSTER = Cluster.parse(f"workers = {WORKERS}\n[compute]\nstep_s = 0.05\n{NETWORK}")
LATENCIES_S = (1e-3, 1e-2)
MARGINS = (1.2, 1.5, 2.0, 3.0)
FEW_ROUNDS = {"digits": 60, "text": 40}
FAST = "[network]\nbandwidth_bytes_per_s = 125e6\n"
CODECS: dict[str, Any] = {
    "none": None,
    "bfloat16": offbeat.Half(),
    "int8": offbeat.Int8(),
    "int4": offbeat.Int4(),
    "int4_forgets": offbeat.Int4(error_feedback=False),
    "standard": offbeat.GlobalQSGD(),
    "foretold": offbeat.GlobalQSGD(margin=1.5),
    "exponential": offbeat.GlobalQSGD("exponential"),
}
BYTES = {"none": 4, "bfloat16": 2, "int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}
BYTES |= {"int4_forgets": 0.5 + 4 / 128, "standard": 1, "foretold": 1, "exponential": 1}


def trained(
    task: Task, codec: Any, rounds: int, seed: int, cluster: Cluster = CLUSTER
) -> dict[str, float]:
    """Loss, accuracy and virtual seconds after so many rounds."""

    def worker() -> dict[str, float]:
        torch.manual_seed(seed)
        model = task.model()
        optimizer = task.optimizer(model)
        batches = task.batches(offbeat.rank(), WORKERS, seed)
        with offbeat.attach(model, optimizer, codec=codec) as dp:
            for _ in range(rounds):
                batch = next(batches)
                optimizer.zero_grad()
                dp.samples(task.samples(batch))
                task.loss(model, batch).backward()
                optimizer.step()
            seconds = dp.seconds
            again = getattr(dp._replica.coder, "sent_again", 0)
        with torch.no_grad():
            loss, accuracy = task.evaluate(model)
        found = {"loss": loss, "accuracy": accuracy or 0.0, "seconds": seconds}
        return {**found, "sent_again": again}

    return dict(offbeat.run(worker, cluster).results[0])


def learning(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, rounds in ROUNDS.items():
        task = find(name)
        numbers = sum(parameter.numel() for parameter in task.model().parameters())
        runs: dict[str, list[dict[str, float]]] = {codec: [] for codec in CODECS}
        for seed in range(2 if quick else SEEDS):
            for codec, settings in CODECS.items():
                rounds_made = rounds // 4 if quick else rounds
                runs[codec].append(trained(task, settings, rounds_made, seed))
        for codec, of_seeds in runs.items():
            pairs = list(zip(of_seeds, runs["none"], strict=True))
            row = {
                "task": name,
                "codec": codec,
                "rounds": rounds,
                "bytes_sent": round(rounds * BYTES[codec] * numbers * 2 * (WORKERS - 1) / WORKERS),
                "seconds": statistics.median(each["seconds"] for each in of_seeds),
                "sent_again": [each["sent_again"] for each in of_seeds],
                "loss": [each["loss"] for each in of_seeds],
                "accuracy": [each["accuracy"] for each in of_seeds],
                "accuracy_points_over_none": [
                    100 * (mine["accuracy"] - plain["accuracy"]) for mine, plain in pairs
                ],
            }
            rows.append(row)
            points = common.spread(row["accuracy_points_over_none"])
            print(
                f"{name} {codec}: loss {statistics.median(row['loss']):.4f}, "
                f"{points} points over none, {row['bytes_sent'] / 1e6:.1f} MB, "
                f"{row['seconds']:.1f} virtual s",
                flush=True,
            )
    return rows


def latencies(quick: bool) -> list[dict[str, Any]]:
    """Virtual milliseconds that a step takes beyond its compute, and how often codes went again."""
    rows = []
    codecs = {codec: CODECS[codec] for codec in ("none", "int8", "standard")}
    codecs |= {f"margin_{each}": offbeat.GlobalQSGD(margin=each) for each in MARGINS}
    for (name, rounds), latency_s in itertools.product(FEW_ROUNDS.items(), LATENCIES_S):
        network = f"{FAST}latency_s = {latency_s}"
        cluster = Cluster.parse(f"workers = {WORKERS}\n[compute]\nstep_s = 0.05\n{network}")
        rounds = rounds // 4 if quick else rounds
        for codec, settings in codecs.items():
            ran = trained(find(name), settings, rounds, 0, cluster)
            row = {"task": name, "rounds": rounds, "latency_s": latency_s, "codec": codec}
            row["exchange_ms"] = 1000 * (ran["seconds"] / rounds - 0.05)
            rows.append(row | {"sent_again": ran["sent_again"], "loss": ran["loss"]})
            print(rows[-1], flush=True)
    return rows


def nmse(codec: Any, given: Tensor, largest: bool) -> float:
    """The squared error of the mean over its squared norm; of the largest 1 % of it, perhaps."""

    def worker() -> Tensor:
        world = enter_world()
        tensor, channel = given[world.rank].clone(), world.channel("sums")
        for each in codec.coder(world.size, world.rank).sums(channel, tensor, 0, True, None):
            for work in each:
                work.wait()
        return tensor

    cluster = Cluster.parse(f"workers = {len(given)}\n[compute]\nstep_s = 1.0")
    got, exact = offbeat.run(worker, cluster).results[0].double(), given.double().sum(0)
    some = exact.abs().topk(len(exact) // 100).indices if largest else slice(None)
    return float((got - exact)[some].square().sum() / exact[some].square().sum())


def errors() -> list[dict[str, Any]]:
    rows = []
    for tails in ("gaussian", "student_t_2"):
        for workers in (4, 16, 64):
            torch.manual_seed(0)
            shape = (workers, 2**15)
            given = torch.randn(shape)
            if tails != "gaussian":
                given = torch.distributions.StudentT(2.0).sample(shape)
            for codec in ("int8", "int4_forgets", "standard", "exponential"):
                of_all, of_largest = (nmse(CODECS[codec], given, each) for each in (False, True))
                row = {"tails": tails, "workers": workers, "codec": codec}
                rows.append({**row, "nmse": of_all, "nmse_of_largest": of_largest})
                print(tails, workers, codec, f"{of_all:.5f}, largest {of_largest:.5f}", flush=True)
    return rows


def main() -> None:
    parser = common.options("What codecs cost in learning.")
    parser.add_argument("--latencies", action="store_true", help="only what a margin saves")
    options = parser.parse_args()
    if options.latencies:
        figures = {"rows": latencies(options.quick)}
    else:
        figures = {"errors": errors(), "rows": learning(options.quick)}
    common.write(options.json, figures)


if __name__ == "__main__":
    main()
