"""What the loss of a host costs the other one: two network namespaces, under `offbeat launch`.

Each namespace stands for a host with two workers and a launcher of its own; one virtual cable joins
them. Host 0 has the job's store. At a random moment

    cut link        the cable is taken down: nothing is said, nobody answers any more
    kill host 1     launcher and workers of host 1 are killed, at the same moment
    kill host 0     the same, of the host with the store; with three hosts of one worker each, so
                    that two go on, with its standby on host 1

The *stall* of a trial is the longest step of any worker of the hosts that go on after that, less
its median step. A cut link can be told from a slow one only by a limit, OFFBEAT_LOST_S. A trial is
survived if both of their workers end well, with the same bits, and with all that they have computed
applied; and if nobody of the other host goes on training without them. The namespaces are made by
this script, and removed at its end; that takes root and `ip`, and the script says so where it
cannot.

    python benchmarks/two_hosts.py [--quick] [--trials 20] [--lost-s 3] [--json FILE]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from cable import cable
from common import options, write

import offbeat

WIDTH = 1600  # 10 MB
BEGINS_S = 1.0
"""The fault comes between this and twice of it after the first step of all."""
AFTER_S = 3.0
"""So long they train after the limit."""
PORT = 29517
FAULTS = ("cut link", "kill host 1", "kill host 0")
Ends = list[tuple[str, str, str]]
METHODS: dict[str, offbeat.Algorithm] = {
    "SyncSGD()": offbeat.SyncSGD(),
    'EagerSGD("solo")': offbeat.EagerSGD("solo"),
}


# --- one worker --------------------------------------------------------------------------------


def train(name: str, folder: Path, seconds: float) -> None:
    """An ordinary loop; what it has seen goes into a file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(8, WIDTH)
    steps: list[tuple[float, float]] = []
    with offbeat.attach(model, optimizer, METHODS[name]) as dp:
        (folder / f"begun-{dp.rank}").touch()
        for _ in dp.until(seconds=seconds):
            began = time.time()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps.append((began, time.time() - began))
    stats = dp.stats()
    lost = stats.computed_samples - stats.applied_samples - stats.dropped_samples
    told = {
        "steps": steps,
        "identical": bool(stats.replicas_identical),
        "kept": abs(lost) < 1e-3,
    }
    (folder / f"ended-{dp.rank}.json").write_text(json.dumps(told))


# --- two hosts ---------------------------------------------------------------------------------


@contextmanager
def host(number: int, ends: Ends, lost_s: float, told: list[str], survives: bool) -> Iterator[None]:
    """A launcher with its workers, in its namespace."""
    name, interface, _ = ends[number]
    variables = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": interface,
        "OFFBEAT_LOST_S": str(lost_s),
        "OMP_NUM_THREADS": "1",
    }
    workers = "2" if len(ends) == 2 else "1"
    job = ["--nnodes", str(len(ends)), "--node-rank", str(number), "--nproc-per-node", workers]
    job += ["--master-addr", ends[0][2], "--master-port", str(PORT)]
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "offbeat", "launch", *job]
    process = subprocess.Popen(
        [*command, __file__, "--worker", *told],
        env=variables,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
        words = process.communicate()[1].decode()
        if survives and process.returncode:
            print(words, flush=True)
    finally:
        kill(name)
        process.wait()


def kill(name: str) -> None:
    """End all that runs in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def trial(name: str, fault: str, random: Random, lost_s: float) -> dict[str, Any]:
    seconds = 2 * BEGINS_S + lost_s + AFTER_S
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with_store = fault == "kill host 0"
        joins = stack.enter_context(cable(3 if with_store else 2))
        victim = 0 if with_store else 1
        other = joins.ends[victim][0]
        told = [name, str(folder), str(seconds)]
        for number in range(len(joins.ends)):
            if number != victim:
                stack.enter_context(host(number, joins.ends, lost_s, told, survives=True))
        with host(victim, joins.ends, lost_s, told, survives=False):
            while len(list(folder.glob("begun-*"))) < (3 if with_store else 4):
                time.sleep(0.01)
            time.sleep(random.uniform(BEGINS_S, 2 * BEGINS_S))
            happened = time.time()
            if fault == "cut link":
                joins.cut()
            else:
                kill(other)
            while len(list(folder.glob("ended-*"))) < 2 and time.time() < happened + 30:
                time.sleep(0.05)
            time.sleep(1.0)  # who must not go on would end now, too
            kill(other)
        ended = sorted(folder.glob("ended-*"))
        expected = ["ended-1", "ended-2"] if with_store else ["ended-0", "ended-1"]
        survived = [each.stem for each in ended] == expected
        tales = [json.loads(each.read_text()) for each in ended]
    stalls = []
    for tale in tales:
        usual = statistics.median([took for _, took in tale["steps"]])
        stalls += [took - usual for began, took in tale["steps"] if began + took >= happened]
    return {
        "survived": survived and all(tale["kept"] for tale in tales),
        "identical": survived and all(tale["identical"] for tale in tales),
        "stall_s": max(stalls, default=None),
    }


def row(name: str, fault: str, trials: int, lost_s: float) -> dict[str, Any]:
    random = Random(f"{name} {fault}")
    all_of = [trial(name, fault, random, lost_s) for _ in range(trials)]
    stalls = [each["stall_s"] for each in all_of if each["stall_s"] is not None]
    return {
        "fault": fault,
        "algorithm": name,
        "lost_s": lost_s,
        "trials": trials,
        "survived": sum(each["survived"] for each in all_of),
        "replicas_identical": sum(each["identical"] for each in all_of),
        "stall_s": {
            "median": statistics.median(stalls) if stalls else None,
            "max": max(stalls, default=None),
        },
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each row")
    parser.add_argument("--lost-s", type=float, default=3.0, help="OFFBEAT_LOST_S")
    parser.add_argument("--worker", nargs=3)
    arguments = parser.parse_args()
    if arguments.worker:
        name, folder, seconds = arguments.worker
        train(name, Path(folder), float(seconds))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    rows = []
    for name in METHODS:
        for fault in FAULTS:
            rows.append(
                told := row(
                    name, fault, 1 if arguments.quick else arguments.trials, arguments.lost_s
                )
            )
            print(json.dumps(told), flush=True)
            write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
