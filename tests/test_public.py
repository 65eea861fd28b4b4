"""Public models by hand: who is late, and how late, never changes the mean of all models."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.merges import Offered, Public
from offbeat.rounds import Flats, Groups, Layout, Round
from offbeat.worlds import enter_world, leave_world


class Workers:
    """Workers of one process, their models, and rounds among them that take and land by hand."""

    def __init__(
        self, models: list[Tensor], size: int, period: int, merge: type[Public] = Public
    ) -> None:
        count = len(models)
        self.models = [nn.Parameter(each.clone()) for each in models]
        self.groups = Groups(count, size, period)
        self.number = 0
        world = enter_world()
        self.merges = []
        for model in self.models:
            place: Any = SimpleNamespace(condition=world.condition)
            self.merges.append(merge(Layout(["w"], [model]), False, place, 0))
        leave_world(world)
        self.given: list[Flats] = []

    def move(self, rank: int, by: Tensor) -> None:
        """An own step."""
        self.merges[rank].moves()
        with torch.no_grad():
            self.models[rank] += by
        assert self.merges[rank].made() is None

    def take(self) -> None:
        """A round takes what all have published."""
        self.given = [Flats(merge._layout) for merge in self.merges]
        for merge, into in zip(self.merges, self.given, strict=True):
            list(merge.give(self.number, into, 1.0, waits=False))

    def land(self) -> Round:
        """And ends."""
        sums = [each.views[0].clone() for each in self.given]
        told = Round(self.number, self.given[0], (1.0,) * len(sums), 1.0, (True,))
        for rank, merge in enumerate(self.merges):
            members = self.groups.of(self.number, rank)
            self.given[rank].views[0].copy_(torch.stack([sums[i] for i in members]).sum(0))
            merge.land(told.but(group=members), self.given[rank])
        self.number += 1
        return told

    def publics(self) -> Tensor:
        return torch.stack([merge._base.views[0].clone() for merge in self.merges])

    def owns(self) -> Tensor:
        return torch.stack([model.detach().clone() for model in self.models])


def _integers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-1000, 1000, shape, generator=generator).double()


@pytest.mark.parametrize("seed", range(30))
def test_no_round_changes_the_mean_whoever_is_late(seed: int) -> None:
    """Integers times a power of two: to the bit."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, size = draw.choice([(2, 2), (4, 2), (8, 4), (8, 2), (16, 4)])
    start = _integers(generator, count, 5) * 2.0**20
    workers = Workers(list(start), size, draw.choice([2, 5, 1000]))
    total = start.sum(0)
    under_way = False
    told = None
    for _ in range(60):
        rank = draw.randrange(count)
        match draw.choice(["move", "move", "round", "comes"]):
            case "move":
                by = _integers(generator, 5) * 2.0**20
                workers.move(rank, by)
                total += by
            case "round" if under_way:
                told, under_way = workers.land(), False
            case "round" if workers.number < 8:
                workers.take()
                under_way = True
            case "comes" if told is not None:
                workers.merges[rank].begin(told)
        assert torch.equal(workers.publics().sum(0), total)
    if under_way:
        workers.land()
    for merge in workers.merges:
        merge.adopt()
    assert torch.equal(workers.owns().sum(0), total)
    assert torch.equal(workers.owns(), workers.publics())


def test_who_is_on_time_has_the_mean_to_the_bit() -> None:
    workers = Workers(list(torch.randn(3, 40)), 3, 10)
    for rank in range(3):
        workers.move(rank, torch.randn(40))
    expected = workers.owns().sum(0) / 3
    workers.take()
    told = workers.land()
    for merge in workers.merges:
        merge.begin(told)
    assert all(torch.equal(each, expected) for each in workers.owns())


def _worker_1_is_late(workers: Workers, landing: str) -> None:
    """It steps by 3 while the average of what both had, and worker 0's step by 2, lands."""
    workers.move(0, torch.tensor([2.0]))
    workers.take()
    if landing == "before the step":
        workers.land()
    merge, model = workers.merges[1], workers.models[1]
    merge.moves()
    if landing == "in the step":
        workers.land()
    with torch.no_grad():
        model += 3.0
    merge.made()
    if landing == "after it":
        workers.land()
    for each in workers.merges:
        each.adopt()


@pytest.mark.parametrize("landing", ["before the step", "in the step", "after it"])
def test_a_late_worker_keeps_what_it_has_done(landing: str) -> None:
    """Worker 0 on time with a' = 12, worker 1 late: old b = 4, new b' = 7."""
    workers = Workers([torch.tensor([10.0]), torch.tensor([4.0])], 2, 10)
    _worker_1_is_late(workers, landing)
    assert workers.owns().tolist() == [[8.0], [8.0 + 3.0]]
    assert workers.publics().tolist() == [[8.0], [11.0]]


