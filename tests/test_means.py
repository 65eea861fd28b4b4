"""The mean of all models, on demand: whoever asks has it, whatever the others do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds import Flats, Layout, Means
from offbeat.testing import processes
from offbeat.worlds import World, enter_world, leave_world


def _means(world: World, value: list[float]) -> Means:
    layout = Layout(["weight"], [nn.Parameter(torch.zeros(2))])

    def read(into: Flats) -> None:
        into.views[0].fill_(value[0])

    means = Means(world, "test", layout, read)
    means.begin()
    return means


def _worker() -> list[float]:
    """Workers 0 and 1 ask at their own times, worker 2 never does; the mean is of all three."""
    world = enter_world()
    value = [float(world.rank)]
    means = _means(world, value)
    seen = []
    if world.rank < 2:
        seen += means.ask().views[0].tolist()
        world.sleep_until(world.now() + 0.05 * (world.rank + 1))
        seen += means.ask().views[0].tolist()
    done = torch.ones(1)
    world.channel("done").all_reduce(done).wait()
    value[0] += 3.0
    world.channel("changed").all_reduce(done).wait()
    seen += means.ask().views[0].tolist()
    world.channel("end").all_reduce(done).wait()
    means.end()
    leave_world(world)
    return seen


def test_who_asks_has_the_mean_of_all_models() -> None:
    results = offbeat.run(_worker, Cluster.uniform(3, latency_s=1e-3)).results
    assert results[:2] == [[1.0, 1.0, 1.0, 1.0, 4.0, 4.0]] * 2
    assert results[2] == [4.0, 4.0]


@pytest.mark.real
def test_who_asks_has_the_mean_of_all_models_on_processes() -> None:
    results = [each.result for each in processes(_worker, 3)]
    assert results[:2] == [[1.0, 1.0, 1.0, 1.0, 4.0, 4.0]] * 2
    assert results[2] == [4.0, 4.0]


def test_a_model_is_not_read_while_it_changes() -> None:
    def worker() -> list[float]:
        world = enter_world()
        value = [0.0]
        means = _means(world, value)
        if world.rank:
            with means.guard():
                value[0] = 100.0  # half-way
                world.sleep_until(world.now() + 1.0)
                value[0] = 2.0
        seen: list[float] = [] if world.rank else means.ask().views[0].tolist()
        world.channel("end").all_reduce(torch.ones(1)).wait()
        means.end()
        return seen

    assert offbeat.run(worker, Cluster.uniform(2)).results[0] == [1.0, 1.0]
