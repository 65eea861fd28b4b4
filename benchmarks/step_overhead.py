"""Step time of offbeat's algorithms over DistributedDataParallel's, on two Gloo workers.

For each model all contestants live in the same two processes and take turns: a block of DDP steps,
a block of SyncSGD steps, and so on, in an order that changes with every turn. The ratio is taken
within a turn, and the median over turns is reported with its quartiles. Memory is the peak of
tensor bytes alive during a step, beyond model and data, counted by torch's own profiler.

    python benchmarks/step_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

ALGORITHMS: dict[str, Callable[[], offbeat.Algorithm]] = {
    "sync": offbeat.SyncSGD,
    "sync_no_overlap": lambda: offbeat.SyncSGD(overlap=False),
}


def mlp() -> tuple[nn.Module, Tensor]:
    """10 million parameters."""
    layers: list[nn.Module] = [nn.Linear(512, 1536), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(1536, 1536), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1536, 1408), nn.Linear(1408, 10)), torch.randn(64, 512)


def conv() -> tuple[nn.Module, Tensor]:
    """A small convolutional net for 32 x 32 images."""
    layers: list[nn.Module] = []
    for wide, out in ((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        layers += [
            nn.Conv2d(wide, out, 3, padding=1, stride=2 if out > wide > 3 else 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(16, 3, 32, 32)


class Contestant:
    """A model, its optimizer and what synchronises it."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], name: str) -> None:
        torch.manual_seed(0)
        model, self.x = make()
        self.y = torch.randint(0, 10, (len(self.x),))
        self.model = DistributedDataParallel(model) if name == "ddp" else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.dp = None
        if name != "ddp":
            self.dp = offbeat.attach(model, self.optimizer, ALGORITHMS[name]())

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps

    def peak_bytes(self) -> int:
        """Tensor bytes at the highest point of one step, above those held before it."""
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            self.step()
        alive = peak = 0
        for event in profile._memory_profile().timeline if False else _allocations(profile):
            alive += event
            peak = max(peak, alive)
        return peak


def _allocations(profile: Any) -> list[int]:
    events = profile.profiler.kineto_results.events()
    found = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return [size for _, size in sorted(found)]


def held_bytes(contestant: Contestant) -> int:
    """Bytes that synchronising holds between steps: buckets, beyond parameters and gradients."""
    if contestant.dp is not None:
        return sum(t.numel() * t.element_size() for t in contestant.dp._replica.flats.tensors)
    return sum(p.numel() * p.element_size() for p in contestant.model.parameters())


def race(out: Path, turns: int, block: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ratios: dict[str, dict[str, list[float]]] = {}
    memory: dict[str, dict[str, float]] = {}
    for model, make in (("mlp", mlp), ("conv", conv)):
        names = ["ddp", *ALGORITHMS]
        contestants = {name: Contestant(make, name) for name in names}
        for contestant in contestants.values():
            contestant.seconds(5)  # warm up; DDP rebuilds its buckets after the first step
        ratios[model] = {name: [] for name in ALGORITHMS}
        for turn in range(turns):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            took = {name: contestants[name].seconds(block) for name in order}
            for name in ALGORITHMS:
                ratios[model][name].append(took[name] / took["ddp"])
        peaks = {name: contestants[name].peak_bytes() for name in names}
        memory[model] = {name: (peaks[name]) / peaks["ddp"] for name in ALGORITHMS}
        if rank == 0:
            steps_ms = {name: 1e3 * contestants[name].seconds(block) for name in names}
        else:
            steps_ms = {name: contestants[name].seconds(block) for name in names}
        if rank == 0:
            shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in steps_ms.items())
            print(f"{model}: {shown} a step; peak bytes of a step {peaks}", flush=True)
        for contestant in contestants.values():
            if contestant.dp is not None:
                contestant.dp.close()
    if rank == 0:
        for model, by_name in ratios.items():
            for name, values in by_name.items():
                print(
                    f"{model:5} {name:6} step time over DDP {common.spread(values)}, "
                    f"peak memory of a step over DDP {memory[model][name]:.2f}"
                )
        common.write(
            None if str(out) == "-" else out,
            {
                "ratio": {
                    model: {name: statistics.median(values) for name, values in by_name.items()}
                    for model, by_name in ratios.items()
                },
                "ratios": ratios,
                "memory_ratio": memory,
            },
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    if "RANK" in os.environ:
        race(
            Path(os.environ["OFFBEAT_BENCHMARK_JSON"]),
            turns=12 if arguments.quick else 40,
            block=8 if arguments.quick else 15,
        )
    else:
        os.environ["OFFBEAT_BENCHMARK_JSON"] = str(arguments.json or "-")
        common.torchrun(__file__, 2, *(["--quick"] if arguments.quick else []))
