"""What one gradient costs where each goes by itself from one to all, in CPU time, by thread.

Real ranks over Gloo, the net of straggler_step.py (1 MB). Rank 0 trains with `ASGD()`; the others
have left, so that all they do is to receive and to apply what it sends. So the CPU time of a
process, over the gradients, less its own compute, is what a gradient costs whoever sends it, or
whoever receives it. It is the processor's time: other programs on the machine count for little.

    program     its own thread: compute, pile up, apply (an optimizer step)
    background  says and hears entries, sends or receives, sums
    others      Python's other threads
    Gloo        those that are not Python's, Gloo's above all

With P ranks of which each makes a gradient in every step, on C cores, a step takes at least
P (compute + sent + (P - 1) received) / C of CPU time; that is printed beside.

    python benchmarks/gradient_cost.py [--ranks 2,4,8] [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import common
import torch.distributed as dist
from straggler_step import Task

import offbeat
from offbeat import testing

CORES = os.cpu_count() or 1
WARM_UP = 20
KINDS = ("program", "background", "others", "Gloo")


def by_thread() -> dict[str, float]:
    """CPU seconds of this process so far, by what its threads are for."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = dict.fromkeys(KINDS, 0.0)
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name))
        kind = "Gloo" if name is None else "others"
        if int(task.name) == threading.main_thread().native_id:
            kind = "program"
        elif name is not None and "gradients of" in name:
            kind = "background"
        found[kind] += int((task / "schedstat").read_text().split()[0]) * 1e-9
    return found


def costs(turns: int, steps: int) -> list[dict[str, Any]]:
    """One rank: what a gradient of rank 0 costs it, turn by turn; and a step without any exchange.

    Threads that end meanwhile would be missed; none does within a block.
    """
    dist.init_process_group("gloo")
    rows = []
    for _ in range(turns):
        task = Task()
        task.compute_s = 0.0
        own_s = alone(task, steps)
        seen: list[dict[str, float]] = []

        def look(_: object, each: offbeat.Round, seen: list[dict[str, float]] = seen) -> None:
            if each.round in (WARM_UP, WARM_UP + steps):
                seen.append(by_thread())

        with offbeat.attach(task.model, task.optimizer, offbeat.ASGD()) as dp:
            dp.on_round(look)
            for _ in range(WARM_UP + steps + 1 if dp.rank == 0 else 0):
                task.step(task.model, task.optimizer)
        first, last = seen
        spent = {kind: 1e3 * (last[kind] - first[kind]) / steps for kind in first}
        rows.append({"own_ms": 1e3 * own_s, "spent_ms": spent})
    dist.destroy_process_group()
    return rows


def alone(task: Task, steps: int) -> float:
    """CPU seconds of a step without any exchange."""
    for _ in range(WARM_UP):
        task.step(task.model, task.optimizer)
    began = time.process_time()
    for _ in range(steps):
        task.step(task.model, task.optimizer)
    return (time.process_time() - began) / steps


def row_of(ranks: int, turns: int, steps: int) -> dict[str, Any]:
    """The medians over turns, of rank 0 and of all others."""
    environment = {"OMP_NUM_THREADS": "1"}
    ended = testing.processes(costs, ranks, turns, steps, environment=environment, time_out_s=300)
    sender, *receivers = (one.result for one in ended)
    own_ms = statistics.median(each["own_ms"] for each in sender)

    def median(turns_of: list[list[dict[str, Any]]], kind: str) -> float:
        return statistics.median(each["spent_ms"][kind] for rank in turns_of for each in rank)

    sent = {kind: median([sender], kind) for kind in KINDS}
    received = {kind: median(receivers, kind) for kind in KINDS}
    sent_ms, received_ms = sum(sent.values()) - own_ms, sum(received.values())
    return {
        "ranks": ranks,
        "own_ms": own_ms,
        "sent_ms": sent_ms,
        "received_ms": received_ms,
        "sender_by_thread_ms": sent,
        "receiver_by_thread_ms": received,
        "least_step_ms": ranks * (own_ms + sent_ms + (ranks - 1) * received_ms) / CORES,
    }


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8", help="how many, such as 2")
    arguments = parser.parse_args()
    turns, steps = (2, 100) if arguments.quick else (5, 200)
    rows = [row_of(int(ranks), turns, steps) for ranks in arguments.ranks.split(",")]
    for row in rows:
        print(
            f"{row['ranks']} ranks: a step {row['own_ms']:.2f} ms of CPU time; a gradient sent "
            f"{row['sent_ms']:.2f}, received {row['received_ms']:.2f}; so with all of them at "
            f"work on {CORES} cores a step takes {row['least_step_ms']:.0f} ms at least"
        )
        for who in ("sender", "receiver"):
            parts = ", ".join(f"{k} {v:.2f}" for k, v in row[f"{who}_by_thread_ms"].items())
            print(f"    {who}: {parts}")
    common.write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
