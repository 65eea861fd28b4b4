"""The control plane forgets: what it holds does not grow with rounds, stays away or checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import loss, net, sgd
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.rounds.bells import _BLOCK
from offbeat.testing import processes
from offbeat.worlds import enter_world

pytestmark = pytest.mark.slow

CLUSTER = Cluster.parse(
    "workers = 3\nspeed = [1.0, 0.8, 0.5]\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 1e-3"
)
ALGORITHMS = [
    *("SyncSGD()", "LocalSGD(2)", "DropCompute(2)", "EagerSGD('solo')", "ABSSGD()"),
    "WAGMASGD()",
]


def _train(
    algorithm: str,
    steps: int,
    habit: str,
    away_s: float,
    after: Callable[[int], None] = lambda step: None,
) -> offbeat.Attachment:
    model: nn.Module = net()
    opt = sgd(model)
    rank = offbeat.rank()
    dp = offbeat.attach(model, opt, eval(algorithm, vars(offbeat)))
    for step in range(steps):
        opt.zero_grad()
        loss(model, rank, step).backward()
        opt.step()
        if habit == "is away" and step % 10 == 9 and step // 10 % offbeat.world_size() == rank:
            with dp.away():
                dp._world.sleep_until(dp._world.now() + away_s)
        if habit == "saves" and step % 10 == 9:
            dp.state_dict()
        after(step)
    return dp


def _virtual_keys(algorithm: str, steps: int, habit: str) -> int:
    keys: list[int] = []

    def worker() -> None:
        dp = _train(algorithm, steps, habit, away_s=5.0)
        control: Any = dp._world.control
        dp.close()
        keys.append(len(control.values) + len(control.counters))

    offbeat.run(worker, CLUSTER)
    return max(keys)


@pytest.mark.parametrize("habit", ["only trains", "is away", "saves"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_do_not_grow_with_rounds(algorithm: str, habit: str) -> None:
    few, many = (_virtual_keys(algorithm, steps, habit) for steps in (30, 200))
    assert many <= few + 2 * _BLOCK * (habit == "is away")


def test_keys_of_agreements_do_not_grow_with_attachments() -> None:
    def keys(attachments: int) -> int:
        def worker() -> int:
            control: Any = enter_world().control
            for _ in range(attachments):
                _train("EagerSGD()", 2, "only trains", 0.0).close()
            names = [*control.values, *control.counters]
            return sum(name.startswith("agree/") for name in names)

        return max(offbeat.run(worker, CLUSTER).results)

    assert keys(10) == keys(2)


def _real_keys(algorithm: str, habit: str) -> tuple[int, int]:
    """How many keys the job's store holds after 100 and after 1,000 steps."""
    torch.set_num_threads(1)
    seen: list[int] = []

    def count(step: int) -> None:
        if step in (100, 1000):
            seen.append(dist.distributed_c10d._get_default_store().num_keys())

    _train(algorithm, 1001, habit, away_s=0.01, after=count).close()
    few, many = seen
    return few, many


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("habit", ["only trains", "is away", "saves"])
@pytest.mark.parametrize("algorithm", ["SyncSGD()", "EagerSGD('solo')"])
def test_keys_in_the_store_do_not_grow_with_rounds(algorithm: str, habit: str) -> None:
    for one in processes(_real_keys, 2, algorithm, habit):
        few, many = one.result
        assert many <= few + 2 * _BLOCK * (habit == "is away") + 8
