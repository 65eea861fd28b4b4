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


class Masked(nn.Module):
    """With a causal mask, as transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = torch.softmax(self.mask, -1)  # type: ignore[arg-type]
        return self.linear(x) @ weights


@pytest.mark.parametrize(
    "algorithm",
    [
        *(offbeat.LocalSGD(2), offbeat.WaitFreeLocalSGD(), offbeat.DaSGD(2, 1), offbeat.DiLoCo(2)),
        *(offbeat.WAGMASGD(), offbeat.DPSGD(), offbeat.SyncSGD()),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_mask_of_infinities_stays_as_it_is(algorithm: offbeat.Algorithm) -> None:
    def worker() -> tuple[int, int, bool]:
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer, algorithm) as dp:
            for _ in range(6):
                optimizer.zero_grad()
                (model(torch.randn(8, 4)) - 1).square().mean().backward()
                optimizer.step()
        same = torch.equal(model.mask, Masked().mask)  # type: ignore[arg-type]
        return dp.stats().rounds, dp.stats().skipped_rounds, same

    for rounds, skipped, same in offbeat.run(worker, Cluster.uniform(4)).results:
        assert rounds > 0
        assert skipped == 0
        assert same


def test_a_buffer_that_is_no_number_any_more_is_called_one() -> None:
    def worker() -> None:
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with offbeat.attach(model, optimizer, offbeat.LocalSGD(1)):
            model(torch.ones(2, 1)).sum().backward()
            model[0].running_mean.fill_(torch.inf)  # type: ignore[union-attr,operator]
            optimizer.step()

    words = r"the buffer '0\.running_mean' on worker"
    with pytest.raises(offbeat.errors.NonFiniteGradientError, match=words):
        offbeat.run(worker, Cluster.uniform(2))
