"""What the virtual world adds to the gradients of a race, on digits.

As many micro-batches of the same model: by a race on eight virtual workers without noise, about as
long as the task's budget, and in a plain loop over eight models, each with an optimizer and data of
its own: the same gradients, one after the other, without a cluster around them. A gradient that the
race drops was computed, and counts. The plain loop updates once per micro-batch, as each replica of
the race does once per round. The race's figure holds what a run costs before its first round and
after its last; evaluation is left out.

Both take turns in one run. Both are a single thread, so what is compared is its CPU time: other
work on the machine then matters less.

    python benchmarks/race_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

import common
import torch

from offbeat.lab.race import Race
from offbeat.lab.tasks import Task, find

WORKERS = 8
BATCH = 48
"""Samples of a micro-batch of digits."""


def plain(task: Task, models: int, micro_batches: int) -> float:
    """Return microseconds per micro-batch of a plain loop over so many models in turn."""
    torch.manual_seed(0)
    made = [task.model() for _ in range(models)]
    optimizers = [task.optimizer(model) for model in made]
    batches = [task.batches(rank, models, 0) for rank in range(models)]
    began = time.process_time()
    for number in range(micro_batches):
        model, optimizer = made[number % models], optimizers[number % models]
        batch = next(batches[number % models])
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return 1e6 * (time.process_time() - began) / micro_batches


def raced(race: Race) -> float:
    """Return microseconds per micro-batch of a race."""
    began = time.process_time()
    (result,) = race.run().results
    seconds = time.process_time() - began
    assert result.samples is not None, result.error
    return 1e6 * seconds / (result.samples / BATCH)


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    turns, rounds = (3, 40) if arguments.quick else (5, 200)
    torch.set_num_threads(1)
    task = replace(find("digits"), evaluate=lambda model: (1.0, 0.0))
    figures = {}
    for label in ("sync", "eager:quorum=majority", "eager:quorum=solo", "msync:m=0.75"):
        until = f"{rounds}rounds"
        made = Race.of([label], cluster="uniform-8", until=until, seeds=1, rates="1")
        sides = {
            "race": partial(raced, replace(made, task=task)),
            "plain": partial(plain, task, WORKERS, rounds * WORKERS),
        }
        took: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for turn in range(turns):
            for name in names[:: 1 if turn % 2 else -1]:
                took[name].append(sides[name]())
        ratios = [ours / theirs for ours, theirs in zip(*took.values(), strict=True)]
        print(f"{label}: race over plain loop {common.spread(ratios)}")
        shown = (f"{name} {common.spread(each)}" for name, each in took.items())
        print(f"  µs per micro-batch: {', '.join(shown)}", flush=True)
        figures[label] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "race_us": statistics.median(took["race"]),
            "plain_us": statistics.median(took["plain"]),
        }
    common.write(arguments.json, {"overhead": figures})


if __name__ == "__main__":
    main()
