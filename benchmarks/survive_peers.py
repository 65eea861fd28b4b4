"""What a loss costs the others, beside peers: one of four workers is killed, the same script.

    offbeat          attach(..., SyncSGD(), survive=True)
    torchft          its DistributedDataParallel; every worker is a replica group. With the limits
                     of its command `torchft_lighthouse`: who does not come is waited for 60 s, or
                     until 5 s after its last heartbeat
    torchft, tuned   the same, 0.1 s and 0.5 s; heartbeats every 0.1 s, as by default
    torchft, eager   0.1 s and 5 s, so that whoever is 0.1 s late is left out as well
    torchrun         DDP under `torchrun --max-restarts 1`: all workers are started again. They go
                     on from their last checkpoint, which costs nothing here: it is left out

Four processes on one machine train a linear layer of 10 MB. At a random moment one of them kills
itself (SIGKILL). The *stall* is the longest step of any survivor after that, less its median step;
with torchrun, where nobody survives, the time from the kill to the end of the first step that all
four have made since. A step counts when it is *committed*: torchft repeats nothing, but what
everybody has computed for the step in which a worker is lost is dropped (`steps_lost`).

Contestants take turns, trial by trial. Those that are not installed are left out.

    python benchmarks/survive_peers.py [--quick] [--trials 10] [--json FILE]

Settings, fixed before the first results: SECONDS, WIDTH, GIVEN_UP_MS, trials.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from common import options, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.testing import processes

WORKERS = 4
WIDTH = 1600  # 10 MB
SECONDS = 9.0
"""Each trial trains for so long after its start: longer than torchft's heartbeats live."""
GIVEN_UP_MS = {
    "torchft": (60_000, 5000),
    "torchft, tuned": (100, 500),
    "torchft, eager": (100, 5000),
}
"""How long its server waits for those who do not come, and for those whose heart does not beat."""
CONTESTANTS = ("offbeat", *GIVEN_UP_MS, "torchrun")
Step = tuple[float, float]
"""When it began and ended, by the machine's monotonic clock."""


# --- one worker --------------------------------------------------------------------------------


def _task() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(8, WIDTH)


