"""The faults of survive.py after which a worker joins: what that costs the others.

The state that travels is of 100 MB: a model of 50, and its momentum. The *stall* of a trial is the
longest step of any of the others while the joiner attached, less the median of their steps. A step
in which a worker was lost is none of them: that is what `kill` in survive.py measures. What as many
steps come to when nobody joins, `quiet_s`, is that of each worker's last ones.

    join            a worker is killed, started again, and joins
    giver killed    the same; and who gives its state to the joiner, or the first of several, is
                    killed while it does. It is started again, too
    joiner killed   the joiner is killed on its way in; another one is started
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from random import Random
from typing import Any

import torch

import offbeat
from offbeat import launched
from offbeat.rounds.joining import Joining
from offbeat.testing import processes

FAULTS = ("join", "giver killed", "joiner killed")
WORKERS = 4
WIDTH = 3600  # 50 MB
STEPS = 8  # of the joiner


def die_in(seconds: float) -> None:
    """Have this process killed, in so many seconds."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _dies_when_it_gives(after_s: float) -> None:
    give = Joining._give_to

    def give_and_die(self: Joining, donation: Any, gift: Any) -> None:
        # After one loss and one join: the others may give it. Of several givers, the first dies.
        if donation.epoch == 2 and donation.givers[0] == self._world.rank:
            die_in(after_s)
        give(self, donation, gift)

    Joining._give_to = give_and_die  # type: ignore[method-assign]


def train(
    algorithm: offbeat.Algorithm, fault: str, victim: int, moment_s: float, width: int = WIDTH
) -> dict[str, Any]:
    """One worker of one trial; the joiner has it end."""
    attempt = launched.worker_id() // int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    batch, steps = torch.randn(4, width), []
    if fault == "giver killed" and not attempt:
        _dies_when_it_gives(moment_s / 50)
    if fault == "joiner killed" and attempt == 1:
        die_in(moment_s / 20)
    began_s = time.monotonic()
    with offbeat.attach(model, optimizer, algorithm, survive=True) as dp:
        attached_s = time.monotonic()
        if rank == victim and not attempt:
            die_in(moment_s)
        for step in dp.until(seconds=60.0):
            if step == STEPS and attempt:
                dp.stop()
            from_s, members = time.monotonic(), len(dp._world.members)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            lost = len(dp._world.members) < members
            steps.append((from_s, time.monotonic() - from_s, lost))
    stats = dp.stats()
    lacks = stats.computed_samples - stats.applied_samples - stats.dropped_samples
    return {
        "identical": bool(stats.replicas_identical),
        "kept": abs(lacks) < 1e-3,
        "joins": (began_s, attached_s) if attempt else None,
        "steps": steps,
        "lost": stats.lost_samples,
    }


def trial(algorithm: offbeat.Algorithm, fault: str, random: Random) -> dict[str, Any]:
    """Start workers, lose one, have it join."""
    victim, moment_s = random.randrange(WORKERS), random.uniform(0.5, 1.5)
    restarts = 2 if fault == "joiner killed" else 1
    ended = processes(
        train, WORKERS, algorithm, fault, victim, moment_s,
        check=False, time_out_s=90, restarts=restarts,
    )  # fmt: skip
    for each in ended:
        if each.error is not None:
            print(f"    worker {each.rank}: {each.error!r}", flush=True)
    told = [each.result for each in ended if each.result is not None]
    again = sorted(each.restarts for each in ended)
    expected = {"giver killed": [0, 0, 1, 1], "joiner killed": [0, 0, 0, 2]}.get(
        fault, [0, 0, 0, 1]
    )
    whole = len(told) == WORKERS and all(each["kept"] for each in told)
    others = [each["steps"] for each in told if each["joins"] is None]
    windows = [each["joins"] for each in told if each["joins"] is not None]
    usual = statistics.median([took_s for steps in others for _, took_s, _ in steps] or [0.0])
    within, last = [], []
    for steps in others:
        while_joining = [
            took_s
            for from_s, took_s, lost in steps
            if not lost
            and any(from_s < until and from_s + took_s > since for since, until in windows)
        ]
        within += while_joining
        last += [took_s for _, took_s, _ in steps[len(steps) - len(while_joining) :]]
    return {
        "fired": again == expected,
        "survived": whole,
        "identical": whole and all(each["identical"] for each in told),
        "stall_s": max(0.0, max(within) - usual) if within else None,
        "quiet_s": max(0.0, max(last) - usual) if last else 0.0,
        "step_s": usual,
        "lost_samples": told[0]["lost"] if told else None,
    }
