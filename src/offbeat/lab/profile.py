"""Measure the workers and the network of this job, and write them down as a cluster file.

    torchrun --nproc-per-node 4 -m offbeat profile -o my-cluster.toml               a stand-in model
    torchrun --nproc-per-node 4 -m offbeat profile train.py -o my-cluster.toml      your own script

Every worker's micro-batches are timed as records.py has them: from the end of one step to the next
`optimizer.step()`, reading data included, waiting for others not. The network is timed through the
verbs of worlds/base.py, so are codecs (codec_speed.py), and what the host costs beyond all that by
short trainings (overhead.py). fit.py turns it into what a cluster file can express; worker 0 writes
it.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import nn

import offbeat
from offbeat import records
from offbeat.algorithms import SyncSGD
from offbeat.attach import attach
from offbeat.clusters import Cluster
from offbeat.clusters.write import to_toml
from offbeat.errors import ClusterError, ReportError
from offbeat.lab import codec_speed, overhead
from offbeat.lab.fit import Fitted, fit_compute, fit_network
from offbeat.lab.stand_ins import process_group_kept
from offbeat.report.files import WholeFile
from offbeat.scripts import run_script
from offbeat.worlds import World, enter_world, leave_world

WARM_UP = 2
"""Micro-batches of each worker that do not count: the first ones allocate and load."""
FEWEST = 20
"""Micro-batches of each worker that say something about its noise."""
_WIDTH, _BATCH = 256, 64
_ALL_REDUCES = {8: 40, 65_536: 30, 1_048_576: 20, 8_388_608: 8}  # bytes: how many
_ADDS = 100

Measured = dict[str, list[float]]


class ProfileError(Exception):
    """Nothing can be written: the measurement is not possible, or not enough."""


@dataclass(frozen=True)
class Profile:
    """What was measured: a cluster, and how it was found."""

    cluster: Cluster
    fitted: Fitted
    counts: list[int]
    """Micro-batches that were measured, by worker."""

    def summary(self) -> Table:
        """Return the figures for a terminal."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("worker", "per micro-batch", "of the slowest's", "noise", "measured"):
            table.add_column(title, justify="left" if title == "noise" else "right")
        slowest = max(self.fitted.seconds)
        for worker, seconds in enumerate(self.fitted.seconds):
            noise = self.fitted.noise[worker]
            table.add_row(
                str(worker),
                f"{1000 * seconds:.3f} ms",
                f"{seconds / slowest:.0%}",
                "a trace of its times" if noise is None else str(noise),
                str(self.counts[worker]),
            )
        return table

    def network(self) -> str:
        """Return the network and the host, a line each."""
        found = self.cluster.network
        if self.cluster.workers == 1:
            return "network: not measured, there is one worker"
        return (
            f"network: latency {1e6 * found.latency_s:.0f} µs, "
            f"{found.bandwidth_bytes_per_s / 1e9:.3g} GB/s; "
            f"store {1e6 * found.control_latency_s:.0f} µs one way; "
            f"codec {found.codec_bytes_per_s / 1e9:.3g} GB/s\n"
            f"host: {self.cluster.overhead}"
        )


def profile(
    target: Path,
    script: Path | None = None,
    arguments: Sequence[str] = (),
    *,
    steps: int = 200,
) -> Profile | None:
    """Measure this job and write the cluster file `target`; None on all workers but worker 0.

    Without a `script`, each worker runs `steps` micro-batches of a small model of ours. Raises
    ProfileError on every worker if nothing can be written; then there is no file.
    """
    if offbeat.rank() == 0:
        with _writable():
            WholeFile(target).discard()
    with process_group_kept():
        mine = _stand_in(steps) if script is None else _run(script, arguments)
        world = enter_world()
        for thing in list(world.open):  # what the script has not closed
            thing.close()
        leave_world(world)
        probes = overhead.probe(world.size) if world.size > 1 else {}
        world = enter_world()
        try:
            found = _measured(world, mine, probes, target, script)
        except BaseException as error:
            # What one finds wrong, all do, or it is over: they leave together.
            leave_world(world, None if isinstance(error, ProfileError) else error)
            raise
        leave_world(world)
    return found


@contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except ReportError as error:
        raise ProfileError(str(error)) from None


# --- micro-batches -------------------------------------------------------------------------


def _stand_in(steps: int) -> Measured:
    """Time the micro-batches of a small model, which all workers compute side by side."""
    if steps < WARM_UP + FEWEST:
        raise ProfileError(f"--steps must be at least {WARM_UP + FEWEST}, got {steps}")
    lines: list[records.Line] = []
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(_BATCH, _WIDTH)
    try:
        world = enter_world()
    except (ClusterError, ValueError) as error:  # $OFFBEAT_PACE does not fit
        raise ProfileError(str(error)) from None
    world.records = lines.append
    with attach(model, optimizer, SyncSGD(micro_batches=steps, overlap=False)):  # one round
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    world.records = None
    leave_world(world)
    return _micro_batches(lines)


def _run(script: Path, arguments: Sequence[str]) -> Measured:
    """Run a script as torchrun would have, and time what it attaches."""
    before = os.environ.get("OFFBEAT_RECORDS")
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        os.environ["OFFBEAT_RECORDS"] = folder
        try:
            run_script(script, arguments)
        finally:
            if before is None:
                del os.environ["OFFBEAT_RECORDS"]
            else:
                os.environ["OFFBEAT_RECORDS"] = before
        found = any(Path(folder).iterdir())
        return _micro_batches(records.read(Path(folder))) if found else {}


def _micro_batches(lines: Iterator[records.Line] | list[records.Line]) -> Measured:
    measured: Measured = {"seconds": [], "samples": []}
    for line in lines:
        if line["kind"] == "compute":
            measured["seconds"].append(line["to_s"] - line["from_s"])
            measured["samples"].append(line["samples"])
    return {name: values[WARM_UP:] for name, values in measured.items()}


# --- all workers together ------------------------------------------------------------------


def _measured(
    world: World, mine: Measured, probes: overhead.Probes, target: Path, script: Path | None
) -> Profile | None:
    """Time the network with everyone; on worker 0, gather what was measured, fit it, write it."""
    everyone = [json.loads(text) for text in _gathered(world, "micro-batches", mine)]
    if problem := _too_little(everyone, script):
        raise ProfileError(problem)
    all_reduces, control_s = _network(world)
    latencies = [json.loads(text) for text in _gathered(world, "control", control_s)]
    codec = codec_speed.codec_bytes_per_s(world) if world.size > 1 else 0.0
    codecs = [json.loads(text) for text in _gathered(world, "codec", codec)]
    all_probes = [json.loads(text) for text in _gathered(world, "host", probes)]
    if world.rank != 0:
        return None
    fitted = fit_compute(*_usable(everyone))
    data: dict[str, Any] = {
        "name": target.stem,
        "description": f"Measured on {socket.gethostname()}.",
        "workers": world.size,
        "speed": [round(speed, 4) for speed in fitted.speeds],
        "compute": {"step_s": _short(fitted.step_s), "sample_s": _short(fitted.sample_s)},
        "noise": fitted.tables(),
    }
    if world.size > 1:
        network = fit_network(world.size, all_reduces)
        network |= {"control_latency_s": median(latencies), "codec_bytes_per_s": median(codecs)}
        data["network"] = {key: _short(value) for key, value in network.items()}
        host = overhead.fit_overhead(all_probes, data["network"], bool(_pace()))
        data["overhead"] = {key: _short(value) for key, value in host.items()}
    counts = [len(measured["seconds"]) for measured in everyone]
    found = Profile(Cluster.model_validate(data), fitted, counts)
    text = to_toml(found.cluster, _comments(found, script))
    Cluster.parse(text, str(target))
    with _writable(), WholeFile(target) as file:
        file.write(text)
    return found


