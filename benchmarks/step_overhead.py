"""Step time of offbeat's algorithms over DistributedDataParallel's, on two Gloo workers.

For each model all contestants live in the same two processes and take turns: a block of DDP steps,
a block of SyncSGD steps, and so on, in an order that changes with every turn. The ratio is taken
within a turn, and the median over turns is reported with its quartiles. Memory is the highest
resident size of a process that trains with one contestant alone, beyond that of a process that
trains without any; the larger model only, since small ones drown in noise.

    python benchmarks/step_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

ALGORITHMS: dict[str, Callable[[], offbeat.Algorithm]] = {
    "sync": offbeat.SyncSGD,
    "eager_all": lambda: offbeat.EagerSGD("all"),
    "eager_majority": lambda: offbeat.EagerSGD("majority"),
    "eager_solo": lambda: offbeat.EagerSGD("solo"),
}
ALONE: dict[str, Callable[[], offbeat.Algorithm]] = {
    **ALGORITHMS,
    "abs": offbeat.ABSSGD,
    "abs_local": lambda: offbeat.WaitFreeLocalSGD(),
    "dropcompute": lambda: offbeat.DropCompute(2),
    "nonblocking": lambda: offbeat.NonblockingSGD(2),
}
"""Those whose memory is measured: a step of the others is not comparable with one of DDP's."""


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
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


MODELS = {"mlp": mlp, "conv": conv}


class Contestant:
    """A model, its optimizer and what synchronises it."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], name: str) -> None:
        torch.manual_seed(0)
        model, self.x = make()
        self.y = torch.randint(0, 10, (len(self.x),))
        self.model = DistributedDataParallel(model) if name == "ddp" else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.dp: offbeat.Attachment | None = None
        if name not in ("ddp", "plain"):
            self.dp = offbeat.attach(model, self.optimizer, ALONE[name]())

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


def resident_bytes(name: str) -> None:
    """Train alone for a few steps, and print the highest resident size of rank 0."""
    dist.init_process_group("gloo")
    contestant = Contestant(mlp, name)
    for _ in range(10):
        contestant.step()
    if dist.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(os.environ["OFFBEAT_BENCHMARK_OUT"]).write_text(str(peak))
    if contestant.dp is not None:
        contestant.dp.close()
    dist.destroy_process_group()


def memory() -> dict[str, float]:
    """Return the peak of resident bytes by contestant, beyond plain training; median of three."""
    peaks: dict[str, list[float]] = {name: [] for name in ["plain", "ddp", *ALONE]}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            for name, values in peaks.items():
                os.environ["OFFBEAT_BENCHMARK_OUT"] = f"{folder}/{name}"
                common.torchrun(__file__, 2, "--memory", name)
                values.append(float(Path(f"{folder}/{name}").read_text()))
    middle = {name: statistics.median(values) for name, values in peaks.items()}
    return {name: peak - middle["plain"] for name, peak in middle.items() if name != "plain"}


def race(turns: int, block: int) -> None:
    """Let all contestants take turns, and write the ratios of every turn."""
    dist.init_process_group("gloo")
    ratios: dict[str, dict[str, list[float]]] = {}
    for model, make in MODELS.items():
        names = ["ddp", *ALGORITHMS]
        contestants = {name: Contestant(make, name) for name in names}
        for contestant in contestants.values():
            contestant.seconds(5)  # warm up; DDP rebuilds its buckets after the first step
        ratios[model] = {name: [] for name in ALGORITHMS}
        steps_ms: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(turns):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            took = {name: contestants[name].seconds(block) for name in order}
            for name in names:
                steps_ms[name].append(1e3 * took[name])
            for name in ALGORITHMS:
                ratios[model][name].append(took[name] / took["ddp"])
        if dist.get_rank() == 0:
            shown = (f"{name} {statistics.median(ms):.1f}" for name, ms in steps_ms.items())
            print(f"{model}: milliseconds a step: {', '.join(shown)}", flush=True)
        for contestant in contestants.values():
            if contestant.dp is not None:
                contestant.dp.close()
    if dist.get_rank() == 0:
        Path(os.environ["OFFBEAT_BENCHMARK_OUT"]).write_text(json.dumps(ratios))
    dist.destroy_process_group()


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        if arguments.memory:
            resident_bytes(arguments.memory)
        else:
            race(*((6, 5) if arguments.quick else (30, 12)))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ratios"
        os.environ["OFFBEAT_BENCHMARK_OUT"] = str(out)
        common.torchrun(__file__, 2, *(["--quick"] if arguments.quick else []))
        ratios = json.loads(out.read_text())
    figures = {
        "ratio": {
            model: {name: statistics.median(values) for name, values in by_name.items()}
            for model, by_name in ratios.items()
        },
        "ratios": ratios,
    }
    if not arguments.quick:
        figures["memory_beyond_plain_bytes"] = beyond = memory()
        gradient_bytes = 4 * sum(parameter.numel() for parameter in mlp()[0].parameters())
        for name, extra in beyond.items():
            gradients = extra / gradient_bytes
            print(
                f"memory beyond plain training, mlp: {name:18} {extra / 2**20:6.1f} MiB, "
                f"{gradients:.2f} gradients"
            )
    for model, by_name in ratios.items():
        for name, values in by_name.items():
            print(f"step time over DDP's: {model:5} {name:18} {common.spread(values)}")
    common.write(arguments.json, figures)


if __name__ == "__main__":
    main()
