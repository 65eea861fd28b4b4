"""Rounds among neighbours under a schedule: a worker's program, and what must hold of it.

A step adds 1 to a number of its own in the worker's model, and all weights are powers of two. So
after the last round every worker holds exactly what the mixing matrices make of the steps, each in
the round that it was given to; and over all workers every step is there, once.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from schedule_log import Gradient, Log
from schedule_play import Member
from schedules import Plan, Schedule

from offbeat.graphs import Graph, graph_of
from offbeat.merges import Mix
from offbeat.rounds import Gossip, Layout, Neighbours
from offbeat.worlds import World


def graph(name: str, size: int) -> Graph:
    """Of any number of workers."""
    if name in ("one-peer", "lazy-one-peer"):
        return graph_of(name, size)
    own = torch.eye(size, dtype=torch.float64)
    if name == "halves":
        return Graph([own / 2 + own.roll(1, 0) / 4 + own.roll(-1, 0) / 4])
    matrices = []
    for first in (0, 1):  # 0 with 1, 2 with 3, ...; then 1 with 2, ...
        matrix = own.clone()
        for rank in range(first, size - 1, 2):
            matrix[rank : rank + 2, rank : rank + 2] = 0.5
        matrices.append(matrix)
    return Graph(matrices)


class Neighbour(Member):
    """One worker's part in an engine whose rounds are among neighbours."""

    def __init__(self, world: World, schedule: Schedule, plan: Plan) -> None:
        self._world, self._plan, self._rank = world, plan, world.rank
        self._place, self._samples = plan.places[world.rank], plan.samples[world.rank]
        self._apply_s = schedule.apply_s[world.rank]
        self._parameters = torch.nn.Parameter(torch.zeros(plan.numel, dtype=torch.float64))
        self._own = self._parameters.detach()
        self._optimizer = torch.optim.SGD([self._parameters], lr=0.1)
        self._starts, self._all_starts = {}, {}  # nobody starts rounds for all
        self._copies = [self._own]
        self._brought: list[set[int]] = []
        self._layout = layout = Layout(["model"], [self._parameters])
        among = partial(Neighbours, graph(plan.graph, world.size), lambda _: None)
        self.engine = Gossip(
            world, "schedule", layout, plan.rules, notes=1, exchange=among, begin=False
        )
        self.engine.piles.written_late = True
        self.merge: Mix = Mix(layout, world.size == 1, self._optimizer)
        self.engine.merge, self.engine.write = self.merge, self.merge.give
        self.engine.fold = self._fold
        self.engine.followed = schedule.followed
        self._busy, self.log, self._applied_s = True, Log(), 0.0
        self.engine.begin()

    def _contribute(self, step: int, samples: int, version: int) -> None:
        self._take(self.engine.newest())
        self.merge.moves()
        if samples:
            self._own[self._place[step]] += 1
        given = self.engine.gave_rounds
        arrival = self.engine.contribute(self._counting(samples))
        self.log.gradients.append(Gradient(version, arrival, self._world.now(), given))
        self._take(self.engine.results())

    def leave(self) -> None:
        super().leave()
        self.log.parameters = tuple(self.merge._base.views[0].tolist())


def check(plan: Plan, logs: list[Log]) -> None:
    """Hold what has happened against every promise."""
    size, count = len(logs), len(logs[0].rounds)
    wanted: set[int] = set()
    for rank, log in enumerate(logs):
        assert [taken.round for taken in log.rounds] == list(range(count)), (
            f"rounds that worker {rank} has taken, and worker 0 {count} of them"
        )
        steps = [gradient.started for gradient in log.gradients if gradient.arrival is not None]
        assert steps == sorted(set(steps)), f"worker {rank} gave two steps to one round: {steps}"
        assert {gradient.arrival for gradient in log.gradients} <= {"on time", None}
        wanted |= set(steps)
    assert wanted == set(range(count)), "a round that nobody came to with a step"
    expected = _mixed(plan, logs, count)
    ends = torch.tensor([log.parameters for log in logs], dtype=torch.float64)
    exact = 2 * count < 50  # bits
    assert torch.equal(ends, expected) if exact else torch.allclose(ends, expected, atol=1e-12)
    made = [0.0] * plan.numel
    for rank, log in enumerate(logs):
        for step, gradient in enumerate(log.gradients):
            if gradient.arrival is not None and plan.samples[rank][step]:
                made[plan.places[rank][step]] = 1.0
    assert ends.sum(0).tolist() == (made if exact else pytest.approx(made, abs=1e-12))
    heard = graph(plan.graph, size)
    for rank, log in enumerate(logs):
        for taken in log.rounds:
            strangers = set(range(size)) - set(heard.received(rank, taken.round))
            assert not any(taken.samples_by_rank[other] for other in strangers)


def _mixed(plan: Plan, logs: list[Log], count: int) -> torch.Tensor:
    """What the matrices make of the steps."""
    matrices = graph(plan.graph, len(logs)).matrices
    models = torch.zeros(len(logs), plan.numel, dtype=torch.float64)
    for round in range(count):
        for rank, log in enumerate(logs):
            for step, gradient in enumerate(log.gradients):
                given = gradient.arrival is not None and gradient.started == round
                if given and plan.samples[rank][step]:
                    models[rank, plan.places[rank][step]] += 1
        models = matrices[round % len(matrices)] @ models
    return models
