"""Forgetting: FedCBDR beside its baselines, digits and Fashion-MNIST in 5 tasks, 5 clients.

    python benchmarks/federated.py --json benchmarks/results/federated.json

In virtual time, every method with the same rounds and seeds. Settings were set before any result.
Rows that the file has already are kept: a run that was stopped goes on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import fashion, fashion_folder, held, options, write
from torch import Tensor, nn

import offbeat
from offbeat import federated as fed
from offbeat.lab import digits

TASKS, CLIENTS, BETA = 5, 5, 0.5
BUDGETS = {"digits": 20, "fashion": 100}  # samples of a task, over all clients
SETTINGS = {
    "digits": fed.Settings(rounds=10, epochs=2, batch=16, lr=0.1),
    "fashion": fed.Settings(rounds=10, epochs=2, batch=64, lr=0.05),
}
FASHION_SAMPLES = 10_000
SEEDS = 3
METHODS: dict[str, Callable[[int], fed.Method]] = {
    "finetune": lambda budget: fed.Method(),
    "ewc": lambda budget: fed.EWC(),
    "lwf": lambda budget: fed.LwF(),
    "uniform": lambda budget: fed.Uniform(budget=budget),
    "importance": lambda budget: fed.Importance(budget=budget),
    "fedcbdr": lambda budget: fed.FedCBDR(budget=budget),
    "fedcbdr, no temperatures": lambda budget: fed.FedCBDR(budget=budget, balance="none"),
    "fedcbdr, logit adjustment": lambda budget: fed.FedCBDR(budget=budget, balance="adjusted"),
    "fedcbdr, no quotas": lambda budget: fed.FedCBDR(budget=budget, by_class=False),
    "fedcbdr, no quotas, svd": lambda budget: fed.FedCBDR(
        budget=budget, by_class=False, scores="svd"
    ),
    "fedcbdr, no quotas, svd without un-masking": lambda budget: fed.FedCBDR(
        budget=budget, by_class=False, scores="svd-masked"
    ),
    "joint": lambda budget: fed.Joint(),
}
QUICK = ("finetune", "uniform", "fedcbdr", "joint")


def data(task: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Samples to train on, and to test on; None if they are not installed."""
    if task == "digits":
        return digits.split(seed)
    if (folder := fashion_folder()) is None:
        return None
    x, y = fashion(folder, "train")
    some = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:FASHION_SAMPLES]
    test_x, test_y = fashion(folder, "t10k")
    return x[some].flatten(1), y[some], test_x.flatten(1), test_y


def net(inputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 10))


def client(task: str, name: str, seed: int, samples: Any) -> fed.History:
    x, y, test_x, test_y = samples
    split = partial(_split, clients=CLIENTS)
    stream = fed.Stream.of(x, y, tasks=TASKS, clients=CLIENTS, seed=seed, split=split)
    settings = fed.Settings(**{**vars(SETTINGS[task]), "seed": seed})
    method = METHODS[name](BUDGETS[task])
    return fed.learn(net(x.shape[1], seed), stream, method, settings, (test_x, test_y))


def _split(labels: Tensor, seed: int, clients: int) -> list[Tensor]:
    return fed.dirichlet(labels, clients, BETA, seed=seed)


def measured(task: str, name: str, seed: int, samples: Any) -> dict[str, Any]:
    began = time.process_time()
    run = offbeat.run(lambda: client(task, name, seed, samples), "uniform-8", workers=CLIENTS)
    first: fed.History = run.results[0]
    return {
        "task": task,
        "method": name,
        "seed": seed,
        "accuracy": first.seen_accuracy,
        "by_task": first.accuracy,
        "forgetting": first.forgetting,
        "histogram": first.histograms[-1],
        "sum_bytes": sum(each.sent_bytes for each in run.results),
        "virtual_s": run.seconds,
        "process_s": time.process_time() - began,
    }


def table(rows: list[dict[str, Any]]) -> None:
    print(f"{'task':8} {'method':44} {'accuracy':>18} {'forgotten':>9} {'kB':>8} {'CPU s':>6}")
    for task, name in dict.fromkeys((row["task"], row["method"]) for row in rows):
        its = [row for row in rows if (row["task"], row["method"]) == (task, name)]
        last = [100 * row["accuracy"][-1] for row in its]
        spread = f"{statistics.fmean(last):.1f} ({min(last):.1f}..{max(last):.1f})"
        forgotten, sent, took = (
            statistics.fmean(row[key] for row in its)
            for key in ("forgetting", "sum_bytes", "process_s")
        )
        print(f"{task:8} {name:44} {spread:>18} {forgotten:9.3f} {sent / 1e3:8.0f} {took:6.1f}")


def main() -> None:
    asked = options(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = held(asked.json)
    done = {(row["task"], row["method"], row["seed"]) for row in rows}
    for task in ("digits",) if asked.quick else ("digits", "fashion"):
        for seed in range(1 if asked.quick else SEEDS):
            if (samples := data(task, seed)) is None:
                print("Fashion-MNIST is not installed: left out")
                break
            for name in QUICK if asked.quick else METHODS:
                if (task, name, seed) not in done:
                    rows.append(measured(task, name, seed, samples))
                    write(asked.json, {"rows": rows})
    table(rows)


if __name__ == "__main__":
    main()
