"""What virtual time costs: events a second beside SimPy's, and a worker-step beside PyTorch's.

An event is one wake-up: a worker sleeps, others run, it wakes. The same program in both: W workers
that each sleep S times, for lengths that keep them out of step. Both take turns in one run.

A worker-step is one step of one worker of a tiny model (a linear layer of 8 inputs, batches of 4)
under `EagerSGD()`, everything but the start included. It is compared with a step of the same model
and optimizer in plain PyTorch. They take turns too. Their seconds are the processor's: other
programs on the machine do not count. Plain steps of as many models in turn as there are workers
show how much of the difference is the processor's cache.

A race by timing alone, `offbeat race --task timing`, has no tensors: its worker-steps a second are
those of whole runs, their start included. Once by the processor's seconds of one run after another;
and once as a person has it, several seeds on all cores (`--jobs`), by the seconds on the wall from
the first run's start to the last one's end, the start of the processes included.

    python benchmarks/virtual_speed.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Generator
from typing import Any

import common
import simpy
import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.lab.race import Race
from offbeat.worlds import enter_world


def ours(workers: int, sleeps: int) -> float:
    """Return events a second of the virtual world's verbs."""

    def worker() -> None:
        world = enter_world()
        pace = 1.0 + world.rank * 1e-3
        for _ in range(sleeps):
            world.sleep_until(world.now() + pace)

    cluster = Cluster.uniform(workers)
    began = time.perf_counter()
    run = offbeat.run(worker, cluster, own_random_state=False)
    return run.events / (time.perf_counter() - began)


def simpys(workers: int, sleeps: int) -> float:
    """Return events a second of SimPy, for the same program."""
    environment = simpy.Environment()

    def worker(pace: float) -> Generator[Any, Any, None]:
        for _ in range(sleeps):
            yield environment.timeout(pace)

    began = time.perf_counter()
    for rank in range(workers):
        environment.process(worker(1.0 + rank * 1e-3))
    environment.run()
    return workers * sleeps / (time.perf_counter() - began)