@pytest.mark.parametrize("landing", ["before the step", "in the step", "after it"])
def test_the_papers_rule_averages_once_more(landing: str) -> None:
    """w0 = (a' + b) / 2, w1 = (a' + b + b') / 3; and b' is what worker 1 offers from then on."""
    workers = Workers([torch.tensor([10.0]), torch.tensor([4.0])], 2, 10, Offered)
    _worker_1_is_late(workers, landing)
    assert workers.owns()[:, 0].tolist() == pytest.approx([(12 + 4) / 2, (12 + 4 + 7) / 3])
    assert workers.publics().tolist() == [[12.0], [7.0]]


# --- the toy quadratic --------------------------------------------------------------------------


def _quadratic(merge: type[Public], late: float, steps: int = 200) -> list[float]:
    """16 workers in groups of 4, all together every 10 steps; the loss of their mean by step.

    In every step each is late with this probability: its round has gone without its step.
    """
    generator = torch.Generator().manual_seed(0)
    draw = random.Random(1)
    curvature = torch.linspace(0.01, 1.0, 50, dtype=torch.float64)
    pulls = torch.randn(16, 50, dtype=torch.float64, generator=generator)
    pulls -= pulls.mean(0)
    first = torch.full((50,), 5.0, dtype=torch.float64)
    workers = Workers([first] * 16, 4, 10, merge)
    losses = []
    for _ in range(steps):
        moves = -0.05 * (curvature * workers.owns() + pulls)
        are_late = {rank for rank in range(16) if draw.random() < late}
        if (workers.number + 1) % 10 == 0:  # everybody waits
            are_late = set()
        for rank in set(range(16)) - are_late:
            workers.move(rank, moves[rank])
        workers.take()
        workers.land()
        for rank in are_late:
            workers.move(rank, moves[rank])
        for each in workers.merges:
            each.adopt()
        mean = workers.owns().mean(0)
        losses.append(float((curvature * mean.square()).sum() / 2))
    return losses


PAPERS_RULE = {0.1: [26.9, 7.2, 1.81], 0.3: [33.8, 9.3, 2.35], 0.6: [43.9, 12.6, 3.17]}
"""Of another replication: by lateness, its losses after 50, 100 and 200 steps."""


def test_the_delta_rule_learns_alike_at_any_lateness_and_the_papers_does_not() -> None:
    on_time = _quadratic(Public, 0.0)
    for late in (0.1, 0.3, 0.6):
        assert _quadratic(Public, late) == pytest.approx(on_time, rel=1e-12, abs=1e-12)
    assert [on_time[step - 1] for step in (50, 100, 200)] == pytest.approx(
        [23.4, 6.18, 1.57], rel=0.02
    )
    for late, losses in PAPERS_RULE.items():
        lost = _quadratic(Offered, late)
        assert [lost[step - 1] for step in (50, 100, 200)] == pytest.approx(losses, rel=0.06)
    assert _quadratic(Offered, 0.0) == pytest.approx(on_time, rel=1e-12, abs=1e-12)


# --- odds ---------------------------------------------------------------------------------------


def test_running_statistics_that_a_forward_pass_changes_are_not_lost() -> None:
    """They change outside of own steps: between two of them, while a round lands."""
    world = enter_world()
    models = [nn.BatchNorm1d(1) for _ in range(2)]
    merges = []
    for model in models:
        place: Any = SimpleNamespace(condition=world.condition)
        tensors = [model.weight, model.bias, model.running_mean, model.running_var]
        layout = Layout(["w", "b", "m", "v"], tensors)  # type: ignore[arg-type]
        merges.append(Public(layout, False, place, statistics=2))
    leave_world(world)
    given = [Flats(merge._layout) for merge in merges]
    for rank, merge in enumerate(merges):
        merge.moves()
        models[rank].running_mean.fill_(float(rank))  # type: ignore[union-attr,operator]
        merge.made()
        list(merge.give(0, given[rank], 1.0, waits=False))
    models[1].running_mean.add_(8.0)  # type: ignore[union-attr,operator]
    for mine, other in zip(given[0].bodies, given[1].bodies, strict=True):
        mine.add_(other)
        other.copy_(mine)
    for rank, merge in enumerate(merges):
        told = Round(0, given[rank], (1.0, 1.0), 1.0, (True,) * 4, group=(0, 1))
        merge.land(told, given[rank])
    for merge in merges:
        merge.moves()
        merge.made()
    assert [float(model.running_mean) for model in models] == [0.5, 8.5]  # type: ignore[arg-type]


def test_a_step_that_leaves_the_numbers_is_taken_back() -> None:
    workers = Workers(list(torch.ones(2, 3)), 2, 10)
    merge, model = workers.merges[0], workers.models[0]
    merge.moves()
    with torch.no_grad():
        model[1] = float("inf")
    assert merge.made() == 0
    assert torch.equal(workers.owns(), torch.ones(2, 3))
    with torch.no_grad():
        model[1] = 1e30  # its square is no number, it is one
    merge.moves()
    assert merge.made() is None
