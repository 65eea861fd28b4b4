"""The fault of survive.py after which a worker joins again by itself: it was frozen.

Four workers train a model of 10 MB with `freeze_s` of 1 s. One of them is stopped (SIGSTOP) at a
random moment, for 1.3 to 3 seconds, and continued (SIGCONT), by a process of its own. The *stall*
of a trial is the longest step of any of the others, less the median of their steps: what is to be
below `freeze_s` + 0.1 s. *Back* is how long the frozen worker took from the moment at which it was
continued to the end of the step in which it has joined again. A trial is survived if all four end
well, with the same bits, and everything that each has computed accounted for; `rejoined` counts
those in which the frozen worker has, too.

    freeze    one of the four workers
"""

from __future__ import annotations

import os
import statistics
import time
from random import Random
from typing import Any

import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.testing import processes

FAULTS = ("freeze",)
WORKERS = 4
WIDTH = 1600  # 10 MB
LIMIT_S = 1.0
STEPS = 15  # of the worker that is back, at least


def train(
    algorithm: offbeat.Algorithm, victim: int, at_s: float, for_s: float, width: int = WIDTH
) -> dict[str, Any]:
    """One worker of one trial; the frozen one has it end."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch, steps, returned = torch.randn(8, width), [], 0
    pace = Cluster.parse(
        f"workers = {WORKERS}\n[compute]\nstep_s = 0.001\n[[event]]\nkind = 'freeze'\n"
        f"worker = {victim}\nat_s = {at_s!r}\nfor_s = {for_s!r}\n"
    )
    back_s: float | None = None
    with offbeat.attach(
        model, optimizer, algorithm, survive=True, freeze_s=LIMIT_S, pace=pace
    ) as dp:
        for _ in dp.until(seconds=30.0):
            from_s = time.monotonic()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps.append(time.monotonic() - from_s)
            if dp._world.returns and back_s is None:
                back_s = dp.seconds - at_s - for_s
            returned += dp._world.returns
            if returned == STEPS:
                dp.stop()
    stats = dp.stats()
    return {
        "identical": bool(stats.replicas_identical),
        "kept": abs(stats.pending_samples) < 1e-3,
        "lost": stats.lost_samples,
        "returned": returned > 0,
        "back_s": back_s,
        "steps": steps,
    }


def trial(algorithm: offbeat.Algorithm, fault: str, random: Random) -> dict[str, Any]:
    """Start workers, and freeze one of them."""
    victim, at_s = random.randrange(WORKERS), random.uniform(0.5, 1.5)
    for_s = random.uniform(1.3, 3.0)
    ended = processes(train, WORKERS, algorithm, victim, at_s, for_s, check=False, time_out_s=90)
    for each in ended:
        if each.error is not None:
            print(f"    worker {each.rank}: {each.error!r}", flush=True)
    told = [each.result for each in ended if each.result is not None]
    others = [each.result for each in ended if each.result is not None and each.rank != victim]
    whole = len(told) == WORKERS and all(each["kept"] for each in told)
    usual = statistics.median([took_s for each in others for took_s in each["steps"]] or [0.0])
    longest = max((took_s for each in others for took_s in each["steps"]), default=None)
    mine = ended[victim].result
    return {
        "fired": mine is None or max(mine["steps"]) > LIMIT_S,
        "survived": whole,
        "identical": whole and all(each["identical"] for each in told),
        "rejoined": whole and mine["returned"],
        "back_s": None if mine is None else mine["back_s"],
        "stall_s": None if longest is None else max(0.0, longest - usual),
        "step_s": usual,
        "lost_samples": others[0]["lost"] if others else None,
    }


def again(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """What else a row says of them."""
    backs = [each["back_s"] for each in trials if each["back_s"] is not None]
    return {
        "rejoined": sum(each["rejoined"] for each in trials),
        "back_s": {"median": statistics.median(backs), "max": max(backs)} if backs else None,
    }
