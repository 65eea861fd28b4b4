"""The table of gradient-sized buffers in docs/behaviour.md, row by row: the most that there are."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any
from weakref import WeakSet

import pytest
import torch
from nets import FOUR
from torch import Tensor, nn

import offbeat
from offbeat.replica.overlap import Overlap
from offbeat.rounds import Flats
from offbeat.worlds import enter_world

pytestmark = pytest.mark.slow

ROWS = [  # in the loop, and while a worker is away
    ("SyncSGD()", 1, 4),
    ("SyncSGD(overlap=False)", 1, 4),
    ("SyncSGD(micro_batches=4, overlap=False)", 1, 4),
    ("DropCompute(4)", 1, 4),
    ("LBBSP(4)", 1, 4),
    ("EagerSGD('all')", 1, 4),
    ("NonblockingSGD(4)", 1, 4),
    ("SyncSGD(micro_batches=4)", 2, 4),
    ("MSyncSGD(2)", 2, 4),
    ("NonblockingSGD(4, in_flight='bank')", 2, 4),
    ("ABSSGD()", 2, 4),
    ("EagerSGD()", 3, 4),
    ("EagerSGD('solo')", 3, 4),
    ("EagerSGD(delay=1)", 4, 4),
    ("RennalaSGD(4)", 3, 5),
    ("MSyncSGD(2, top_up=True)", 3, 6),
    ("ASGD()", 5, 5),
    ("RingmasterASGD(2, stop='never')", 5, 5),
    ("RescaledASGD()", 5, 5),
    ("RingleaderASGD()", 8, 8),
    ("LocalSGD(4)", 2, 7),
    ("LocalSGD(4, shares='speed')", 3, 6),
    ("WaitFreeLocalSGD()", 5, 8),
    ("WAGMASGD()", 3, 3),
    ("DaSGD(4)", 3, 7),
    ("DaSGD(4, delay=2, quorum=2)", 4, 7),
    ("DiLoCo(4, overlap=2)", 4, 8),
    ("DiLoCo(4)", 3, 8),
    ("DiLoCo(4, fragments=2, overlap=1)", 6, 8),
]


class Counted:
    """Counts buffers in the shape of the gradients, of each worker; the most at any moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: Counter[int] = Counter()
        alive: WeakSet[Flats] = WeakSet()
        make, keep = Flats.__dict__["tensors"].func, Overlap.keep

        def tensors(flats: Flats) -> list[Tensor]:
            alive.add(flats)
            owner = id(flats._layout)
            now = sum(id(each._layout) == owner for each in alive)
            self.most[owner] = max(self.most[owner], now)
            made: list[Tensor] = make(flats)
            return made

        def keeps(overlap: Overlap, *arguments: Any, **settings: Any) -> bool:
            changed = keep(overlap, *arguments, **settings)
            if overlap._copies:
                owner = id(overlap._layout)
                now = 1 + sum(id(each._layout) == owner for each in alive)
                self.most[owner] = max(self.most[owner], now)
            return changed

        counted = cached_property(tensors)
        counted.__set_name__(Flats, "tensors")
        monkeypatch.setattr(Flats, "tensors", counted)
        monkeypatch.setattr(Overlap, "keep", keeps)


def _train(algorithm: str, away: bool) -> None:
    torch.manual_seed(0)
    # Too large for the short cuts that small models take, and several buckets.
    model = nn.Sequential(*(nn.Linear(150, 150) for _ in range(4)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    world = enter_world()
    with offbeat.attach(model, opt, eval(algorithm, vars(offbeat)), bucket_bytes=100_000) as dp:
        for step in range(24):
            opt.zero_grad()
            model(torch.ones(2, 150)).square().mean().backward()
            opt.step()
            if away and (world.rank, step) == (0, 9):
                with dp.away():
                    world.sleep_until(world.now() + 100.0)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(("algorithm", "buffers", "while_away"), ROWS)
def test_how_many_gradients_are_kept_beyond_plain_training(
    algorithm: str, buffers: int, while_away: int, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    offbeat.run(lambda: _train(algorithm, away), FOUR)
    assert len(counted.most) == FOUR.workers
    assert max(counted.most.values()) == (while_away if away else buffers)
