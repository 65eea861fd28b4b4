"""DaSGD: averages that are launched now and merged later, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import agree_on_the_base, loss, net, same, sgd, train
from test_abs import resumes_bit_for_bit
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster

Da = offbeat.DaSGD
TOY = [(4, 1), (4, 2), (4, 3), (8, 4)]


def cluster(workers: int = 4, latency_s: float = 0.01, speeds: tuple[float, ...] = ()) -> Cluster:
    """Steps of 1 s."""
    return Cluster.parse(
        f"workers = {workers}\nspeed = {list(speeds or (1.0,) * workers)}\n[compute]\nstep_s = 1.0"
        f"\n[network]\nlatency_s = {latency_s}"
    )


def moved(algorithm: offbeat.Algorithm, steps: int, by: Callable[[int, int], float]) -> list[float]:
    """A model of one number that a worker's step moves by so much; where it is after every step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with offbeat.attach(model, opt, algorithm):
        for step in range(steps):
            opt.zero_grad()
            (-by(offbeat.rank(), step) * model.weight).sum().backward()
            opt.step()
            seen.append(model.weight.item())
    return [*seen, model.weight.item()]


def test_the_average_of_one_step_is_merged_some_steps_later_and_nothing_is_lost() -> None:
    """Two workers that move by 1 and 3 a step: after 2 steps 2 and 6 are launched, mean 4."""
    run = offbeat.run(lambda: moved(Da(2, delay=1), 5, lambda rank, _: 1 + 2 * rank), cluster(2))
    assert run.results == [[1, 2, 5, 6, 9, 10], [3, 6, 7, 10, 11, 10]]


def test_with_the_papers_merge_a_part_of_the_overlap_is_lost() -> None:
    """After step 3: w = 3 and 9, the mean of the launched 2 and 6 is 4; xi = 1/4."""
    algorithm = Da(2, delay=1, merge="paper")
    run = offbeat.run(lambda: moved(algorithm, 3, lambda rank, _: 1 + 2 * rank), cluster(2))
    assert [seen[:3] for seen in run.results] == [[1, 2, 3.75], [3, 6, 5.25]]


def _toy(algorithm: offbeat.Algorithm, steps: int = 96) -> tuple[list[Tensor], Tensor]:
    """A quadratic with unlike optima; the parameters after every step, and the mean in the end."""
    rank, curvature = offbeat.rank(), torch.linspace(0.02, 0.5, 8).double()
    optimum = torch.randn(8, generator=torch.Generator().manual_seed(rank)).double()
    model = nn.Linear(8, 1, bias=False).double()
    nn.init.constant_(model.weight, 10.0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with offbeat.attach(model, opt, algorithm):
        for _ in range(steps):
            opt.zero_grad()
            (curvature * (model.weight - optimum).square() / 2).sum().backward()
            opt.step()
            seen.append(model.weight.detach().clone())
    return seen, model.weight.detach()


@pytest.mark.parametrize(("steps", "delay"), TOY)
def test_on_a_quadratic_the_delay_costs_nothing(steps: int, delay: int) -> None:
    """The mean over 16 workers is local SGD's without any delay, in every setting."""
    run = offbeat.run(lambda: _toy(Da(steps, delay)), cluster(16))
    plain = offbeat.run(lambda: _toy(offbeat.LocalSGD(steps)), cluster(16))
    for n in range(95):
        mean, expected = (
            torch.stack([seen[n] for seen, _ in each.results]).mean(0) for each in (run, plain)
        )
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.results[0][1], plain.results[0][1], rtol=0, atol=1e-12)