def plain_step_s(steps: int, models: int = 1) -> float:
    """Return seconds a step of a tiny model in plain PyTorch; of several models, in turn."""
    several = [tiny() for _ in range(models)]
    began = time.process_time()
    for _ in range(steps // models):
        for each in several:
            step(*each)
    return (time.process_time() - began) / (steps // models * models)


def timing(algorithm: str, workers: int, rounds: int, seeds: int = 1) -> Race:
    """A race by timing alone."""
    return Race.of(
        [algorithm],
        cluster="two-slow-of-eight",
        task="timing",
        workers=workers,
        until=f"{rounds}rounds",
        seeds=seeds,
    )


def timed_steps_per_s(algorithm: str, workers: int, rounds: int) -> float:
    """Return worker-steps a second of a race by timing alone, in one process."""
    race = timing(algorithm, workers, rounds)
    began = time.process_time()
    (result,) = race.run().results
    assert result.steps, result.error
    return result.steps / (time.process_time() - began)


def timed_steps_per_s_on_all_cores(algorithm: str, workers: int, rounds: int) -> float:
    """Return worker-steps a second of four seeds by timing alone, on all cores."""
    race = timing(algorithm, workers, rounds, seeds=4)
    began = time.perf_counter()
    results = race.run(jobs=os.cpu_count() or 1).results
    assert len(results) == 4
    return sum(each.steps for each in results) / (time.perf_counter() - began)


def worker_step_s(workers: int, steps: int) -> float:
    """Return seconds a worker-step of the same model in virtual time, after the first one.

    All workers are equally fast, so they all make a step between two steps of worker 0.
    """
    moments = []

    def worker() -> None:
        model, optimizer, batch = tiny()
        with offbeat.attach(model, optimizer, offbeat.EagerSGD()) as dp:
            for _ in range(1 + steps):
                step(model, optimizer, batch)
                if dp.rank == 0:
                    moments.append(time.process_time())

    offbeat.run(worker, Cluster.uniform(workers))
    return (moments[-1] - moments[0]) / (workers * steps)


def tiny() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Make a model that costs next to nothing."""
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(4, 8)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Train on one batch."""
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()


def worker_steps(turns: int, steps: int) -> dict[str, Any]:
    """Measure worker-steps against plain steps, and many workers against few."""
    torch.set_num_threads(1)
    plain_step_s(200), worker_step_s(32, 3)  # warm up
    plain, few, many = [], [], []
    for turn in range(turns):
        for kind, times in ((plain_step_s, plain), (worker_step_s, few))[:: 1 if turn % 2 else -1]:
            times.append(kind(32 * steps) if kind is plain_step_s else kind(32, steps))
        if turn % 2 == 0:
            many.append(worker_step_s(1024, max(3, steps // 4)))
    over_plain = [virtual / real for virtual, real in zip(few, plain, strict=True)]
    growth = [each / around for each, around in zip(many, few[::2], strict=True)]
    print(f"plain PyTorch {common.spread([1e3 * each for each in plain])} ms a step")
    print(f"32 workers    {common.spread([1e3 * each for each in few])} ms a worker-step")
    print(f"over plain    {common.spread(over_plain)} (target 2.0)")
    print(f"1,024 workers {common.spread([1e3 * each for each in many])} ms a worker-step")
    print(f"over 32       {common.spread(growth)} (target 1.5)")
    in_turn = {
        models: [plain_step_s(2048, models) / plain_step_s(2048) for _ in range(turns)]
        for models in (32, 1024)
    }
    for models, ratios in in_turn.items():
        print(f"plain, {models} models in turn, over one: {common.spread(ratios)}")
    timed: dict[str, list[float]] = {name: [] for name in ("sync", "eager", "abs")}
    for _ in range(turns):
        for name, rates in timed.items():
            rates.append(timed_steps_per_s(name, 32, 5 * steps))
    for name, rates in timed.items():
        shown = common.spread([rate / 1e3 for rate in rates])
        print(f"without tensors, 32 workers, {name}: {shown} thousand worker-steps/s (target 30)")
    # So long that the start of the processes counts for little.
    together = {name: timed_steps_per_s_on_all_cores(name, 32, 75 * steps) for name in timed}
    for name, rate in together.items():
        print(f"the same, four seeds on all cores, {name}: {rate / 1e3:.1f} thousand/s")
    return {
        "plain_step_ms": 1e3 * statistics.median(plain),
        "worker_step_ms": 1e3 * statistics.median(few),
        "worker_step_over_plain": statistics.median(over_plain),
        "worker_step_ms_at_1024": 1e3 * statistics.median(many),
        "worker_step_at_1024_over_32": statistics.median(growth),
        "plain_in_turn_over_one": {n: statistics.median(each) for n, each in in_turn.items()},
        "worker_steps_per_s_without_tensors": {
            name: statistics.median(rates) for name, rates in timed.items()
        },
        "worker_steps_per_s_without_tensors_on_all_cores": together,
    }


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    turns, events = (5, 100_000) if arguments.quick else (11, 400_000)
    mine, theirs = [], []
    for turn in range(turns):
        for side in ((ours, mine), (simpys, theirs))[:: 1 if turn % 2 else -1]:
            side[1].append(side[0](64, events // 64))
    growth = {}
    for factor in (1, 2, 4, 8):
        began = time.perf_counter()
        ours(64, factor * events // 512)
        growth[factor] = time.perf_counter() - began
    largest = 10_000
    big = ours(largest, max(10, events // largest))

    print(f"events grow by {', '.join(map(str, growth))}; seconds by ", end="")
    print(", ".join(f"{seconds / growth[1]:.2f}" for seconds in growth.values()))
    print(f"{largest:,} workers in one run: {big:,.0f} events/s")
    print(f"offbeat {common.spread([rate / 1e3 for rate in mine])} thousand events/s")
    print(f"SimPy   {common.spread([rate / 1e3 for rate in theirs])} thousand events/s")
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    print(f"offbeat over SimPy {common.spread(ratios)}")
    steps = worker_steps(*((4, 10) if arguments.quick else (10, 40)))
    common.write(
        arguments.json,
        {
            **steps,
            "events_per_s": statistics.median(mine),
            "simpy_events_per_s": statistics.median(theirs),
            "max_workers": largest,
            "events_per_s_at_max_workers": big,
            "seconds_by_growth": growth,
        },
    )


if __name__ == "__main__":
    main()
