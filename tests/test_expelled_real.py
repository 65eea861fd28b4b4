"""A worker is stopped, and expelled, outside of its loop, or with the standby of the store in use.

Real processes; in virtual time: tests/test_expelled.py.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_rejoining_real import FROZEN, LIMIT_S, PACE, _freeze

import offbeat
from offbeat import launched
from offbeat.alike import FirstModel
from offbeat.errors import NobodyToJoinError
from offbeat.launch import host_store
from offbeat.launched import STANDBY
from offbeat.testing import processes
from offbeat.worlds import real
from offbeat.worlds.current import present_world
from offbeat.worlds.pool import STORE, pool

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LONG_S = 2 * LIMIT_S


def _is_frozen_one() -> bool:
    return int(os.environ["RANK"]) == FROZEN


def _freeze_soon(after_s: float, for_s: float) -> None:
    """Have this process stopped in a moment, whatever it does then, and continued later."""
    pid = os.getpid()
    told = f"sleep {after_s}; kill -STOP {pid}; sleep {for_s}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", told])


def _train(act: Callable[[Any, int], None], ends_s: float | None = None) -> dict[str, Any]:
    """Train until the one that was frozen is back and has made some steps; or for so long."""
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Linear(40, 60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"survive": True, "freeze_s": LIMIT_S, "pace": PACE}
    returned = 0
    with offbeat.attach(model, optimizer, offbeat.EagerSGD("solo"), **settings) as dp:
        for step in dp.until(seconds=ends_s or 60.0):
            act(dp, step)
            returned += dp._world.returns
            if returned == 20 and ends_s is None:
                dp.stop()
            optimizer.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
    return {
        "returned": returned,
        "identical": dp.stats().replicas_identical,
        "rounds": dp.round,
        "bits": float(model.weight.detach().double().sum()),
        "place": pool.place,
    }


def _check_back(told: list[dict[str, Any]]) -> None:
    assert [each["returned"] > 0 for each in told] == [False, True, False]  # it has happened
    for each in told:
        assert each["identical"]
        assert (each["rounds"], each["bits"]) == (told[0]["rounds"], told[0]["bits"])


# --- attaching -----------------------------------------------------------------------------


def _attaches(where: str) -> dict[str, Any]:
    kind: Any = {"hand_round": FirstModel, "meet": real.RealWorld}[where]
    before = getattr(kind, where)

    def freezes(*arguments: Any, **settings: Any) -> Any:
        setattr(kind, where, before)
        _freeze(LONG_S)
        return before(*arguments, **settings)

    if _is_frozen_one():
        setattr(kind, where, freezes)
    return _train(lambda dp, step: None)


@pytest.mark.parametrize("where", ["meet", "hand_round"])
def test_who_is_stopped_while_all_attach_joins_them(where: str) -> None:
    _check_back([each.result for each in processes(_attaches, 3, where, time_out_s=110)])


# --- what all do together ------------------------------------------------------------------


def _does_together(verb: str) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def act(dp: Any, step: int) -> None:
        if step == 10:
            if dp.rank == FROZEN:
                _freeze_soon(0.5, LONG_S)
            elif dp.rank == 0:
                with dp.away():
                    time.sleep(1.5)  # the other one waits in it by then
            told["told"] = getattr(dp, verb)()

    return _train(act) | told


def test_who_is_stopped_while_all_save_is_back_and_says_that_it_has_no_state() -> None:
    told = [each.result for each in processes(_does_together, 3, "state_dict", time_out_s=110)]
    _check_back(told)
    assert "missed" in told[FROZEN]["told"]
    assert told[0]["told"]["members"] == told[2]["told"]["members"] == [0, 2]


def test_who_is_stopped_while_all_compare_is_back_and_hears_what_they_have_found() -> None:
    ended = processes(_does_together, 3, "replicas_identical", time_out_s=110)
    _check_back([each.result for each in ended])
    assert len({each.result["told"] for each in ended}) == 1


# --- the end -------------------------------------------------------------------------------


def _ends() -> dict[str, Any]:
    def act(dp: Any, step: int) -> None:
        if step == 50 and dp.rank == FROZEN:
            _freeze(5 * LIMIT_S)

    return _train(act, ends_s=2.0)


def test_who_wakes_when_all_have_ended_says_what_has_happened_in_one_sentence() -> None:
    ended = processes(_ends, 3, time_out_s=110, check=False)
    for each in (ended[0], ended[2]):
        assert each.error is None, each.error
        assert each.result["identical"]
    error = ended[FROZEN].error
    assert isinstance(error, NobodyToJoinError), error
    words = str(error)
    assert "worker 1 was lost (silent for 2." in words
    assert "when it was back, they had ended" in words
    assert "freeze_s=" in words
    assert "During handling" not in "".join(error.__notes__)


# --- the standby of the store --------------------------------------------------------------


def _lose_store() -> None:
    """Have this worker find that the store does not answer."""
    liveness: Any = vars(present_world())["_liveness"]
    liveness.lose(STORE, "a test has cut it off")


def _moves(moves_at: int, freezes_at: int) -> dict[str, Any]:
    def act(dp: Any, step: int) -> None:
        if step == freezes_at and dp.rank == FROZEN:
            _freeze(2 * LONG_S)
        if step == moves_at and dp.rank == 0:
            _lose_store()

    return _train(act)


@pytest.mark.parametrize(("moves_at", "freezes_at"), [(10, 50), (30, 10)])
def test_who_is_expelled_joins_again_by_the_standby_of_the_store(
    moves_at: int, freezes_at: int
) -> None:
    """All have moved there before, or while it was stopped."""
    standby = host_store()
    environment = {STANDBY: f"127.0.0.1:{standby.port}", "OFFBEAT_LOST_S": "2"}
    ended = processes(_moves, 3, moves_at, freezes_at, environment=environment, time_out_s=110)
    told = [each.result for each in ended]
    _check_back(told)
    assert [each["place"] for each in told] == ["standby"] * 3


def _moves_and_deals() -> list[float]:
    """How often every sample was applied, as this worker has seen it; and whether it was away."""
    model = torch.nn.ParameterList([torch.zeros(1200)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    deal = offbeat.Deal(range(1200), 2, shuffle=False)
    applied = torch.zeros(1200)
    settings: dict[str, Any] = {"survive": True, "freeze_s": LIMIT_S, "pace": PACE}
    with offbeat.attach(model, optimizer, offbeat.EagerSGD("solo"), **settings) as dp:
        dp.on_round(lambda _, each: applied.add_(each.sum.views[0]))
        for number, batch in enumerate(deal):
            if number == 5 and dp.rank == 0:
                _lose_store()
            if number == 30 and dp.rank == FROZEN:
                _freeze(1.4 * LIMIT_S)
            dp.samples(len(batch))
            optimizer.zero_grad()
            model[0][batch].sum().div(len(batch)).backward()
            optimizer.step()
    assert dp.stats().replicas_identical
    assert pool.place == "standby"
    return [*applied.tolist(), float(dp._world.returns)]


def test_what_it_had_in_hand_is_dealt_again_there_and_counts_once() -> None:
    standby = host_store()
    environment = {STANDBY: f"127.0.0.1:{standby.port}", "OFFBEAT_LOST_S": "2"}
    ended = processes(_moves_and_deals, 3, environment=environment, time_out_s=110)
    zero, one, two = (each.result for each in ended)
    assert [zero[-1], one[-1], two[-1]] == [0.0, 1.0, 0.0]
    assert zero[:-1] == two[:-1] == [1.0] * 1200


def _loses_it_while_it_attaches() -> dict[str, Any]:
    say = launched.say_survives

    def loses(store: Any, world: int = 1) -> None:
        if launched._root(store).port == int(os.environ["MASTER_PORT"]):
            pool.cut(STORE)  # the standby has heard of it
        return say(store, world)

    launched.say_survives = loses
    return _train(lambda dp, step: None, ends_s=1.0)


def test_the_store_is_lost_while_a_worker_says_that_it_survives_and_all_train() -> None:
    standby = host_store()
    environment = {STANDBY: f"127.0.0.1:{standby.port}", "OFFBEAT_LOST_S": "2"}
    ended = processes(_loses_it_while_it_attaches, 3, environment=environment, time_out_s=110)
    told = [each.result for each in ended]
    assert all(each["identical"] for each in told)
    assert [each["place"] for each in told] == ["standby"] * 3
