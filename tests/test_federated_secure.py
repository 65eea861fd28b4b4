"""Sums of which nobody sees one client's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_federated_clients import CLIENTS, budget_30, learnt, virtual
from torch import Tensor

import offbeat
from offbeat.federated.sums import MaskedSums, Sums
from offbeat.worlds import enter_world

pytest.importorskip("cryptography", reason="secure sums need the package cryptography")


def _summed(secure: bool, count: int = 500) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What each client gives, and gets, as whole numbers and as fractions."""

    def client() -> Any:
        world = enter_world()
        channel = world.channel("sums")
        sums = MaskedSums(channel, world.rank) if secure else Sums(channel)
        mine = torch.arange(count) * (world.rank + 1)
        given = sums.masked(torch.zeros(count, dtype=torch.int64)) if secure else mine
        return given, sums.counts(mine), sums.floats(mine / 7)

    return offbeat.run(client, "uniform-8", workers=CLIENTS).results


def test_masks_cancel_to_the_bit() -> None:
    given = [each[0] for each in _summed(True)]
    assert torch.stack(given).sum(0).tolist() == [0] * 500
    for plain, masked in zip(_summed(False), _summed(True), strict=True):
        assert torch.equal(plain[1], masked[1])
        torch.testing.assert_close(plain[2], masked[2], rtol=0, atol=1e-9)


def test_an_upload_alone_is_noise() -> None:
    """Of zeros: every bit is 1 half of the time, bytes are uniform, and nothing comes twice."""
    first, second = (_summed(True, 20_000)[1][0] for _ in range(2))
    assert not (first == second).any()
    for bit in range(64):
        ones = float(((first >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / 20_000**0.5, bit
    counts = torch.bincount(first.view(torch.uint8).long(), minlength=256).double()
    expected = 160_000 / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 255 - 6 * 22.6 < chi_squared < 255 + 6 * 22.6


def test_masked_sums_choose_the_same_samples() -> None:
    plain, masked = (virtual(budget_30, secure=each) for each in (False, True))
    for (a, model, _), (b, other, _) in zip(plain, masked, strict=True):
        assert a.histograms == b.histograms
        assert all(torch.equal(x, y) for x, y in zip(model, other, strict=True))


def test_numbers_too_large_for_a_masked_sum_are_named() -> None:
    def client() -> None:
        world = enter_world()
        MaskedSums(world.channel("sums"), world.rank).floats(torch.tensor([1e10]))

    with pytest.raises(ValueError, match="scale the features down"):
        offbeat.run(client, "uniform-8", workers=2)


def test_the_package_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.federated.secure.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="offbeat\\[federated\\]"):
        offbeat.run(lambda: learnt(budget_30, secure=True), "uniform-8", workers=CLIENTS)
