"""How long a fixed number of samples takes: dealt data and offbeat beside DDP and fixed shares.

An ordinary training script, `train` below: handwritten digits, a small convolutional net, a
DataLoader, some epochs. With DDP every rank has a share of its own (`DistributedSampler`). With
offbeat the script is the same, but for `attach` and `Deal`. A step takes what its rank needs: real
computing, and a sleep before the backward pass that stands for the rest of an accelerator's time.
Measured is the wall time from the first step to where all hold the same, final model; then the loss
on the test images.

    2:1              two ranks, one of half the speed
    1:1:0.5:0.5      four ranks, two of half the speed
    stalls           four ranks, of which one stalls in every tenth step, for ten steps' time
    balanced         two equal ranks: what it costs where there is nothing to gain

`possible` is the gain of ranks that never wait and exchange for nothing. All contestants take turns
in the same processes, with the same initial model and, seed by seed, the same order of the data.

    python benchmarks/epoch_time.py [--quick] [--only SETTING] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat
from offbeat import testing
from offbeat.lab import digits

STEP_S = 0.030
BATCH = 15
SAMPLES = 1380  # of each epoch: 92 batches, which two and four ranks share evenly
RATE, MOMENTUM = 0.05, 0.9
STALL_SHARE, STALL_STEPS = 0.1, 10
TARGETS = {"2:1": 1.4, "1:1:0.5:0.5": 1.38, "balanced": 0.98}

METHODS: dict[str, Callable[[], offbeat.Algorithm]] = {
    "SyncSGD": offbeat.SyncSGD,
    "EagerSGD": offbeat.EagerSGD,
    "ABSSGD": offbeat.ABSSGD,
    "WaitFreeLocalSGD": offbeat.WaitFreeLocalSGD,
}
DDP = "DDP"


@dataclass(frozen=True)
class Setting:
    """How fast the ranks are, and for how many epochs they train."""

    speeds: tuple[float, ...]
    epochs: int
    stalls: bool = False
    """Whether the last rank stalls at random."""

    def step_s(self, rank: int, seed: int) -> Callable[[], float]:
        """Return what says how long the next step of a rank takes."""
        draws = random.Random(f"{seed} {rank}")
        stalls = self.stalls and rank == len(self.speeds) - 1

        def seconds() -> float:
            stalled = stalls and draws.random() < STALL_SHARE
            return STEP_S / self.speeds[rank] * (1 + STALL_STEPS * stalled)

        return seconds

    @property
    def steps(self) -> int:
        """Of one rank, if all make as many."""
        return self.epochs * SAMPLES // BATCH // len(self.speeds)

    def possible(self, seed: int) -> float:
        """The time in lockstep over the time in which nobody waits."""
        ranks = range(len(self.speeds))
        times = [self.step_s(rank, seed) for rank in ranks]
        steps = [[seconds() for _ in range(self.steps)] for seconds in times]
        in_lockstep = sum(max(step) for step in zip(*steps, strict=True))
        rates = [self.steps / sum(mine) for mine in steps]
        return float(in_lockstep / (self.steps * len(self.speeds) / sum(rates)))


SETTINGS = {
    "2:1": Setting((1.0, 0.5), epochs=3),
    "1:1:0.5:0.5": Setting((1.0, 1.0, 0.5, 0.5), epochs=6),
    "stalls": Setting((1.0, 1.0, 1.0, 1.0), epochs=6, stalls=True),
    "balanced": Setting((1.0, 1.0), epochs=3),
}


@dataclass(frozen=True)
class Trained:
    """What one run gave."""

    seconds: float
    loss: float


def net() -> nn.Module:
    """A small convolutional net."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


