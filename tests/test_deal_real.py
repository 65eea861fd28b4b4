"""Dealt data on real processes: with DataLoader workers, a slow rank, and what goes wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from nets import net, sgd
from test_deal import data, once
from torch.utils.data import DataLoader

import offbeat
from offbeat.testing import processes

pytestmark = pytest.mark.real


def _train(samples: int, epochs: int, slow_s: float, **loading: Any) -> list[list[list[int]]]:
    dataset, model = data(samples), net()
    opt = sgd(model)
    loader: Any = DataLoader(dataset, batch_sampler=offbeat.Deal(dataset, 2), **loading)
    got: list[list[list[int]]] = []
    with offbeat.attach(model, opt, offbeat.ABSSGD()):
        for _ in range(epochs):
            got.append([])
            for index, x, y in loader:
                got[-1].append(index.tolist())
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                if offbeat.rank() == 1:
                    time.sleep(slow_s)
                opt.step()
    return got


@pytest.mark.parametrize(
    "loading",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
        {"num_workers": 2, "multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_every_sample_comes_once_an_epoch(loading: dict[str, Any]) -> None:
    results = [one.result for one in processes(_with, 2, loading)]
    once(results, 120, 2)
    fast, slow = (sum(map(len, worker)) for worker in results)
    assert fast > slow


def _with(loading: dict[str, Any]) -> list[list[list[int]]]:
    return _train(120, 2, 0.02, **loading)
