"""What the virtual world adds to the gradients of a race, on digits.

A race on eight virtual workers without noise stops after every eight micro-batches, and a plain
loop of PyTorch computes as many: the same model, optimizer and data without a cluster around them.
So both see the machine in the same state. The ratio is of these stretches; what a run costs before
its first micro-batch and after its last is told apart. A gradient that the race drops was computed,
and counts. The plain loop updates once per micro-batch, as each replica of the race does once per
round. Evaluation is left out. All is one thread, so what is compared is its CPU time.

    python benchmarks/race_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import truediv
from typing import Any

import common
import torch
from torch import Tensor, nn

from offbeat.lab.race import Race
from offbeat.lab.tasks import Task, find

STRETCH = 8
"""Micro-batches: one of every worker."""
LABELS = ("sync", "eager:quorum=majority", "eager:quorum=solo", "msync:m=0.75")


@dataclass
class Turns:
    """The race and the plain loop by turns: this stands in for the task's loss."""

    task: Task
    plain: Iterator[None]
    computed: int = 0
    resumed_s: float | None = None
    raced_us: list[float] = field(default_factory=list)
    plain_us: list[float] = field(default_factory=list)
    """Per micro-batch, of each stretch."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.computed % STRETCH == 0:
            stopped_s = time.thread_time()
            for _ in range(STRETCH):
                next(self.plain)
            if self.resumed_s is not None:
                self.raced_us.append(1e6 * (stopped_s - self.resumed_s) / STRETCH)
                self.plain_us.append(1e6 * (time.thread_time() - stopped_s) / STRETCH)
            self.resumed_s = time.thread_time()
        self.computed += 1
        return self.task.loss(model, batch)


def plain_loop(task: Task) -> Iterator[None]:
    """Compute a micro-batch whenever asked to."""
    model = task.model()
    optimizer = task.optimizer(model)
    for batch in task.batches(0, 1, 0):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
        yield


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    repeats, rounds = (1, 60) if arguments.quick else (5, 120)
    torch.set_num_threads(1)
    task = replace(find("digits"), evaluate=lambda model: (1.0, 0.0))
    figures: dict[str, dict[str, Any]] = {
        label: {"ratios": [], "race_us": [], "plain_us": [], "around_ms": []} for label in LABELS
    }
    for _ in range(repeats):
        for label in LABELS:
            turns = Turns(task, plain_loop(task))
            made = Race.of(
                [label], cluster="uniform-8", until=f"{rounds}rounds", seeds=1, rates="1"
            )
            began_s = time.thread_time()
            replace(made, task=replace(task, loss=turns)).run()
            took_s = time.thread_time() - began_s
            found = figures[label]
            found["ratios"].append(statistics.median(map(truediv, turns.raced_us, turns.plain_us)))
            found["race_us"].append(statistics.median(turns.raced_us))
            found["plain_us"].append(statistics.median(turns.plain_us))
            inside_s = 1e-6 * STRETCH * (sum(turns.raced_us) + sum(turns.plain_us))
            found["around_ms"].append(1e3 * (took_s - inside_s))
    for label, found in figures.items():
        found["ratio"] = statistics.median(found["ratios"])
        print(f"{label}: race over plain loop {common.spread(found['ratios'])}")
        shown = (f"{name} {common.spread(found[name])}" for name in ("race_us", "plain_us"))
        print(
            f"  per micro-batch: {', '.join(shown)}; around: {common.spread(found['around_ms'])} ms"
        )
    common.write(arguments.json, {"overhead": figures})


if __name__ == "__main__":
    main()
