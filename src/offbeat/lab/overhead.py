"""What a step, an exchange and a wake-up cost this job beyond device and network.

Every worker runs a few short trainings of a small model, paced at 20 ms a micro-batch, so that what
they compute is known. What is left of a step's time is the host's:

    in lockstep        the worker's own part of a step is `step_s`; what the round takes beyond that
                       and beyond the network's all-reduce, `exchange_s`
    by a background    the same rounds, started by messages; virtual time with both says what they
                       take if nobody is late to wake up, and the rest is so many `wake_s`
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from offbeat import records
from offbeat.algorithm import Algorithm
from offbeat.algorithms import EagerSGD, SyncSGD
from offbeat.attach import attach
from offbeat.clusters import Cluster
from offbeat.worlds import World, enter_world, leave_world
from offbeat.worlds.virtual import run

PACE_S = 0.02
STEPS = 80
_WARM_UP = 10
_WIDTH = 64
_TRIAL_WAKE_S = 1e-4
_MOST = 0.95
"""The share of steps that count: a few are stalls of the machine, not of ours."""

Probes = dict[str, dict[str, float]]
"""By kind of start: the seconds of a step, the worker's own part of it, and the lateness of its
wake-up from computing."""
KINDS: dict[str, Callable[[], Algorithm]] = {
    "lockstep": lambda: SyncSGD(overlap=False),
    "background": lambda: EagerSGD("all"),
}


def probe(size: int) -> Probes:
    """Time this worker's steps, by kind of start; all workers call it."""
    return {kind: _probe(make(), size) for kind, make in KINDS.items()}


def _probe(algorithm: Algorithm, size: int) -> dict[str, float]:
    lines: list[records.Line] = []
    world = enter_world(Cluster.uniform(size, PACE_S), seed=0)
    try:
        _train(world, algorithm, STEPS, lines.append)
    except BaseException as error:
        leave_world(world, error)
        raise
    leave_world(world)
    return seen(lines)


def _train(world: World, algorithm: Algorithm, steps: int, sink: records.Sink) -> None:
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.zeros(1, _WIDTH)
    world.records = sink
    with attach(model, optimizer, algorithm):
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    world.records = None


def seen(lines: list[records.Line]) -> dict[str, float]:
    """What one worker's records say of its steps, without the first ones."""
    computed = [line for line in lines if line["kind"] == "compute"]
    waits = [line for line in lines if line["kind"] == "wait"]
    waited: dict[int, float] = {}
    step = 0
    for wait in waits:  # after the last micro-batch that had ended before it
        while step + 1 < len(computed) and computed[step + 1]["to_s"] <= wait["from_s"]:
            step += 1
        waited[step] = waited.get(step, 0.0) + wait["to_s"] - wait["from_s"]
    steps = range(_WARM_UP, len(computed) - 1)
    begun = [line["from_s"] for line in computed]
    late = [computed[at]["to_s"] - begun[at] - PACE_S for at in steps]
    whole = [begun[at + 1] - begun[at] for at in steps]
    own = [taken - waited.get(at, 0.0) - PACE_S for at, taken in zip(steps, whole, strict=True)]
    return {"step_s": _usual(whole), "own_s": _usual(own), "late_s": _usual(late)}


def _usual(values: list[float]) -> float:
    """The mean of all but the largest few."""
    ordered = sorted(values)
    return fmean(ordered[: max(1, round(_MOST * len(ordered)))])


def fit_overhead(everyone: list[Probes], network: dict[str, Any], paced: bool) -> dict[str, float]:
    """Find what the cluster file is to hold, from all workers' probes and the network measured.

    On workers that are not `paced`, the lateness of a wake-up from computing is the probe's own.
    """
    size = len(everyone)
    lockstep = [each["lockstep"] for each in everyone]
    late_s = 0.0 if paced else median(each["late_s"] for each in lockstep)
    found = {"step_s": max(0.0, median(each["own_s"] for each in lockstep) - late_s)}
    found["exchange_s"] = 0.0

    def beyond_s(kind: str, **more: float) -> float:
        """By how much a real step takes longer than a virtual one."""
        tables = {"network": network, "overhead": {**found, **more}}
        cluster = Cluster.model_validate({"workers": size, "compute": {"step_s": PACE_S}, **tables})
        measured = median(each[kind]["step_s"] for each in everyone) - late_s
        return measured - of_virtual(KINDS[kind](), cluster)["step_s"]

    found["exchange_s"] = max(0.0, beyond_s("lockstep"))
    still = beyond_s("background")
    per_wake = (still - beyond_s("background", wake_s=_TRIAL_WAKE_S)) / _TRIAL_WAKE_S
    found["wake_s"] = max(0.0, still / per_wake) if per_wake > 0 else 0.0
    return found


def of_virtual(algorithm: Algorithm, cluster: Cluster) -> dict[str, float]:
    """The same of a virtual cluster of equal workers."""
    lines: list[records.Line] = []

    def worker() -> None:
        world = enter_world()
        sink = lines.append if world.rank == 0 else (lambda line: None)
        _train(world, algorithm, 2 * _WARM_UP, sink)

    run(worker, cluster)
    return seen(lines)
