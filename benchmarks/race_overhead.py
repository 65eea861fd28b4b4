"""What the virtual world adds to the gradients of a race, on digits.

As many micro-batches of the same model: by a race on eight virtual workers without noise, and in a
plain loop on one. A gradient that the race drops was computed, and counts. The plain loop updates
once per micro-batch, as each replica of the race does once per round. The race's figure holds what
a run costs before its first round and after its last; evaluation is left out on both sides.

Both take turns in one run. Both are a single thread, so what is compared is its CPU time: other
work on the machine then matters less.

    python benchmarks/race_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import common
import torch

from offbeat.lab.race import Race
from offbeat.lab.tasks import Task, find

WORKERS = 8


def plain(task: Task, micro_batches: int) -> float:
    """Return microseconds per micro-batch of a plain loop."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    batches = task.batches(0, 1, 0)
    began = time.process_time()
    for _ in range(micro_batches):
        batch = next(batches)
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
    return 1e6 * seconds / (result.samples / 32)


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    turns, rounds = (3, 60) if arguments.quick else (9, 100)
    torch.set_num_threads(1)
    task = replace(find("digits"), evaluate=lambda model: (1.0, 0.0))
    figures = {}
    for label in ("sync", "eager:quorum=majority", "eager:quorum=solo", "msync:m=0.75"):
        until = f"{rounds}rounds"
        made = Race.of([label], cluster="uniform-8", until=until, seeds=1, rates="1")
        race = replace(made, task=task)
        ours, theirs = [], []
        for turn in range(turns):
            sides = [
                lambda: ours.append(raced(race)),  # noqa: B023 - called in this very turn
                lambda: theirs.append(plain(task, rounds * WORKERS)),  # noqa: B023
            ]
            for side in sides[:: 1 if turn % 2 else -1]:
                side()
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(f"{label}: race over plain loop {common.spread(ratios)}")
        print(f"  µs per micro-batch: race {common.spread(ours)}, plain {common.spread(theirs)}")
        figures[label] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "race_us": statistics.median(ours),
            "plain_us": statistics.median(theirs),
        }
    common.write(arguments.json, {"overhead": figures})


if __name__ == "__main__":
    main()