def _dies_in(seconds: float) -> None:
    """Note the moment for the others, and be killed then."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _train(step: Callable[[], bool], dies: bool, moment_s: float) -> tuple[list[Step], int]:
    """Steps that were committed, and how many were not, for so long."""
    began, steps, lost = time.monotonic(), list[Step](), 0
    if dies:
        _dies_in(moment_s)
    while (from_s := time.monotonic()) < began + SECONDS:
        if step():
            steps.append((from_s, time.monotonic()))
        else:
            lost += 1
    return steps, lost


def with_offbeat(victim: int, moment_s: float) -> tuple[list[Step], int]:
    model, optimizer, x = _task()
    with offbeat.attach(model, optimizer, offbeat.SyncSGD(), survive=True) as dp:

        def step() -> bool:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return True

        return _train(step, dp.rank == victim, moment_s)


def with_torchft(lighthouse: str, victim: int, moment_s: float) -> tuple[list[Step], int]:
    import torchft as ft

    model, plain, x = _task()
    rank = int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"rank-{rank}",
        hostname="127.0.0.1",
    )
    wrapped, optimizer = ft.DistributedDataParallel(manager, model), ft.Optimizer(manager, plain)

    def step() -> bool:
        before = manager.current_step()
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
        return bool(manager.current_step() > before)

    for _ in range(3):  # connections, and who is there
        step()
    steps = _train(step, rank == victim, moment_s)
    manager.shutdown(wait=False)
    return steps


def with_ddp(folder: Path, victim: int, moment_s: float) -> None:
    """Under torchrun: every step is a line in a file, for whoever reads it afterwards."""
    model, optimizer, x = _task()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # By a file for each attempt: with the agent's store, Gloo found addresses of the one before.
    store = f"file://{folder}/store-{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORKERS)
    wrapped = DistributedDataParallel(model)

    def step() -> bool:
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
        return True

    if attempt == 0:
        if rank == victim:
            (folder / "killed").write_text(str(time.monotonic() + moment_s))
        _train(step, rank == victim, moment_s)
    else:
        step()
        dist.barrier()
        (folder / f"again-{rank}").write_text(str(time.monotonic()))
    dist.destroy_process_group()


# --- one trial ---------------------------------------------------------------------------------


def _of_survivors(ended: list[Any], victim: int, moment_s: float) -> dict[str, Any]:
    others = [each for each in ended if each.rank != victim]
    for each in others:
        if each.error is not None:
            print(f"    worker {each.rank}: {each.error!r}", flush=True)
    told = [each.result for each in others if each.result is not None]
    stalls, lost = [], []
    for steps, dropped in told:
        usual_s = statistics.median(to_s - from_s for from_s, to_s in steps)
        began_s = steps[0][0]
        # A step that was dropped is between two that were committed: count from end to end.
        ends = [to_s for _, to_s in steps if to_s - began_s >= moment_s - 1.0]
        gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        stalls.append(max(gaps, default=0.0) - usual_s)
        lost.append(dropped)
    survived = len(told) == WORKERS - 1
    return {
        "fired": ended[victim].exit_code == -signal.SIGKILL,
        "survived": survived,
        "stall_s": max(stalls) if survived else None,
        "steps_lost": max(lost, default=None),
    }


def _offbeat(victim: int, moment_s: float) -> dict[str, Any]:
    ended = processes(with_offbeat, WORKERS, victim, moment_s, check=False, time_out_s=90)
    return _of_survivors(ended, victim, moment_s)


def _torchft(limits_ms: tuple[int, int], victim: int, moment_s: float) -> dict[str, Any]:
    from torchft.coordination import LighthouseServer

    join_ms, beat_ms = limits_ms
    server = LighthouseServer(
        "127.0.0.1:0", min_replicas=1, join_timeout_ms=join_ms, heartbeat_timeout_ms=beat_ms
    )
    try:
        given = server.address(), victim, moment_s
        ended = processes(with_torchft, WORKERS, *given, check=False, time_out_s=90)
    finally:
        server.shutdown()
    return _of_survivors(ended, victim, moment_s)


def _torchrun(victim: int, moment_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        job = json.dumps([name, victim, moment_s])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(WORKERS), "--max-restarts", "1", __file__]
        done = subprocess.run([*command, "--worker", job], capture_output=True, timeout=120)
        again = [float(each.read_text()) for each in Path(name).glob("again-*")]
        killed_s = float((Path(name) / "killed").read_text())
    fired, whole = b"exitcode: -9" in done.stderr, len(again) == WORKERS
    stall_s = max(again) - killed_s if whole else None
    return {"fired": fired, "survived": whole, "stall_s": stall_s, "steps_lost": None}


def trial(name: str, random: Random) -> dict[str, Any]:
    victim, moment_s = random.randrange(WORKERS), random.uniform(1.0, 2.5)
    if name == "offbeat":
        return _offbeat(victim, moment_s)
    if name == "torchrun":
        return _torchrun(victim, moment_s)
    return _torchft(GIVEN_UP_MS[name], victim, moment_s)


def row(name: str, trials: list[dict[str, Any]]) -> dict[str, Any]:
    fired = [each for each in trials if each["fired"]]
    stalls = [each["stall_s"] for each in fired if each["stall_s"] is not None]
    lost = [each["steps_lost"] for each in fired if each["steps_lost"] is not None]
    return {
        "fault": "kill",
        "contestant": name,
        "trials": len(fired),
        "survived": sum(each["survived"] for each in fired),
        "stall_s": {
            "median": statistics.median(stalls) if stalls else None,
            "min": min(stalls, default=None),
            "max": max(stalls, default=None),
        },
        "steps_lost": max(lost, default=None),
    }


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--trials", type=int, default=10, help="of each contestant")
    parser.add_argument("--worker")
    asked = parser.parse_args()
    if asked.worker:
        name, victim, moment_s = json.loads(asked.worker)
        with_ddp(Path(name), victim, moment_s)
        return
    names = list(CONTESTANTS)
    if importlib.util.find_spec("torchft") is None:
        print("torchft is left out: pip install torchft-nightly")
        names = [name for name in names if name not in GIVEN_UP_MS]
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1 if asked.quick else asked.trials):
        for name in names:
            trials[name].append(trial(name, Random(number)))
            told = trials[name][-1]
            print(f"{number:3} {name:15} {told}", flush=True)
        write(asked.json, {"workers": WORKERS, "rows": [row(*each) for each in trials.items()]})
    for name in names:
        print(row(name, trials[name]))


if __name__ == "__main__":
    main()
