"""Step time of every codec over DistributedDataParallel's, on a link that is really slow.

Four ranks, two in each of two network namespaces, joined by one virtual cable whose rate `tbf`
limits in both directions: the all-reduce of a model of 10 million parameters has to pass it. The
namespaces are made by this script, and removed at its end; that takes root, `ip` and `tc`, and the
script says so where it cannot. Ranks of one namespace talk without a limit. Nothing leaves the
machine.

Beside offbeat's codecs, under `SyncSGD`: DDP as it is, with its `fp16_compress_hook`, and with its
PowerSGD hook (rank 2), if asked for by `--only`: that one ended with an error of Gloo's in both
runs in which it took part, so it is left out otherwise. All live in the same four processes, one
after another; plain DDP goes first and last. What counts is the median step time of DDP's two runs
over the median of the contestant, as rank 0 measures them. "auto" is measured from its first
step on, and again after its decision. A step is forward, backward and update of 8 samples.

    python benchmarks/bytes.py [--quick] [--json FILE] [--links 100mbit,1gbit,unlimited]
                               [--only NAME,...]

Settings, fixed before the first results: STEPS measured after WARM_UP, by link.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import offbeat

RANKS = 4
SAMPLES = 8
WARM_UP = 3
STEPS = {"100mbit": 3, "1gbit": 10, "unlimited": 20}
AUTO_STEPS = 60
"""From its first step on; it tries both for ten of them."""
CODECS: dict[str, Any] = {
    "none": None,
    "bfloat16": offbeat.Half(),
    "float16": offbeat.Half("float16"),
    "int8": offbeat.Int8(),
    "int4": offbeat.Int4(),
    "global_qsgd_standard": offbeat.GlobalQSGD(),
    "global_qsgd_exponential": offbeat.GlobalQSGD("exponential"),
}
CONTESTANTS = ["ddp", "ddp_fp16", *CODECS]
SERVED_BY_AUTO = ("1gbit", "unlimited")
"""Links on which "auto" is measured: on the slowest, its tries alone would take minutes."""


# --- the link ----------------------------------------------------------------------------------


@contextmanager
def namespaces(link: str) -> Iterator[list[tuple[str, str, str]]]:
    """Two namespaces and a cable between them: of each, its name, interface and address."""
    mark = os.getpid() % 100_000
    sides = [(f"offbeat-{mark}-{side}", f"ob{mark}{side}", f"10.231.7.{side}") for side in (1, 2)]
    try:
        for name, _, _ in sides:
            _run("ip", "netns", "add", name)
        (one, cable, _), (other, end, _) = sides
        ends = ("ip", "link", "add", cable, "netns", one, "type", "veth")
        _run(*ends, "peer", "name", end, "netns", other)
        for name, interface, address in sides:
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for each in (interface, "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")
            if link != "unlimited":
                limit = ("rate", link, "burst", "512kb", "limit", "8mb")
                _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf", *limit)
        yield sides
    finally:
        for name, _, _ in sides:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise SystemExit(
            f"cannot make a slow link here: {' '.join(command)}: {str(why).strip()}. "
            "It takes root, and network namespaces"
        ) from None


def measure(link: str, names: list[str], quick: bool) -> dict[str, Any]:
    """Run four ranks over such a link; what rank 0 has measured."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("cannot make a slow link here: it takes root, ip and tc")
    with namespaces(link) as sides, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        ranks = []
        for rank in range(RANKS):
            name, interface, _ = sides[rank * 2 // RANKS]
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": sides[0][2],
                "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--worker"]
            command += [link, ",".join(names), str(int(quick)), str(result)]
            ranks.append(subprocess.Popen(command, env=variables))
        try:
            for each in ranks:
                if each.wait() != 0:
                    raise SystemExit(f"a rank ended with {each.returncode}")
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        row: dict[str, Any] = json.loads(result.read_text())
        return row


# --- one rank ----------------------------------------------------------------------------------


def net() -> nn.Module:
    """10 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(512, 1536), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(1536, 1536), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1536, 1408), nn.Linear(1408, 10))


def stepper(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(SAMPLES, 512), torch.randint(0, 10, (SAMPLES,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return optimizer, step


def timed(step: Callable[[], None], steps: int, warm_up: int = WARM_UP) -> list[float]:
    for _ in range(warm_up):
        step()
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return taken


def of_ddp(kind: str, steps: int) -> list[float]:
    model = DistributedDataParallel(net())
    if kind == "ddp_fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if kind == "ddp_powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2)
        state.start_powerSGD_iter = 2  # within the warm-up
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return timed(stepper(model)[1], steps)


def of_offbeat(codec: Any, steps: int, warm_up: int = WARM_UP) -> list[float]:
    model = net()
    optimizer, step = stepper(model)
    with offbeat.attach(model, optimizer, codec=codec):
        return timed(step, steps, warm_up)


def worker(link: str, names: list[str], quick: bool, result: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    steps = max(2, STEPS[link] // (2 if quick else 1))
    seconds: dict[str, list[float]] = {}
    for name in names:
        began = time.perf_counter()
        if name.startswith("ddp"):
            taken = of_ddp(name.removesuffix("_again"), steps)
        elif name == "auto":
            auto = AUTO_STEPS // (2 if quick else 1)
            taken = of_offbeat("auto", auto, warm_up=0)
            seconds["auto_decided"] = taken[auto // 2 :]
        else:
            taken = of_offbeat(CODECS[name], steps)
        seconds[name] = taken
        if dist.get_rank() == 0:
            said = f"{link} {name}: {statistics.median(taken):.4f} s a step"
            print(f"{said} ({time.perf_counter() - began:.0f} s in all)", flush=True)
        dist.barrier()
    if dist.get_rank() == 0:
        result.write_text(json.dumps(seconds))
    dist.destroy_process_group()


# --- the figures -------------------------------------------------------------------------------


def row(link: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    plain = [*seconds["ddp"], *seconds.get("ddp_again", [])]
    ddp_s = statistics.median(plain)
    return {
        "link": link,
        "ddp_s": ddp_s,
        "speed_over_ddp": {
            name: round(ddp_s / statistics.median(taken), 3) for name, taken in seconds.items()
        },
        "auto_over_ddp_mean": round(statistics.fmean(plain) / statistics.fmean(seconds["auto"]), 3)
        if "auto" in seconds
        else None,
        "step_s": {name: [round(each, 5) for each in taken] for name, taken in seconds.items()},
    }


def main() -> None:
    parser = common.options("Step time of codecs over DDP's, on a slow link.")
    parser.add_argument("--links", default=",".join(STEPS))
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", nargs=4)
    options = parser.parse_args()
    if options.worker:
        link, names, quick, result = options.worker
        worker(link, names.split(","), quick == "1", Path(result))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    rows = {each["link"]: each for each in common.held(options.json)}
    for link in options.links.split(","):
        asked = options.only.split(",") if options.only else CONTESTANTS
        names = ["ddp", *(name for name in asked if name != "ddp"), "ddp_again"]
        if link in SERVED_BY_AUTO and not options.only:
            names.insert(-1, "auto")
        rows[link] = row(link, measure(link, names, options.quick))
        print(link, json.dumps(rows[link]["speed_over_ddp"], indent=1))
        common.write(options.json, {"rows": list(rows.values())})


if __name__ == "__main__":
    main()
