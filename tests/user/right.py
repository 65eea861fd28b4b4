"""A user's script, for a strict type checker: nothing in it is an error, and nothing is Any."""

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat


def train(algorithm: offbeat.Algorithm) -> torch.Tensor:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = TensorDataset(torch.ones(16, 3))
    loader = DataLoader(data, batch_sampler=offbeat.Deal(data, batch_size=2))
    with offbeat.attach(model, optimizer, algorithm, scheduler=scheduler, clip_norm=1.0) as dp:
        for (x,) in loader:
            optimizer.zero_grad()
            dp.samples(len(x))
            model(x).sum().backward()
            optimizer.step()
        with dp.agreed():
            agreed = model.weight.detach().clone()
    assert_type(dp, offbeat.Attachment)
    assert_type(dp.rank, int)
    assert_type(dp.stats().rounds, int)
    return agreed


def simulate() -> float:
    ended = offbeat.run(lambda: train(offbeat.EagerSGD("solo")), "uniform-8", workers=2)
    assert_type(ended.seconds, float)
    return ended.seconds


if __name__ == "__main__":
    print(f"virtual seconds {simulate():.3f}, worker {offbeat.rank()} of {offbeat.world_size()}")