def _loss_after_100(algorithm: offbeat.Algorithm) -> float:
    """Of the mean over four workers, on the quadratic of another replication."""
    curvature = torch.linspace(0.01, 1.0, 50, dtype=torch.float64)

    def worker() -> Tensor:
        pull = (1.0, -1.0, 3.0, -3.0)[offbeat.rank()]
        model = nn.Linear(50, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(model.weight, 5.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, opt, algorithm):
            for _ in range(100):
                opt.zero_grad()
                (curvature * model.weight.square() / 2 + pull * model.weight).sum().backward()
                opt.step()
            return model.weight.detach().clone()

    mean = torch.stack(offbeat.run(worker, cluster(4)).results).mean(0)
    return float((curvature * mean.square()).sum() / 2)


PAPERS_MERGE = {0.0: (2.71, 5.67, 18.7, 5.64), 0.25: (2.34, 3.81, 7.46, 3.80),
                0.5: (2.05, 2.73, 3.88, 2.72)}  # fmt: skip
"""By xi, the loss of that replication after 100 steps, for each of TOY."""


@pytest.mark.parametrize("of", range(4))
def test_losses_on_the_toy_quadratic_are_those_of_another_replication(of: int) -> None:
    found = _loss_after_100(Da(*TOY[of]))
    assert found == pytest.approx(_loss_after_100(Da(*TOY[0])), rel=1e-12)
    assert found == pytest.approx(1.61, rel=0.05)
    for xi, losses in PAPERS_MERGE.items():
        assert _loss_after_100(Da(*TOY[of], "paper", xi)) == pytest.approx(losses[of], rel=0.05)


def test_with_a_delay_of_a_whole_round_it_is_cocod_sgd() -> None:
    """Unlike optima, +1 and -1: after a merge workers disagree by a / (1 + a), a = 1 - 0.9^4."""

    def worker() -> float:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        optimum = 1.0 - 2.0 * offbeat.rank()
        with offbeat.attach(model, opt, offbeat.DaSGD(4, 4)):
            for _ in range(400):
                opt.zero_grad()
                ((model.weight - optimum) ** 2 / 2).sum().backward()
                opt.step()
            return model.weight.item()

    a = 1 - 0.9**4
    found = offbeat.run(worker, Cluster.uniform(2)).results
    assert found == pytest.approx([a / (1 + a), -a / (1 + a)], abs=1e-12)
    assert found[0] == pytest.approx(0.25590, abs=5e-6)


@pytest.mark.parametrize(("steps", "delay"), TOY)
@pytest.mark.parametrize("xi", [0.0, 0.25, 0.5])
def test_the_papers_merge_pulls_the_mean_back_to_the_launched_one(
    steps: int, delay: int, xi: float
) -> None:
    """mean_new = mean_launched + xi (mean_now - mean_launched)."""
    pulled = offbeat.run(lambda: _toy(Da(steps, delay, "paper", xi), 40), cluster(5)).results
    means = [torch.stack([seen[n] for seen, _ in pulled]).mean(0) for n in range(40)]
    curvature = torch.linspace(0.02, 0.5, 8).double()
    optima = [
        torch.randn(8, generator=torch.Generator().manual_seed(rank)).double() for rank in range(5)
    ]
    optimum = torch.stack(optima).mean(0)
    merges = 0
    for n in range(1, 40):
        now = means[n - 1] - 0.1 * curvature * (means[n - 1] - optimum)  # linear, so of the mean
        if n + 1 > steps and (n + 1) % steps == delay % steps:
            launched = means[n - delay]
            now = launched + xi * (now - launched)
            merges += 1
        torch.testing.assert_close(means[n], now.reshape(1, -1), rtol=0, atol=1e-12)
    assert merges >= 4


def test_deviations_from_the_mean_shrink_by_xi() -> None:
    def by(rank: int, step: int) -> float:
        return float(rank) if step < 2 else 0.0

    [one, other] = offbeat.run(
        lambda: moved(Da(2, delay=1, merge="paper", xi=0.25), 7, by), cluster(2)
    ).results
    assert [b - a for a, b in zip(one, other, strict=True)][:7] == [
        *(1, 2, 2 * 0.25, 2 * 0.25, 2 * 0.25**2, 2 * 0.25**2, 2 * 0.25**3)
    ]


@pytest.mark.parametrize("latency_s", [0.001, 0.05, 0.2, 0.4])
def test_communication_is_hidden_by_the_delay_that_it_takes(latency_s: float) -> None:
    """Of 4 steps; chosen by itself, and no larger than need be."""

    def worker() -> tuple[offbeat.Stats, int]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, Da(4)) as dp:
            for step in range(80):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
            stats, delay = dp.stats(), dp._replica.own["delay"]
        return stats, delay

    run = offbeat.run(worker, cluster(4, latency_s))
    delays = {delay for _, delay in run.results}
    [exact] = delays
    assert exact == (1 if latency_s < 0.1 else 2 if latency_s < 0.3 else 3)
    for stats, _ in run.results:
        assert stats.wait_s < 0.01 * stats.compute_s
        assert stats.rounds >= 18

    waiting = offbeat.run(lambda: train(80, offbeat.LocalSGD(4)), cluster(4, latency_s))
    assert all(stats.wait_s > 0 for _, stats in waiting.results)


def test_noisy_steps_hide_it_too() -> None:
    noisy = Cluster.parse(
        "workers = 4\n[compute]\nstep_s = 1.0\n"
        '[[noise]]\nkind = "lognormal"\nsigma = 0.05\n[network]\nlatency_s = 0.1'
    )
    run = offbeat.run(lambda: train(200, Da(8)), noisy, seed=3)
    for _, stats in run.results:
        assert stats.wait_s - stats.join_wait_s < 0.01 * stats.compute_s


