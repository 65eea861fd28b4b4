"""A worker is expelled outside of its loop: while all attach, save, compare or end. Virtual time.

In its loop: tests/test_rejoining.py. On real processes: tests/test_expelled_real.py.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from test_joining import METHODS, bits
from test_rejoining import (
    FROZEN,
    LIMIT_S,
    WORKERS,
    Dealt,
    Returns,
    Two,
    cluster,
    freeze,
    lived,
    span,
)
from test_rejoining import returns as returns

import offbeat
from offbeat.worlds.virtual_city import City

SHARES = (0.02, 0.35, 0.7, 0.98)
"""Of the time that something takes, when the worker freezes in it."""
every_method = pytest.mark.parametrize("name", METHODS)


# --- attaching -----------------------------------------------------------------------------


@every_method
def test_who_is_expelled_while_all_attach_joins_them(name: str, returns: Returns) -> None:
    begins_s, _ = span(name, 1e-3)
    for share in SHARES:
        fates = lived(METHODS[name], cluster(freeze(share * begins_s)))
        assert returns() == 1, share
        assert None not in fates


def test_the_same_if_it_is_the_one_whose_model_all_begin_with(returns: Returns) -> None:
    """Somebody else has its model, or nobody has, and all raise."""
    begins_s, _ = span("solo", 1e-3)
    back = 0
    for share in (0.02, 0.2, 0.4, 0.6, 0.8, 0.98):
        try:
            lived(METHODS["solo"], cluster(freeze(share * begins_s, worker=0)))
        except offbeat.errors.WorkerLostError as error:
            assert "before anybody else had its model" in str(error)  # noqa: PT017 - one of two
        back += returns()
    assert back > 1


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "ASGD"])
def test_it_is_dealt_data_then_and_every_sample_counts_once(name: str, returns: Returns) -> None:
    begins_s, _ = span(name, 1e-3)
    for share in SHARES:
        fates = offbeat.run(Dealt(METHODS[name]), cluster(freeze(share * begins_s))).results
        assert returns() == 1, share
        for rank, fate in enumerate(fates):
            if rank != FROZEN:  # it has not seen all rounds
                assert fate.unique().tolist() == [1.0], (share, rank)


def test_it_joins_with_both_where_two_are_attached(returns: Returns) -> None:
    """Expelled before the first, between them, and in the second."""
    for at_s in (0.001, 0.019, 0.037):
        program = Two(offbeat.EagerSGD(), offbeat.EagerSGD("solo"))
        told = offbeat.run(program, cluster(freeze(at_s))).results
        assert returns() == 1, at_s
        assert all(each == told[0] for each in told)


# --- in the middle of something that all do together ---------------------------------------


class Seen(NamedTuple):
    """What a worker has seen."""

    began_s: float
    """When it began to do what all do together, and when it was through."""
    ended_s: float
    told: Any
    """What it was told by that."""
    round: int
    identical: bool | None
    model: bytes
    state: dict[str, Any]


class Together:
    """Each worker trains for a while, does something with all others, and trains on."""

    def __init__(self, algorithm: offbeat.Algorithm, verb: str, late_s: float = 0.0) -> None:
        self.algorithm = algorithm
        self.verb = verb
        self.late_s = late_s
        self.saved: dict[int, dict[str, Any]] = {}

    def __call__(self) -> Seen:
        rank = offbeat.rank()
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        momentum = getattr(self.algorithm, "beta", 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        if rank in self.saved:
            model.load_state_dict(self.saved[rank]["model"])
            optimizer.load_state_dict(deepcopy(self.saved[rank]["optimizer"]))
        began_s, ended_s, told, saved = 0.0, 0.0, None, {}
        with offbeat.attach(
            model, optimizer, self.algorithm, survive=True, freeze_s=LIMIT_S, bucket_bytes=16
        ) as dp:
            if rank in self.saved:
                dp.load_state_dict(self.saved[rank]["dp"])
            for step, _ in enumerate(dp.until(seconds=4.0)):
                optimizer.zero_grad()
                model(torch.randn(2, 3)).square().mean().backward()
                optimizer.step()
                if step == 3 and rank not in self.saved:
                    if rank == 0 and self.late_s:
                        with dp.away():
                            dp._world.sleep_until(dp.seconds + self.late_s)
                    began_s = dp.seconds
                    told = getattr(dp, self.verb)()
                    ended_s = dp.seconds
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    saved = deepcopy(saved)
        identical = dp.stats().replicas_identical
        assert rank in self.saved or dp.stats().pending_samples == pytest.approx(0.0)
        return Seen(began_s, ended_s, told, dp.round, identical, bits(model), saved)


def frozen_within(name: str, verb: str, share: float, late_s: float = 0.0) -> list[Seen]:
    """Have a worker freeze within this verb."""
    usual = offbeat.run(Together(METHODS[name], verb, late_s), cluster()).results[FROZEN]
    assert usual.ended_s > usual.began_s
    at_s = usual.began_s + share * (usual.ended_s - usual.began_s)
    seen = offbeat.run(Together(METHODS[name], verb, late_s), cluster(freeze(at_s))).results
    assert all(each.identical for each in seen)
    return list(seen)


SOME = ["SyncSGD", "solo", "LocalSGD", "DiLoCo with a quorum", "WAGMASGD", "EDM", "RennalaSGD"]
some_methods = pytest.mark.parametrize("name", SOME)


@some_methods
def test_who_is_expelled_while_all_save_is_back_and_says_that_it_has_no_state(
    name: str, returns: Returns
) -> None:
    """The others have theirs. Or all have, if it has frozen at the very end, when all are there."""
    missed = 0
    for share in SHARES:
        seen = frozen_within(name, "state_dict", share)
        assert returns() == 1, share
        states = [each.told for each in seen]
        without = "missed" in states[FROZEN]
        missed += without
        others = [state for rank, state in enumerate(states) if rank != FROZEN or not without]
        members = [0, 1, 3] if without else [0, 1, 2, 3]
        assert [state["members"] for state in others] == [members] * len(members), share
    assert missed > 0


@some_methods
def test_one_can_go_on_from_what_the_others_have_saved(name: str) -> None:
    seen = frozen_within(name, "state_dict", 0.02)
    again = Together(METHODS[name], "")
    again.saved = {rank: {**each.state, "dp": each.told} for rank, each in enumerate(seen)}
    with pytest.raises(ValueError, match="worker 2 was silent when the others saved"):
        offbeat.run(again, cluster())
    again.saved[FROZEN] = again.saved[0]
    if name in ("SyncSGD", "solo", "RennalaSGD"):
        assert all(each.identical for each in offbeat.run(again, cluster()).results)
    else:
        with pytest.raises(ValueError, match="each worker's model is its own"):
            offbeat.run(again, cluster())


@some_methods
def test_who_is_back_before_all_have_saved_saves_with_them(name: str, returns: Returns) -> None:
    """Another worker comes late to it."""
    seen = frozen_within(name, "state_dict", 0.1, late_s=2.0)
    assert returns() == 1
    assert [each.told["members"] for each in seen] == [[0, 1, 2, 3]] * WORKERS
    if not getattr(METHODS[name], "graph", None):
        assert len({each.told["replica"]["round"] for each in seen}) == 1


@some_methods
@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_who_is_expelled_while_all_compare_hears_what_they_have_found(
    name: str, late_s: float, returns: Returns
) -> None:
    for share in (0.1, 0.98):
        seen = frozen_within(name, "replicas_identical", share, late_s)
        assert returns() == 1
        assert len({each.told for each in seen}) == 1


# --- the end -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SyncSGD", "solo", "LocalSGD"])
def test_who_is_expelled_when_all_have_compared_at_the_end_ends_like_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expelled, lose = [], City.lose

    def noted(self: City, world: Any, why: str) -> None:
        expelled.append(world.rank)
        lose(self, world, why)

    monkeypatch.setattr(City, "lose", noted)
    ended_s = lived(METHODS[name], cluster())[FROZEN].ended_s  # type: ignore[union-attr]
    well = 0
    for number in range(1, 9):
        expelled.clear()
        fates = lived(METHODS[name], cluster(freeze(ended_s - number * 4e-4, 10.0)))
        assert [fate for rank, fate in enumerate(fates) if rank != FROZEN].count(None) == 0
        well += fates[FROZEN] is not None and expelled == [FROZEN]
    assert well > 1
