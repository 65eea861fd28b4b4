"""Running statistics in models that are averaged late: a variance stays one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import offbeat
from offbeat import Cluster
from offbeat.merges.statistics import copies, hold


def test_a_shifted_statistic_is_between_what_it_was_and_what_all_agree_on() -> None:
    weight, shifted = torch.tensor([9.0]), torch.tensor([-0.5, 0.25, 3.0])
    before, agreed = [torch.tensor([0.3, 0.2, 1.0])], [weight, torch.tensor([0.2, 0.4, 2.0])]
    hold([weight, shifted], before, agreed)
    assert torch.equal(shifted, torch.tensor([0.2, 0.25, 2.0]))
    assert copies([weight, shifted], 0) == []


def test_a_statistic_that_has_left_the_numbers_returns_to_what_all_agree_on() -> None:
    shifted = torch.tensor([0.5])
    hold([shifted], [torch.tensor([float("nan")])], [torch.tensor([0.5])])
    assert shifted.item() == 0.5


CLUSTER = """
workers = 3
speed = [1.0, 1.0, {slow}]
[compute]
step_s = 0.1
[[noise]]
kind = "lognormal"
sigma = 0.5
"""


def _least_variance(algorithm: offbeat.Algorithm) -> list[float]:
    torch.manual_seed(offbeat.rank())
    model = nn.Sequential(nn.Linear(6, 8, bias=False), norm := nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    with offbeat.attach(model, optimizer, algorithm) as dp:
        for _ in range(24):
            optimizer.zero_grad()
            for _ in range(3):  # as a GAN's loop does: a statistic forgets a quarter in each step
                outputs = model(0.1 * torch.randn(5, 6))
            outputs.square().mean().backward()
            optimizer.step()
            assert isinstance(norm.running_var, torch.Tensor)
            seen.append(norm.running_var.min().item())
            with dp.agreed():
                seen.append(norm.running_var.min().item())
    return seen


@pytest.mark.parametrize(
    ("algorithm", "slow"),
    [
        (offbeat.DaSGD(2, delay=1, quorum=2), 0.2),
        (offbeat.DiLoCo(2, lr=0.5, momentum=0.5, overlap=1, quorum="solo"), 0.2),
        (offbeat.WaitFreeLocalSGD(), 1.0),
        (offbeat.WAGMASGD(group=3), 0.2),
        (offbeat.WAGMASGD(group=1, period=2), 0.2),
    ],
    ids=str,
)
def test_a_late_workers_running_variance_does_not_become_negative(
    algorithm: offbeat.Algorithm, slow: float
) -> None:
    cluster = Cluster.parse(CLUSTER.format(slow=slow))
    for seed in range(3):
        seen = offbeat.run(partial(_least_variance, algorithm), cluster, seed=seed).results
        assert min(min(each) for each in seen) > 0
