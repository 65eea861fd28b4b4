"""eager-SGD and m-synchronous SGD over an optimizer, in virtual time."""

from __future__ import annotations

import io
from typing import Any, Literal

import pytest
import torch
from nets import loss, net, parameters, same, sgd, train
from test_abs import resumes_bit_for_bit

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.write import to_toml
from offbeat.errors import NonFiniteGradientError

ONE_SLOW = Cluster.parse(
    """
    workers = 4
    speed = [1.0, 1.0, 1.0, 0.1]
    [compute]
    step_s = 1.0
    [network]
    latency_s = 1e-4
    """
)


def _steps(rank: int) -> int:
    return 4 if rank == 3 else 40


def test_with_solo_the_fast_do_not_pay_for_the_slow() -> None:
    algorithm = offbeat.EagerSGD("solo")
    results = offbeat.run(lambda: train(_steps, algorithm), ONE_SLOW).results
    for _, stats in results[:3]:
        assert stats.compute_s == pytest.approx(40)
        assert stats.wait_s < 1.5  # messages, and the last steps of the slow one
    assert results[3][1].utilization > 0.99
    assert all(same(trajectory[-1], results[0][0][-1]) for trajectory, _ in results)


def test_a_slow_workers_gradients_are_stale_by_the_rounds_it_missed() -> None:
    results = offbeat.run(lambda: train(_steps, offbeat.EagerSGD("solo")), ONE_SLOW).results
    late = [round for round in results[0][1].history if 3 in round.ranks]
    assert len(late) == 4
    # The fast make ten rounds in the time that the slow one computes.
    assert all(8 <= round.staleness_rounds <= 10 for round in late)


@pytest.mark.parametrize(("delay", "least_s", "most_s"), [(0, 3.0, 4.0), (1, 0.0, 0.1)])
def test_with_a_delay_the_fast_wait_for_no_message(
    delay: Literal[0, 1], least_s: float, most_s: float
) -> None:
    slow_network = Cluster.parse(to_toml(ONE_SLOW).replace("0.0001", "0.02"))
    algorithm = offbeat.EagerSGD("solo", delay=delay)
    results = offbeat.run(lambda: train(_steps, algorithm), slow_network).results
    assert least_s < results[0][1].wait_s < most_s
    assert all(same(trajectory[-1], results[0][0][-1]) for trajectory, _ in results)


def test_with_a_delay_a_gradient_is_applied_exactly_one_round_late() -> None:
    results = offbeat.run(
        lambda: train(12, offbeat.EagerSGD("all", delay=1)), offbeat.Cluster.uniform(3)
    ).results
    assert results[0][1].staleness == {0: 1, 1: 11}


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_fast_wait_rather_than_exceed_the_staleness_bound(limit: int) -> None:
    algorithm = offbeat.EagerSGD("solo", max_staleness_rounds=limit)
    results = offbeat.run(lambda: train(12, algorithm), ONE_SLOW).results
    assert max(results[0][1].staleness) == limit
    assert results[0][1].wait_s > 60


def test_a_scheduler_follows_the_rounds_on_late_workers_too() -> None:
    def worker() -> Any:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
        solo = offbeat.EagerSGD("solo")
        with offbeat.attach(model, opt, solo, scheduler=scheduler, schedule_by="rounds") as dp:
            for step in range(_steps(offbeat.rank())):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
        return opt.param_groups[0]["lr"], dp.stats().rounds

    results = offbeat.run(worker, ONE_SLOW).results
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(0.99 ** results[0][1])


def test_a_gradient_that_is_not_finite_is_named_even_if_late() -> None:
    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("solo")):
            for step in range(_steps(offbeat.rank())):
                opt.zero_grad()
                bad = float("nan") if (offbeat.rank(), step) == (3, 1) else 1.0
                (bad * loss(model, offbeat.rank(), step)).backward()
                opt.step()

    with pytest.raises(NonFiniteGradientError) as caught:
        offbeat.run(worker, ONE_SLOW)
    assert (caught.value.rank, caught.value.parameter) == (3, "0.weight")


def test_a_run_with_late_workers_resumes_bit_for_bit() -> None:
    def worker(begin: int, saved: list[bytes]) -> Any:
        rank = offbeat.rank()
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, offbeat.EagerSGD("majority")) as dp:
            if begin:
                state = torch.load(io.BytesIO(saved[rank]), weights_only=True)
                model.load_state_dict(state["model"])
                opt.load_state_dict(state["optimizer"])
                dp.load_state_dict(state["dp"])
            for step in range(begin, 12):
                opt.zero_grad()
                loss(model, rank, step).backward()
                opt.step()
                if step == 5 and not begin:
                    dp_state = dp.state_dict()
                    file = io.BytesIO()
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "optimizer": opt.state_dict(),
                            "dp": dp_state,
                        },
                        file,
                    )
                    saved[rank] = file.getvalue()
        return parameters(model), dp.round

    cluster = Cluster.load("two-slow-of-eight")
    saved = [b""] * 8
    whole = offbeat.run(lambda: worker(0, saved), cluster, seed=1).results
    resumed = offbeat.run(lambda: worker(6, saved), cluster, seed=1).results
    assert whole[0][1] == resumed[0][1]
    assert same(whole[0][0], resumed[0][0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"late": "forget"}, "late must be one of 'accumulate', 'drop', got 'forget'"),
        ({"average": "median"}, "average must be one of 'samples', 'workers', got 'median'"),
        ({"lateness": "clock"}, "lateness must be one of 'version', 'step', got 'clock'"),
        ({"delay": 2}, "delay must be one of 0, 1, got 2"),
        ({"delay": 1, "max_staleness_rounds": 0}, "no gradient is less than one round late"),
    ],
)
def test_unknown_policies_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offbeat.EagerSGD(**settings)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (offbeat.EagerSGD(9), "quorum must be between 1 and the 8 workers, got 9"),
        (offbeat.EagerSGD(0), "quorum must be between 1 and the 8 workers, got 0"),
        (offbeat.EagerSGD(1.5), "a fraction of workers must be above 0 and at most 1, got 1.5"),
        (offbeat.EagerSGD("most"), "quorum must be .*, got 'most'"),
        (offbeat.EagerSGD(max_staleness_rounds=-1), "max_staleness_rounds must be 0 or more"),
        (offbeat.MSyncSGD(12), "m must be between 1 and the 8 workers, got 12"),
        (offbeat.MSyncSGD(0), "m must be between 1 and the 8 workers, got 0"),
        (offbeat.MSyncSGD("best"), 'm must be a number, a fraction or "auto"'),  # type: ignore[arg-type]
    ],
)
def test_a_quorum_that_cannot_be_is_refused_on_every_worker(
    algorithm: offbeat.Algorithm, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        offbeat.run(lambda: train(algorithm=algorithm), "uniform-8")


# --- the choice of m -----------------------------------------------------------------------


def test_a_chosen_m_resumes_bit_for_bit() -> None:
    resumes_bit_for_bit(offbeat.MSyncSGD("auto"), ONE_SLOW)


def test_m_auto_leaves_out_the_slow_worker_and_trains() -> None:
    def worker() -> offbeat.Stats:
        return train(lambda rank: 3 * _steps(rank), offbeat.MSyncSGD("auto"))[1]

    stats = offbeat.run(worker, ONE_SLOW).results
    assert stats[0].history[0].ranks == (0, 1, 2, 3)  # the first round sees everyone
    assert stats[0].history[-1].ranks == (0, 1, 2)
    assert stats[0].replicas_identical
    assert stats[3].dropped_samples > 0