def test_with_a_quorum_nobody_waits_for_the_slow_and_its_moves_come_later() -> None:
    slow = cluster(3, 0.01, (1.0, 1.0, 0.1))

    def waited(quorum: Any) -> tuple[float, Any]:
        results = offbeat.run(
            lambda: train(lambda rank: 4 if rank == 2 else 40, Da(4, 2, quorum=quorum)), slow
        ).results
        return max(stats.wait_s - stats.join_wait_s for _, stats in results[:2]), results

    assert waited("all")[0] > 10
    seconds, results = waited(2)
    assert seconds == 0
    history = results[0][1].history
    assert sum(2 in each.ranks for each in history) == 1
    assert sum(each.ranks == (0, 1) for each in history) >= 9
    for trajectory, stats in results:
        assert same(trajectory[-1], results[0][0][-1])
        assert stats.pending_samples == 0


def test_every_step_of_every_worker_counts_the_same_with_any_quorum() -> None:
    """Three workers whose steps move them by 1, 10 and 100: a third of each, in the end."""
    slow = cluster(3, 0.01, (1.0, 0.8, 0.3))
    for quorum in ("solo", 2, "all"):
        algorithm = Da(2, delay=1, quorum=quorum)
        ends = offbeat.run(
            lambda algorithm=algorithm: moved(algorithm, 8, lambda rank, _: 10.0**rank), slow
        ).results
        assert len({end[-1] for end in ends}) == 1
        if quorum == "all":
            assert ends[0][-1] == pytest.approx(8 * 111 / 3)
        else:  # the last ones have no others to share with
            assert ends[0][-1] >= 8 * 111 / 3 - 1e-9


def test_a_worker_alone_is_plain_training() -> None:
    seen = moved(Da(3, delay=2), 10, lambda _, step: float(step))
    assert seen == [*(float(sum(range(step + 1))) for step in range(10)), 45.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 4},
        {"steps": 4, "delay": 3},
        {"steps": 4, "delay": 2, "quorum": 2},
        {"steps": 4, "delay": 1, "merge": "paper"},
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [10, 11, 12])
def test_a_run_resumes_bit_for_bit(settings: dict[str, Any], half: int) -> None:
    resumes_bit_for_bit(Da(**settings), cluster(3, 0.1, (1.0, 0.9, 0.4)), half)


def test_a_checkpoint_cuts_no_round_short() -> None:
    def worker() -> list[tuple[float, ...]]:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt, Da(4, delay=2)) as dp:
            for step in range(16):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if step == 5:
                    dp.state_dict()
        return [each.samples for each in dp.stats().history]  # type: ignore[misc]

    for samples in offbeat.run(worker, cluster(3)).results:
        assert samples == [12.0] * 4


def test_what_all_agree_on_is_the_same_on_every_worker() -> None:
    agree_on_the_base(Da(4, delay=2), cluster(3, 0.1, (1.0, 0.9, 0.7)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number above 0, got 0"),
        ({"delay": 0}, 'delay must be "auto" or between 1 and the 4 steps of a round, got 0'),
        ({"steps": 3, "delay": 4}, "between 1 and the 3 steps of a round, got 4"),
        ({"delay": "soon"}, "got 'soon'"),
        ({"delay": True}, "got True"),
        ({"xi": False, "merge": "paper"}, "xi must be at least 0 and below 1, got False"),
        ({"xi": 1.0, "merge": "paper"}, r"xi must be at least 0 and below 1, got 1.0"),
        ({"xi": -0.1, "merge": "paper"}, r"xi must be at least 0 and below 1, got -0.1"),
        ({"merge": "mean"}, "merge must be one of 'delta', 'paper', got 'mean'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Da(**settings)


def test_a_quorum_of_more_workers_than_there_are_is_refused() -> None:
    def worker() -> None:
        model = net()
        with offbeat.attach(model, sgd(model), Da(quorum=4)):
            pass

    with pytest.raises(ValueError, match="between 1 and the 3 workers, got 4"):
        offbeat.run(worker, cluster(3))


def _delays(algorithm: offbeat.Algorithm, steps: int = 60) -> list[int]:
    """The delay that a worker has chosen, after every step."""
    model, chosen = net(), []
    opt = sgd(model)
    with offbeat.attach(model, opt, algorithm) as dp:
        for step in range(steps):
            opt.zero_grad()
            loss(model, dp.rank, step).backward()
            opt.step()
            chosen.append(dp._replica.own["delay"])
    return chosen


def test_the_delay_hides_the_exchange_and_not_the_wait_for_a_slow_worker() -> None:
    slow = offbeat.run(lambda: _delays(Da(8)), cluster(4, 0.01, (1.0, 1.0, 1.0, 0.2))).results
    assert [chosen[-1] for chosen in slow] == [1, 1, 1, 1]


def test_behind_a_slow_network_the_delay_is_as_long_as_the_exchange() -> None:
    run = offbeat.run(lambda: _delays(Da(8)), cluster(4, 0.4)).results
    (chosen,) = {chosen[-1] for chosen in run}
    assert 2 <= chosen <= 5


def test_xi_without_the_papers_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="xi is the paper's merge's"):
        Da(xi=0.5)
