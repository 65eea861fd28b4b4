"""Small examples by hand of workers that are away or paused: what random schedules have found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.merges import Shift, Step
from offbeat.rounds import Engine, Layout, Pile, Rules
from offbeat.worlds import World, enter_world, leave_world

Seen = tuple[float, tuple[float, ...]]
"""When a round ended, and the samples of each rank in it."""


def opened(rules: Rules) -> tuple[World, Engine]:
    world = enter_world()
    return world, Engine(world, "presence", Layout(["x"], [torch.zeros(1)]), rules)


def adding(samples: float = 1.0) -> Callable[[Pile], None]:
    def add(pile: Pile) -> None:
        pile.flats.views[0].fill_(1.0)
        pile.samples += samples
        pile.micro_batches += 1

    return add


def test_in_lockstep_who_goes_away_after_the_bell_for_a_round_still_takes_part() -> None:
    """Worker 2 hears that round 0 is wanted, for worker 0 is away; then it goes away itself."""

    def worker() -> list[Seen]:
        world, engine = opened(Rules("all", lockstep=True))
        if world.rank == 1:
            world.sleep_until(1.0)
            engine.contribute(adding())
            seen = [(each.ended_s, each.samples_by_rank) for each in engine.results()]
        else:
            world.sleep_until(5.0 if world.rank == 2 else 0.0)
            with engine.away():
                world.sleep_until(50.0)
            seen = [(each.ended_s, each.samples_by_rank) for each in engine.results()]
        for _ in engine.leave():
            pass
        return seen

    for seen in offbeat.run(worker, Cluster.uniform(3)).results:
        assert seen == [(pytest.approx(5.022), (0, 1, 0))]


def test_a_gradient_that_is_too_stale_starts_no_round() -> None:
    """Worker 1 was away; what it then brings is dropped, and the round waits for its next."""

    def worker() -> list[Seen]:
        world, engine = opened(Rules("all", max_staleness_rounds=1, lateness="step"))
        seen: list[Seen] = []
        if world.rank == 1:
            with engine.away():
                world.sleep_until(5.5)
        for step in range(8 if world.rank == 0 else 3):
            world.sleep_until(world.now() + 1.0)
            arrival = engine.contribute(adding())
            assert arrival == ("dropped" if world.rank == 1 and step == 0 else "on time")
            seen += [(each.ended_s, each.samples_by_rank) for each in engine.results()]
        return seen + [(each.ended_s, each.samples_by_rank) for each in engine.leave()]

    for seen in offbeat.run(worker, Cluster.uniform(2)).results:
        assert [samples for _, samples in seen] == [(1, 0)] * 5 + [(1, 1)] * 2 + [(1, 0)]
        assert seen[5][0] == 7.5


@pytest.mark.parametrize("bound", [None, 0, 1])
def test_a_pause_makes_nobody_late_by_step(bound: int | None) -> None:
    def worker() -> list[Seen]:
        world, engine = opened(Rules("all", max_staleness_rounds=bound, lateness="step"))
        for _ in range(2):
            for _ in engine.settle():
                pass
            engine.resume()
        seen: list[Seen] = []
        for _ in range(2):
            world.sleep_until(world.now() + 1.0 + world.rank)
            assert engine.contribute(adding()) == "on time"
            seen += [(each.ended_s, each.samples_by_rank) for each in engine.results()]
        return seen + [(each.ended_s, each.samples_by_rank) for each in engine.leave()]

    for seen in offbeat.run(worker, Cluster.uniform(2)).results:
        assert seen == [(2.0, (1, 1)), (4.0, (1, 1))]


def test_moves_without_samples_leave_no_place_behind() -> None:
    world = enter_world()
    parameter = torch.zeros(1)
    layout = Layout(["x"], [parameter])
    engine = Engine(world, "moves", layout, Rules("all", lockstep=True, divisor="moves"))
    shift = engine.merge = Shift(layout, alone=True)
    engine.write = shift.give

    def count(samples: float) -> Callable[[Pile], None]:
        def add(pile: Pile) -> None:
            pile.samples += samples
            pile.micro_batches += 1

        return add

    for step, samples in enumerate([0.0, 0.0, 2.0, 0.0, 3.0]):
        if samples:
            shift.moves()
            parameter += 1.0
        engine.contribute(count(samples))
        for each in engine.results():
            assert each.round == step
            assert each.sum.views[0].item() == samples
            if each.samples:
                shift.begin(each)
        assert not shift._places
    engine.stop()
    leave_world(world)
    assert parameter.item() == 2.0


def test_rounds_without_anything_can_be_folded_and_adopted() -> None:
    parameter = nn.Parameter(torch.ones(2))
    step = Step(torch.optim.SGD([parameter], lr=0.1), [parameter], None, scheduled=False)
    step.adopt()
    assert parameter.tolist() == [1.0, 1.0]


def test_a_round_that_ends_before_the_merge_is_known_has_it_when_it_is_taken() -> None:
    def worker() -> list[bool]:
        world, engine = opened(Rules("solo"))
        if world.rank == 0:
            engine.contribute(adding())
        else:
            world.sleep_until(1.0)  # the round has ended
        merge = engine.merge = Shift(Layout(["x"], [torch.zeros(1)]), alone=False)
        return [each.merge is merge for each in [*engine.results(), *engine.leave()]]

    assert offbeat.run(worker, Cluster.uniform(2)).results == [[True], [True]]
