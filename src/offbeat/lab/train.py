"""One worker of one run, in whichever world it is: the loop that every contestant goes through.

What it remembers on the way is in watching.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.contestants import Contestant
from offbeat.lab.tasks import Task
from offbeat.lab.totals import OfAttached, Watch
from offbeat.lab.watching import Keeping, Outcome, Plan, Shared, Tell
from offbeat.worlds import World, enter_world, leave_world

_LATEST_STEP = "race/latest-step"


class WorkerFailed(Exception):  # noqa: N818 - it happened to a worker
    """A worker has raised or died; the text is its traceback, with its rank and the time."""


def train(
    task: Task,
    contestant: Contestant,
    plan: Plan,
    seed: int,
    shared: Shared,
    tell: Tell,
    pace: Cluster | None = None,
) -> Outcome:
    """Train until the budget is used up or the target is reached; `pace` is for real processes."""
    _seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= contestant.rate
    batches = task.batches(offbeat.rank(), offbeat.world_size(), seed)
    world = enter_world(pace, seed)
    run = Keeping(task, model, plan, shared, tell, world, virtual=pace is None)
    if contestant.is_ddp and pace is not None:
        outcome = _ddp(world, run, task, model, optimizer, batches)
    else:
        outcome = _attached(world, run, task, model, optimizer, batches, contestant)
    run.finish(outcome, world)
    leave_world(world)
    return outcome


def _seed(seed: int) -> None:
    """As torch does, which also keeps a traceback for every kind of device that is not there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _attached(
    world: World,
    run: Keeping,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    contestant: Contestant,
) -> Outcome:
    schedule = None if task.schedule is None else task.schedule(optimizer)
    with offbeat.attach(model, optimizer, contestant.algorithm, scheduler=schedule) as dp:
        dp._says_waits = False  # the race ends this loop, and no script of the user's
        run.reads(totals := OfAttached(dp), dp._replica)
        while run.goes_on(dp.seconds, dp.round):
            batch = next(batches)
            optimizer.zero_grad()
            dp.samples(task.samples(batch))
            loss = task.loss(model, batch)
            if loss.requires_grad:
                torch.autograd.backward(loss)
            optimizer.step()
            if run.looks:
                run.stepped(dp.seconds, dp.round, loss)
    stats = dp.stats()
    return Outcome(
        world.rank,
        dp.seconds,
        dp.round,
        stats.computed_samples,
        stats.dropped_samples,
        stats.compute_s,
        stats.wait_s,
        stats.stale_samples / totals.samples if totals.samples else 0.0,
        max(stats.staleness, default=0),
        bool(stats.replicas_identical),
        steps=stats.steps,
        sent_bytes=world.sent_bytes,
    )


def _ddp(
    world: World,
    run: Keeping,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
) -> Outcome:
    """Train with DistributedDataParallel; its compute is paced before backward begins to reduce.

    Nobody may leave alone, or the others would hang. Worker 0 decides: when it has ended step k,
    nobody can have ended k + 1 without it, so k + 1 is the last one for all.
    """
    wrapped, watch = DistributedDataParallel(model), Watch(world.records)
    schedule = None if task.schedule is None else task.schedule(optimizer)
    run.reads(watch)
    step, computed = 0, 0.0
    latest = 0
    while not latest or step < latest:
        began = world.now()
        batch = next(batches)
        samples = task.samples(batch)
        optimizer.zero_grad()
        loss = task.loss(wrapped, batch)
        world.sleep_until(began + world.compute_s(step, samples, began))
        ready = world.now()
        torch.autograd.backward(loss)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        step += 1
        computed += samples
        ended = world.now()
        tell_step(world, watch, step, samples, began, ready, ended)
        run.stepped(ended, step, loss)
        if world.rank == 0 and not latest and not run.goes_on(ended, step):
            latest = world.control.add(_LATEST_STEP, step + 1)
        elif world.rank != 0:
            latest = world.control.add(_LATEST_STEP, 0)
    ended, same = world.now(), _same_on_all(world, model)
    watch(
        {"kind": "end", "rank": world.rank, "at_s": ended, "steps": step, "samples": computed}
        | {"compute_s": watch.compute_s, "wait_s": watch.wait_s, "dropped_samples": 0.0}
    )
    seconds = watch.compute_s, watch.wait_s
    return Outcome(world.rank, ended, step, computed, 0.0, *seconds, 0.0, 0, same, steps=step)


def tell_step(
    world: World, watch: Watch, step: int, samples: float, began: float, ready: float, ended: float
) -> None:
    rank, number = world.rank, step - 1
    watch(
        {"kind": "compute", "rank": rank, "from_s": began, "to_s": ready, "samples": samples}
        | {"arrival": "on time"}
    )
    watch({"kind": "wait", "rank": rank, "from_s": ready, "to_s": ended, "round": number})
    watch(
        {"kind": "round", "rank": rank, "round": number, "from_s": ready, "to_s": ended}
        | {"at_s": ended, "samples": samples * world.size, "workers": world.size}
        | {"staleness_rounds": 0, "mean_staleness_rounds": 0.0}
    )


def _same_on_all(world: World, model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    channel = world.channel("race/same")
    channel.all_reduce(least := flat.clone(), "min").wait()
    channel.all_reduce(most := flat.clone(), "max").wait()
    return bool(torch.equal(least, most))
