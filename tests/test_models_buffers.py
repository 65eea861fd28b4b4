"""Running statistics go with the model wherever models are averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from offbeat.clusters import Cluster


@pytest.mark.parametrize(
    "algorithm", [offbeat.LocalSGD(2), offbeat.WaitFreeLocalSGD(), offbeat.WAGMASGD()]
)
def test_the_agreed_model_has_the_mean_of_running_statistics(algorithm: offbeat.Algorithm) -> None:
    def worker() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=None), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        seen: list[float] = []
        with offbeat.attach(model, optimizer, algorithm) as dp:
            for _ in range(4):
                data = torch.tensor([[0.0], [2.0]]) + 10 * dp.rank
                model(data).sum().backward()
                optimizer.step()
                with dp.agreed():
                    seen += model[0].running_mean.tolist()  # type: ignore[union-attr,operator]
        return seen, model[0].running_mean.tolist()  # type: ignore[union-attr,operator]

    results = offbeat.run(worker, Cluster.uniform(2)).results
    for seen, end in results:
        assert seen[-1] == pytest.approx(6.0, abs=3.0), "not one worker's own: 1 or 11"
        assert end == pytest.approx([6.0])
    assert results[0][1] == results[1][1]
