"""Step time of offbeat's algorithms over DistributedDataParallel's, on two Gloo workers.

Each algorithm lives with DDP in the same two processes, and they take turns: a block of DDP steps,
a block of its own, in an order that changes with every turn. The ratio is taken within a turn, and
the median over turns is reported with its quartiles. A step is one backward pass. DDP that
accumulates four by `no_sync` is compared with SyncSGD of four micro-batches a round ("sync_4"), and
with SyncSGD that does the same as DDP, by `dp.no_sync` ("sync_no_sync").

Memory is the highest resident size of a process that trains with one contestant alone, beyond that
of a process that trains without any; the larger model only, since small ones drown in noise.

    python benchmarks/step_overhead.py [--quick] [--busy N] [--runs N] [--json FILE]
                                       [--only NAME,...] [--net mlp|conv]

`--only` and `--net` measure some rows alone, without memory; `--only sync,sync+survive` what it
costs to be ready for a loss, while nothing happens. `--busy 4` has four processes beside
it that do nothing but compute, `--runs 10` measures ten times: to see that all end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

ALGORITHMS: dict[str, Callable[[], offbeat.Algorithm]] = {
    "sync": offbeat.SyncSGD,
    "sync_4": lambda: offbeat.SyncSGD(micro_batches=4),
    "sync_no_sync": offbeat.SyncSGD,
    "eager_all": lambda: offbeat.EagerSGD("all"),
    "eager_majority": lambda: offbeat.EagerSGD("majority"),
    "eager_half": offbeat.EagerSGD,
    "eager_solo": lambda: offbeat.EagerSGD("solo"),
    "abs": offbeat.ABSSGD,
    "waitfree": offbeat.WaitFreeLocalSGD,
    "nonblocking": lambda: offbeat.NonblockingSGD(1),
    "dropcompute": lambda: offbeat.DropCompute(1),
    "lbbsp": lambda: offbeat.LBBSP(1),
    "local": lambda: offbeat.LocalSGD(1),
    "local_4": lambda: offbeat.LocalSGD(4),
    "msync": lambda: offbeat.MSyncSGD(2),
}
REFERENCES = {"sync_4": "ddp_4", "sync_no_sync": "ddp_4"}
"""What an algorithm is compared with, if not with plain DDP."""


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
        self.ddp = DistributedDataParallel(model) if name.startswith("ddp") else None
        self.model = self.ddp or model
        self.accumulates = 4 if name in ("ddp_4", "sync_no_sync") else 1
        self.backwards = 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.dp: offbeat.Attachment | None = None
        if self.ddp is None and name != "plain":
            method, _, survive = name.partition("+")
            algorithm = ALGORITHMS[method]()
            self.dp = offbeat.attach(model, self.optimizer, algorithm, survive=bool(survive))

    def step(self) -> None:
        self.backwards += 1
        if self.backwards % self.accumulates:
            synchronises = self.ddp or self.dp
            assert synchronises is not None
            with synchronises.no_sync():
                self.backward()
            return
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()

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
    peaks: dict[str, list[float]] = {name: [] for name in ["plain", "ddp", *ALGORITHMS]}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            for name, values in peaks.items():
                os.environ["OFFBEAT_BENCHMARK_OUT"] = f"{folder}/{name}"
                common.torchrun(__file__, 2, "--memory", name)
                values.append(float(Path(f"{folder}/{name}").read_text()))
    middle = {name: statistics.median(values) for name, values in peaks.items()}
    return {name: peak - middle["plain"] for name, peak in middle.items() if name != "plain"}


def race(models: list[str], names: list[str], turns: int, block: int) -> None:
    """Let each algorithm take turns with its reference, and write the ratios of every turn."""
    dist.init_process_group("gloo")
    ratios: dict[str, dict[str, list[float]]] = {model: {} for model in models}
    for model in models:
        for name in names:
            ratios[model][name] = pair(MODELS[model], name, turns, block)
            if dist.get_rank() == 0:
                print(f"{model:5} {name:15} {common.spread(ratios[model][name])}", flush=True)
    if dist.get_rank() == 0:
        Path(os.environ["OFFBEAT_BENCHMARK_OUT"]).write_text(json.dumps(ratios))
    dist.destroy_process_group()


def pair(
    make: Callable[[], tuple[nn.Module, Tensor]], name: str, turns: int, block: int
) -> list[float]:
    """Return an algorithm's step time over its reference's, turn by turn."""
    names = (REFERENCES.get(name, "ddp"), name)
    reference, ours = contestants = [Contestant(make, each) for each in names]
    for contestant in contestants:
        contestant.seconds(8)  # warm up; DDP rebuilds its buckets after the first step
    ratios = []
    for turn in range(turns):
        order = contestants if turn % 2 else contestants[::-1]
        took = {id(each): each.seconds(block) for each in order}
        ratios.append(took[id(ours)] / took[id(reference)])
    assert ours.dp is not None
    ours.dp.close()
    return ratios


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Have so many processes compute beside the block."""
    loop = [sys.executable, "-c", "while True: pass"]
    beside = [subprocess.Popen(loop) for _ in range(processes)]
    try:
        yield
    finally:
        for each in beside:
            each.kill()
            each.wait()


def names(text: str) -> list[str]:
    """Algorithms, as they were typed."""
    typed = text.split(",")
    if unknown := [name for name in typed if name.removesuffix("+survive") not in ALGORITHMS]:
        known = ", ".join(ALGORITHMS)
        raise argparse.ArgumentTypeError(f"must be some of {known}, got {', '.join(unknown)}")
    return typed


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside it")
    parser.add_argument("--runs", type=int, default=1, help="how often to measure")
    parser.add_argument("--only", type=names, help="some algorithms, by comma; no memory")
    parser.add_argument("--net", choices=MODELS, help="one of the two nets; no memory")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = arguments.only or list(ALGORITHMS)
    if "RANK" in os.environ:
        if arguments.memory:
            resident_bytes(arguments.memory)
        elif arguments.quick:
            race([arguments.net or "conv"], chosen, 2, 4)
        else:
            race([arguments.net] if arguments.net else list(MODELS), chosen, 20, 12)
        return
    passed_on = ["--quick"] if arguments.quick else []
    passed_on += ["--only", ",".join(chosen)]
    passed_on += ["--net", arguments.net] if arguments.net else []
    every: list[dict[str, dict[str, list[float]]]] = []
    with tempfile.TemporaryDirectory() as folder, busy(arguments.busy):
        out = Path(folder) / "ratios"
        os.environ["OFFBEAT_BENCHMARK_OUT"] = str(out)
        for run in range(arguments.runs):
            common.torchrun(__file__, 2, *passed_on)
            every.append(json.loads(out.read_text()))
            print(f"run {run + 1} of {arguments.runs} has ended", flush=True)
    ratios = {
        model: {name: [r for each in every for r in each[model][name]] for name in chosen}
        for model in every[0]
    }
    figures = {
        "ratio": {
            model: {name: statistics.median(values) for name, values in by_name.items()}
            for model, by_name in ratios.items()
        },
        "ratios": ratios,
        "busy": arguments.busy,
        "runs": arguments.runs,
    }
    if not (arguments.quick or arguments.busy or arguments.only or arguments.net):
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