@cache
def backward_time() -> float:
    """What a backward pass takes on this rank, without any exchange."""
    model, times = net(), []
    for _ in range(50):
        loss = model(torch.ones(BATCH, 64)).sum()
        began = time.monotonic()
        loss.backward()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def train(contestant: str, setting: Setting, seed: int) -> Trained:
    """An ordinary script, for DDP and for offbeat."""
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits.split()
    dataset = TensorDataset(train_x[:SAMPLES], train_y[:SAMPLES])
    model: nn.Module = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    sampler: DistributedSampler[Any] | offbeat.Deal
    attached: AbstractContextManager[object]
    if contestant == DDP:
        sampler = DistributedSampler(dataset, seed=seed)
        loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
        model, attached = DistributedDataParallel(model), nullcontext()
    else:
        sampler = offbeat.Deal(dataset, batch_size=BATCH, seed=seed)
        loader = DataLoader(dataset, batch_sampler=sampler)
        attached = offbeat.attach(model, optimizer, METHODS[contestant]())
    step_s, backward_s = setting.step_s(dist.get_rank(), seed), backward_time()

    dist.barrier()
    began = time.monotonic()
    with attached:
        for epoch in range(setting.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                step_began = time.monotonic()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                rest_s = step_began + step_s() - backward_s - time.monotonic()
                time.sleep(max(0.0, rest_s))
                loss.backward()
                optimizer.step()
    dist.barrier()
    seconds = time.monotonic() - began
    with torch.no_grad():
        return Trained(seconds, nn.functional.cross_entropy(model(test_x), test_y).item())


def take_turns(setting: Setting, seeds: int) -> list[dict[str, Trained]]:
    """One rank: all contestants with every seed, in an order that changes."""
    dist.init_process_group("gloo")
    names = [DDP, *METHODS]
    for name in names:  # warm up
        train(name, replace(setting, epochs=1), seed=-1)
    runs = []
    for seed in range(seeds):
        turn = seed % len(names)
        runs.append({name: train(name, setting, seed) for name in names[turn:] + names[:turn]})
    dist.destroy_process_group()
    return runs


def measure(name: str, setting: Setting, seeds: int) -> list[dict[str, Any]]:
    """All contestants in one setting, as rows."""
    ended = testing.processes(
        *(take_turns, len(setting.speeds), setting, seeds),
        environment={"OMP_NUM_THREADS": "1"},
        time_out_s=900,
    )
    runs: list[dict[str, Trained]] = ended[0].result
    ddp_losses = [run[DDP].loss for run in runs]
    rows = []
    for method in METHODS:
        gains = [run[DDP].seconds / run[method].seconds for run in runs]
        losses = [run[method].loss for run in runs]
        rows.append(
            {
                "setting": name,
                "method": method,
                "speedup": {
                    "median": statistics.median(gains),
                    "low": min(gains),
                    "high": max(gains),
                },
                "possible": statistics.median(map(setting.possible, range(seeds))),
                "loss": statistics.median(losses),
                "loss_low": min(losses),
                "loss_high": max(losses),
                "ddp_loss": statistics.median(ddp_losses),
                "ddp_loss_low": min(ddp_losses),
                "ddp_loss_high": max(ddp_losses),
                "seconds": [run[method].seconds for run in runs],
                "ddp_seconds": [run[DDP].seconds for run in runs],
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("\nwall time of DDP with fixed shares over ours with dealt data, at equal samples")
    print(f"{'setting':12} {'method':17} {'gain':>22} {'possible':>9} {'loss':>22} {'of DDP':>22}")
    for row in rows:
        gain = row["speedup"]
        spreads = [
            f"{row[of]:.3f} ({row[f'{of}_low']:.3f}..{row[f'{of}_high']:.3f})"
            for of in ("loss", "ddp_loss")
        ]
        print(
            f"{row['setting']:12} {row['method']:17} "
            f"{gain['median']:6.2f} ({gain['low']:.2f}..{gain['high']:.2f})".ljust(53)
            + f"{row['possible']:9.2f} {spreads[0]:>22} {spreads[1]:>22}"
        )
    print("targets:", ", ".join(f"{name} {target}" for name, target in TARGETS.items()))


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    arguments = parser.parse_args()
    names, seeds = [arguments.only] if arguments.only else list(SETTINGS), 5
    if arguments.quick:
        names, seeds = [arguments.only or "2:1"], 2
    rows = []
    for name in names:
        setting = SETTINGS[name]
        rows += measure(name, replace(setting, epochs=1) if arguments.quick else setting, seeds)
    show(rows)
    common.write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
