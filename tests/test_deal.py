"""Dealt data: every sample once an epoch, whoever is how fast; in virtual time, with exact logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from nets import net, sgd
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import offbeat
from offbeat.clusters import Cluster


def data(samples: int) -> TensorDataset:
    """Samples that can be told apart."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(samples, 6, generator=generator),
        torch.randn(samples, 3, generator=generator),
    )
    return TensorDataset(torch.arange(samples), x, y)


def cluster(*speed: float, latency_s: float = 0.0) -> Cluster:
    return Cluster.parse(
        f"workers = {len(speed)}\nspeed = {list(speed)}\n[compute]\nstep_s = 1.0\n"
        f"[network]\nlatency_s = {latency_s}"
    )


def trained(
    deal: offbeat.Deal,
    dataset: TensorDataset,
    algorithm: offbeat.Algorithm | None = None,
    epochs: int = 1,
) -> list[list[list[int]]]:
    """Train over dealt data; return the batches that this worker got, by epoch."""
    model = net()
    opt = sgd(model)
    loader: Any = DataLoader(dataset, batch_sampler=deal)
    got: list[list[list[int]]] = []
    with offbeat.attach(model, opt, algorithm or offbeat.ABSSGD()):
        for _ in range(epochs):
            got.append([])
            for index, x, y in loader:
                got[-1].append(index.tolist())
                opt.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
    return got


def once(results: list[Any], samples: int, epochs: int = 1) -> None:
    """Every sample came once an epoch, over all workers."""
    for epoch in range(epochs):
        got = sorted(i for worker in results for batch in worker[epoch] for i in batch)
        assert got == list(range(samples))


def test_every_sample_comes_once_an_epoch_whoever_is_how_fast() -> None:
    dataset = data(101)
    results = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, 2), dataset, epochs=3),
        cluster(1.0, 0.5, 0.25, latency_s=1e-3),
    ).results
    once(results, 101, 3)


def test_a_worker_at_half_speed_gets_half_as_many() -> None:
    dataset = data(90)
    run = offbeat.run(
        lambda: trained(offbeat.Deal(dataset, 1, shuffle=False), dataset), cluster(1.0, 0.5)
    )
    once(run.results, 90)
    assert [len(worker[0]) for worker in run.results] == [60, 30]
    assert run.seconds == 60.0
