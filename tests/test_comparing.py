"""`dp.replicas_identical()` compares at the same round, whoever knows of how many; virtual time.

On real processes: tests/test_deal_real.py. A worker joins or is expelled meanwhile:
tests/test_joining.py, tests/test_expelled.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nets import loss, net, parameters, same, sgd
from test_contract import ALGORITHMS, every_algorithm
from test_joining import METHODS
from test_rejoining import FROZEN, LIMIT_S, Returns, freeze
from test_rejoining import cluster as freezing
from test_rejoining import returns as returns
from test_survival import cluster as crashing

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import StuckWarning

CLUSTER = Cluster.parse("workers = 4\nspeed = [1.0, 0.7, 0.5, 0.9]\n[compute]\nstep_s = 1.0")
STEPS = (5, 3, 6, 4)
SOME = ["SyncSGD", "solo", "LocalSGD", "DiLoCo with a quorum", "WAGMASGD", "EDM", "RennalaSGD"]
some_methods = pytest.mark.parametrize("name", SOME)


def train_some(dp: offbeat.Attachment, model: Any, opt: Any, epoch: int = 0) -> None:
    """Each worker makes another number of steps."""
    for step in range(STEPS[dp.rank]):
        opt.zero_grad()
        loss(model, dp.rank, 10 * epoch + step).backward()
        opt.step()


class Compares:
    """Trains, and compares after each epoch: where models move between rounds, what all agree on.

    Or within this verb.
    """

    def __init__(self, algorithm: offbeat.Algorithm, verb: str = "", **settings: Any) -> None:
        self.algorithm = algorithm
        self.verb = verb
        self.settings = {"bucket_bytes": 16, **settings}
        self.spans: dict[int, tuple[float, float]] = {}
        """When each worker began with the first comparison, and ended it."""

    def __call__(self) -> tuple[list[bool], bool | None]:
        model, found = net(), list[bool]()
        opt = sgd(model)
        with offbeat.attach(model, opt, self.algorithm, **self.settings) as dp:
            for epoch in range(2):
                train_some(dp, model, opt, epoch)
                verb = self.verb or ("agreed" if dp.drifts else "")
                with getattr(dp, verb)() if verb else nullcontext():
                    began_s = dp.seconds
                    found.append(dp.replicas_identical())
                    self.spans.setdefault(dp.rank, (began_s, dp.seconds))
        return found, dp.stats().replicas_identical


@every_algorithm
def test_replicas_are_identical_where_some_have_run_out_of_data_first(name: str) -> None:
    for told in offbeat.run(Compares(ALGORITHMS[name].make(4)), CLUSTER).results:
        assert told == ([True, True], True)


@pytest.mark.parametrize("verb", ["away", "agreed"])
@pytest.mark.parametrize("name", ["SyncSGD", "solo", "RennalaSGD"])
def test_they_are_within_a_block_in_which_workers_are_away(name: str, verb: str) -> None:
    for told in offbeat.run(Compares(METHODS[name], verb), CLUSTER).results:
        assert told == ([True, True], True)


@some_methods
def test_what_is_shown_within_agreed_is_of_that_round_then_and_ones_own_after_it(name: str) -> None:
    def worker() -> Any:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, METHODS[name], bucket_bytes=16) as dp:
            train_some(dp, model, opt)
            with dp.agreed():
                assert dp.replicas_identical()
                shown = parameters(model)
            own, number = parameters(model), dp.round
            with dp.agreed():
                assert same(parameters(model), shown)
            assert same(parameters(model), own)
            assert same(own, shown) or dp.drifts
        return shown, number

    (shown, number), *others = offbeat.run(worker, CLUSTER).results
    for other, its in others:
        assert same(shown, other)
        assert its == number


@pytest.mark.parametrize("name", [each for each in SOME if each != "WAGMASGD"])  # it drops that
def test_a_worker_whose_parameters_were_changed_is_found(name: str) -> None:
    def worker() -> bool:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, METHODS[name], bucket_bytes=16) as dp:
            train_some(dp, model, opt)
            if dp.rank == 1:
                with torch.no_grad():
                    model[0].bias.add_(1.0)
            return dp.replicas_identical()

    with pytest.MonkeyPatch.context() as patch:  # the end would find it, too
        patch.setattr(type(METHODS[name]), "identical", False)
        gradients = name in ("SyncSGD", "solo", "RennalaSGD")  # else all have their mean there
        with pytest.warns(match="replicas differ at") if gradients else nullcontext():
            found = offbeat.run(worker, CLUSTER).results
    assert found == [False] * 4


@some_methods
def test_who_has_left_is_not_asked(name: str) -> None:
    def worker() -> bool | None:
        model, found = net(), None
        opt = sgd(model)
        with offbeat.attach(model, opt, METHODS[name], bucket_bytes=16) as dp:
            train_some(dp, model, opt)
            if dp.rank != 1:
                with dp.agreed():
                    found = dp.replicas_identical()
        return found

    assert offbeat.run(worker, CLUSTER).results == [True, None, True, True]


def test_each_of_several_attachments_is_compared_while_others_are_in_the_next() -> None:
    def worker() -> list[bool]:
        found = []
        one, other = net(1), net(2)
        opt_1, opt_2 = sgd(one), sgd(other)
        with (
            offbeat.attach(one, opt_1) as dp_1,
            offbeat.attach(other, opt_2, offbeat.EagerSGD("solo")) as dp_2,
        ):
            for epoch in range(2):
                train_some(dp_1, one, opt_1, epoch)
                found.append(dp_1.replicas_identical())
                train_some(dp_2, other, opt_2, epoch)
                found.append(dp_2.replicas_identical())
        return found

    assert offbeat.run(worker, CLUSTER).results == [[True] * 4] * 4


def test_a_follower_may_compare_after_every_round_also_while_others_have_paused() -> None:
    def worker() -> tuple[list[bool], int]:
        model, found = net(), list[bool]()
        opt = sgd(model)
        with offbeat.attach(model, opt, bucket_bytes=16) as dp:
            dp.on_round(lambda *_: found.append(dp.replicas_identical()))
            for epoch in range(2):
                train_some(dp, model, opt, epoch)
                found.append(dp.replicas_identical())
        return found, dp.round

    for found, rounds in offbeat.run(worker, CLUSTER).results:
        assert found == [True] * (rounds + 2)


@pytest.mark.parametrize("name", ["solo", "LocalSGD", "RennalaSGD"])
def test_a_gradient_that_no_step_has_taken_is_there_after_it(name: str) -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, METHODS[name], bucket_bytes=16) as dp:
            train_some(dp, model, opt)
            opt.zero_grad()
            loss(model, dp.rank, 99).backward()
            mine = [each.grad.clone() for each in model.parameters()]
            dp.replicas_identical()
            assert same([each.grad for each in model.parameters()], mine)
            opt.step()

    offbeat.run(worker, CLUSTER)


def test_between_backward_and_step_it_says_where_to_call_it() -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, bucket_bytes=16) as dp:
            for step in range(3):
                opt.zero_grad()
                loss(model, dp.rank, step).backward()
                if step == 2:
                    with pytest.raises(RuntimeError, match=r"replicas_identical\(\) between back"):
                        dp.replicas_identical()
                opt.step()

    offbeat.run(worker, CLUSTER)


def test_who_compares_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_STUCK_S", "0.5")

    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt) as dp:
            train_some(dp, model, opt)
            if dp.rank == 1:
                dp.replicas_identical()

    with pytest.warns(StuckWarning, match=r"worker 1 .* in dp.replicas_identical\(\)"):
        offbeat.run(worker, CLUSTER)


@some_methods
def test_a_loss_in_the_middle_of_it_holds_up_nobody(name: str) -> None:
    """Of who waits there, and of who has not come yet."""
    program = Compares(METHODS[name], survive=True, freeze_s=None)
    offbeat.run(program, crashing())
    first = min(began_s for began_s, _ in program.spans.values())
    last = max(ended_s for _, ended_s in program.spans.values())
    lost = 0
    for number in range(12):
        crash = number % 4, first + (last - first) * (number + 0.5) / 12
        told = offbeat.run(program, crashing(crash)).results
        lost += told.count(None)
        assert [each for each in told if each is not None] == [([True, True], True)] * 3
    assert lost == 12


@some_methods
def test_who_is_expelled_in_it_within_agreed_is_back_and_compares_what_they_do(
    name: str, returns: Returns
) -> None:
    program = Compares(METHODS[name], "agreed", survive=True, freeze_s=LIMIT_S)
    offbeat.run(program, freezing())
    began_s, ended_s = program.spans[FROZEN]
    for share in (0.1, 0.5, 0.98):
        at_s = began_s + share * (ended_s - began_s)
        for told in offbeat.run(program, freezing(freeze(at_s))).results:
            assert told == ([True, True], True)
        assert returns() == 1