def _pace() -> str:
    """By which cluster file the workers are paced, if they are."""
    return os.environ.get("OFFBEAT_PACE", "")


def _short(value: Any) -> Any:
    """Leave out digits that nobody has measured."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _gathered(world: World, what: str, mine: object) -> list[str]:
    world.control.set(f"profile/{what}/{world.rank}", json.dumps(mine).encode())
    return [world.control.get(f"profile/{what}/{rank}").decode() for rank in world.members]


def _too_little(everyone: list[Measured], script: Path | None) -> str:
    """Say what is missing, in one sentence; the same on every worker."""
    counts = [len(measured.get("seconds", ())) for measured in everyone]
    if script is not None and not any(everyone):
        return f"{script} attached nothing: the micro-batches inside offbeat.attach() are measured"
    worker = counts.index(min(counts))
    if counts[worker] < FEWEST:
        return (
            f"worker {worker} computed {counts[worker]} micro-batches after the first {WARM_UP}: "
            f"at least {FEWEST} are needed; train for longer"
        )
    return ""


def _usable(everyone: list[Measured]) -> tuple[list[list[float]], list[list[float]]]:
    """Leave out micro-batches whose samples nobody declared, where samples matter."""
    sizes = {n for measured in everyone for n in measured["samples"] if n > 0}
    kept = [
        [
            (time, n if len(sizes) > 1 else 1.0)
            for time, n in zip(measured["seconds"], measured["samples"], strict=True)
            if n > 0 or len(sizes) < 2
        ]
        for measured in everyone
    ]
    return [[time for time, _ in pairs] for pairs in kept], [
        [n for _, n in pairs] for pairs in kept
    ]


def _network(world: World) -> tuple[dict[int, float], float]:
    """Time all-reduces of several sizes, and the store: seconds by bytes, seconds one way."""
    if world.size == 1:
        return {}, 0.0
    channel = world.channel("profile")
    seconds: dict[int, float] = {}
    for size_bytes, count in _ALL_REDUCES.items():
        tensor, meet = torch.zeros(size_bytes // 4), torch.zeros(1)
        taken = torch.zeros(count, dtype=torch.float64)
        for turn in range(-2, count):  # two to warm up
            channel.all_reduce(meet).wait()
            began = world.now()
            channel.all_reduce(tensor).wait()
            if turn >= 0:
                taken[turn] = world.now() - began
        # The last to come has waited for nobody: what it sees is the all-reduce itself.
        channel.all_reduce(taken, "min").wait()
        seconds[size_bytes] = taken.median().item()
    there_and_back = []
    for _ in range(_ADDS):
        began = world.now()
        world.control.add("profile/there-and-back", 1)
        there_and_back.append(world.now() - began)
    return seconds, median(there_and_back) / 2


def _comments(found: Profile, script: Path | None) -> list[str]:
    """Say when, where and how this was measured."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    counts = found.counts
    number = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    lines = [
        f"Measured by offbeat {offbeat.__version__} on {now}",
        f"on {socket.gethostname()} ({platform.platform()}), torch {torch.__version__}.",
        f"Micro-batches: {number} of each worker of {script or 'a small stand-in model'}, "
        f"without the first {WARM_UP}.",
    ]
    if pace := _pace():
        lines.append(f"The workers were paced by {pace} ($OFFBEAT_PACE).")
    if found.cluster.workers > 1:
        sizes = ", ".join(f"{size:,}" for size in _ALL_REDUCES)
        lines.append(
            f"Network: all-reduces of {sizes} bytes, as a ring; {_ADDS} calls of the store."
        )
        lines.append(
            f"Codec: Int8 of {codec_speed.NUMBERS:,} numbers, {codec_speed.TURNS} times, by all "
            "workers at once, without its waits."
        )
        lines.append(
            f"Overhead: trainings of {overhead.STEPS} steps, paced at {overhead.PACE_S:g} s each."
        )
    else:
        lines.append("One worker alone: no network was measured.")
    return lines
