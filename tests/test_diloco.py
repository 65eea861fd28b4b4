"""DiLoCo and its outer optimizer: by hand, and in virtual time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from nets import agree_on_the_base, close, net, plain, same, sgd, train
from test_abs import resumes_bit_for_bit
from test_dasgd import cluster, moved
from torch import Tensor, nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.merges import Outer, Shift
from offbeat.records import Line
from offbeat.rounds import Flats, Layout, Round

Di = offbeat.DiLoCo


# --- the merge, by hand ----------------------------------------------------------------------


def _of(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _round(
    number: int, layout: Layout, *moves: Tensor, bad: tuple[int, int] | None = None
) -> Round:
    """What one worker has brought, or a sum of one."""
    flats = Flats(layout)
    for view, move in zip(flats.views, moves, strict=True):
        view.copy_(move)
    return Round(number, flats, (1.0,), 1.0, (True,) * len(moves), bad=bad)


def _number(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=torch.float64))


def test_the_outer_optimizer_is_nesterovs_in_the_papers_form() -> None:
    """A pseudo-gradient of 0.1, always; lr 0.7, momentum 0.9, from 1."""
    weight = _number(1.0)
    layout = Layout(["weight"], [weight])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    buffers, anchors = [], []
    for number in range(4):
        outer.begin(_round(number, layout, _of(-0.1)))
        buffers.append(-outer._buffer.views[0].item())
        anchors.append(weight.item())
    assert buffers == pytest.approx([0.1, 0.19, 0.271, 0.3439], abs=1e-12)
    assert anchors == pytest.approx([0.867, 0.6773, 0.43657, 0.149913], abs=1e-12)


def test_it_is_torchs_own_sgd_with_nesterov() -> None:
    torch.manual_seed(0)
    mine, other = (nn.Parameter(torch.ones(7).double()) for _ in range(2))
    layout = Layout(["weight"], [mine])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    theirs = torch.optim.SGD([other], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(20):
        move = torch.randn(7).double()
        outer.begin(_round(number, layout, move))
        other.grad = -move
        theirs.step()
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_what_was_moved_since_the_launch_stays() -> None:
    """Anchor 1, launched at 0.6, merged at 0.5: the anchor is at 0.468 then, the worker 0.1 on."""
    weight = _number(1.0)
    layout = Layout(["weight"], [weight])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    outer.moves()
    weight.data.fill_(0.6)
    launched = Flats(layout)
    list(outer.give(0, launched, 1.0, waits=False))
    outer.moves()
    weight.data.fill_(0.5)
    outer.begin(Round(0, launched, (1.0,), 1.0, (True,)))
    assert outer.agreed()[0].item() == pytest.approx(0.468, abs=1e-12)
    assert weight.item() == pytest.approx(0.368, abs=1e-12)


def test_who_gave_nothing_follows_the_base() -> None:
    weight = _number(1.0)
    layout = Layout(["weight"], [weight])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    outer.moves()
    weight.data.fill_(0.75)
    outer.begin(_round(0, layout, _of(-0.1)))
    assert weight.item() == pytest.approx(0.75 - 0.133, abs=1e-12)


def test_a_round_that_is_not_finite_leaves_the_momentum_alone() -> None:
    weight = _number(1.0)
    layout = Layout(["weight"], [weight])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    outer.begin(_round(0, layout, _of(-0.1)))
    outer.skip(_round(1, layout, _of(float("nan")), bad=(0, 0)))
    outer.begin(_round(2, layout, _of(-0.1)))
    assert weight.item() == pytest.approx(0.6773, abs=1e-12)


def test_running_statistics_have_no_momentum() -> None:
    weight, variance = _number(1.0), torch.tensor([1.0], dtype=torch.float64)
    layout = Layout(["weight", "variance"], [weight, variance])
    outer = Outer(layout, alone=False, lr=0.7, momentum=0.9)
    move = _of(-0.3)
    for number in range(3):
        outer.begin(_round(number, layout, move, move))
    assert variance.item() == pytest.approx(0.1, abs=1e-12)
    assert weight.item() < -0.5


def test_with_rate_1_and_no_momentum_it_is_a_shift_to_the_bit() -> None:
    torch.manual_seed(0)
    ends = []
    for merge in (Shift, partial(Outer, lr=1.0, momentum=0.0)):
        generator = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.ones(9))
        layout = Layout(["weight"], [weight])
        made = merge(layout, alone=False)  # type: ignore[call-arg]
        for number in range(6):
            made.begin(_round(number, layout, torch.randn(9, generator=generator)))
        ends.append(weight.detach())
    assert torch.equal(*ends)


# --- the method --------------------------------------------------------------------------------


def test_the_model_goes_where_the_paper_says() -> None:
    """Two workers that move by -0.05 and -0.15 in two steps."""
    run = offbeat.run(
        lambda: moved(Di(2), 8, lambda rank, _: -0.025 - 0.05 * rank), Cluster.uniform(2)
    )
    for seen in run.results:
        assert seen[1::2] == pytest.approx([-0.133, -0.3227, -0.56343, -0.850087], abs=1e-12)


@pytest.mark.parametrize("settings", [{}, {"overlap": 1}, {"quorum": 3}, {"quorum": 2}], ids=str)
def test_with_rate_1_and_no_momentum_it_is_local_sgd(settings: dict[str, Any]) -> None:
    """Launched and merged alike; the steps of an overlap stay in."""

    def ends(algorithm: offbeat.Algorithm) -> list[list[Tensor]]:
        return [
            trajectory[-1]
            for trajectory, _ in offbeat.run(lambda: train(8, algorithm), cluster(3)).results
        ]

    plainly = offbeat.LocalSGD(4)
    if settings.get("overlap"):
        plainly = offbeat.DaSGD(4, delay=1)  # type: ignore[assignment]
    mine, theirs = ends(Di(4, lr=1.0, momentum=0.0, **settings)), ends(plainly)
    assert all(close(one, other) for one, other in zip(mine, theirs, strict=True))


def test_alone_without_momentum_it_is_plain_training_to_the_bit() -> None:
    trajectory, _ = train(9, Di(3, lr=1.0, momentum=0.0))
    assert all(same(mine, other) for mine, other in zip(trajectory, plain(1, 9), strict=True))


def test_alone_with_momentum_it_looks_ahead() -> None:
    seen = moved(Di(1), 3, lambda *_: -0.1)
    assert seen[:3] == pytest.approx([-0.133, -0.3227, -0.56343], abs=1e-12)


def test_any_inner_optimizer_will_do() -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    for algorithm in (Di(4), Di(4, overlap=2), offbeat.LocalSGD(4, "speed"), offbeat.DaSGD(4)):
        run = offbeat.run(
            lambda algorithm=algorithm: train(12, algorithm, adam), cluster(3, 0.1, (1, 0.8, 0.5))
        )
        for trajectory, stats in run.results:
            assert same(trajectory[-1], run.results[0][0][-1])
            assert stats.pending_samples == 0


def test_an_overlap_hides_the_network() -> None:
    def waited(overlap: int) -> float:
        run = offbeat.run(lambda: train(40, Di(10, overlap=overlap)), cluster(4, 0.2))
        return max(stats.wait_s - stats.join_wait_s for _, stats in run.results)

    assert waited(0) > 1
    assert waited(3) == 0


def _starts(grace_s: float) -> list[tuple[int, ...]]:
    """Who is in each merge; workers of 1, 1.1 and 2 s a step, and a quorum of one."""
    algorithm = Di(2, quorum="solo", grace_s=grace_s)
    run = offbeat.run(lambda: train(6, algorithm), cluster(3, 0.0, (1.0, 1 / 1.1, 0.5)))
    history: list[offbeat.Round] = run.results[0][1].history
    return [each.ranks for each in history]


def test_a_grace_lets_those_in_that_come_a_little_later() -> None:
    assert _starts(0.0)[:3] == [(0,), (1,), (0, 2)]
    assert _starts(0.5)[:2] == [(0, 1), (0, 2)]


def test_a_grace_ends_when_everybody_is_there() -> None:
    def worker() -> float:
        train(4, Di(2, quorum=2, grace_s=50.0))
        return 0.0

    assert offbeat.run(worker, cluster(3, 0.0)).seconds == 4.0


def test_nobody_waits_for_the_slow_with_a_quorum() -> None:
    slow = cluster(3, 0.01, (1.0, 1.0, 0.1))
    run = offbeat.run(
        lambda: train(lambda rank: 4 if rank == 2 else 40, Di(4, overlap=2, quorum=2)), slow
    )
    for trajectory, stats in run.results:
        assert same(trajectory[-1], run.results[0][0][-1])
        assert stats.pending_samples == 0
    for _, stats in run.results[:2]:
        assert stats.wait_s - stats.join_wait_s == 0


# --- fragments -----------------------------------------------------------------------------------


def _four(algorithm: offbeat.Algorithm, steps: int, by: float = -0.1) -> list[list[float]]:
    """Four numbers, a bucket each, that every step moves alike; where they are after every step."""
    model = nn.ParameterList(_number(0.0) for _ in range(4))
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with offbeat.attach(model, opt, algorithm, bucket_bytes=1) as dp:
        for _ in range(steps):
            opt.zero_grad()
            sum(-by * (1 + offbeat.rank()) * each for each in model).backward()  # type: ignore[union-attr]
            opt.step()
            with dp.agreed():
                seen.append([each.item() for each in model])
    return [*seen, [each.item() for each in model]]


def test_fragments_are_merged_in_turn() -> None:
    """Two workers move by 1 and 2 a step; of four numbers two are merged after every second."""
    algorithm = Di(4, lr=1.0, momentum=0.0, fragments=2)
    for seen in offbeat.run(lambda: _four(algorithm, 8, 1.0), Cluster.uniform(2)).results:
        last_first = [each[::-1] for each in seen]  # buckets begin with the last parameter
        assert last_first[:8] == [
            *([0, 0, 0, 0], [3, 3, 0, 0], [3, 3, 0, 0], [3, 3, 6, 6]),
            *([3, 3, 6, 6], [9, 9, 6, 6], [9, 9, 6, 6], [9, 9, 12, 12]),
        ]
        assert last_first[8] == [12, 12, 12, 12]  # the last round is whole


def test_each_fragment_has_a_momentum_of_its_own() -> None:
    algorithm = Di(2, fragments=2)
    for seen in offbeat.run(lambda: _four(algorithm, 8, -0.05), Cluster.uniform(1)).results:
        whole = [each[0] for each in seen[1:8:2]]
        assert whole == pytest.approx([-0.133, -0.3227, -0.56343, -0.850087], abs=1e-12)


def test_a_round_carries_the_bytes_of_a_fragment() -> None:
    """On a network of so many bytes a second, a merge of half the model takes half the time."""

    def worker(fragments: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
        opt = torch.optim.SGD(model.parameters(), lr=1e-9)
        algorithm = Di(8, fragments=fragments, overlap=1)
        with offbeat.attach(model, opt, algorithm, bucket_bytes=40_000):
            for _ in range(32):
                opt.zero_grad()
                model(torch.ones(1, 100)).sum().backward()
                opt.step()

    def took(fragments: int) -> float:
        lines: list[Line] = []
        cluster = Cluster.parse(
            "workers = 2\n[compute]\nstep_s = 1.0\n"
            "[network]\nlatency_s = 0.0\nbandwidth_bytes_per_s = 1e6"
        )
        offbeat.run(partial(worker, fragments), cluster, records=lines.append)
        rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
        assert len(rounds) >= 4 * fragments
        return float(rounds[1]["to_s"] - rounds[1]["from_s"])

    whole = took(1)
    assert took(2) == pytest.approx(whole / 2, rel=0.01)
    assert took(4) == pytest.approx(whole / 4, rel=0.02)


def test_more_fragments_than_buckets_are_refused() -> None:
    def worker() -> None:
        model = net()
        with offbeat.attach(model, sgd(model), Di(8, fragments=4)):
            pass

    with pytest.raises(ValueError, match=r"between 1 and the 1 buckets .* got 4: .*bucket_bytes"):
        offbeat.run(worker, Cluster.uniform(2))


# --- in virtual time -----------------------------------------------------------------------------


TWO_TO_ONE = Cluster.parse("workers = 2\nspeed = [2.0, 1.0]\n[compute]\nstep_s = 1.0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        Di(4, lr=0.7, momentum=0.5, overlap=2, quorum="solo"),
        Di(4, lr=0.7, momentum=0.5, quorum=1, grace_s=0.5),
        offbeat.DaSGD(4, quorum="solo"),
        offbeat.LocalSGD(3, shares="speed"),
    ],
    ids=str,
)
def test_every_sample_counts_the_same_whoever_is_fast(algorithm: offbeat.Algorithm) -> None:
    """Speeds 2:1, optima 1 and -1: the fast one has two thirds of the samples."""

    def worker() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=0.002)
        optimum = -1.0 if offbeat.rank() else 1.0
        with offbeat.attach(model, opt, algorithm) as dp:
            while dp.seconds < 2500:
                opt.zero_grad()
                (0.5 * (model.weight - optimum).square()).sum().backward()
                opt.step()
            with dp.agreed():
                return model.weight.item()

    for weight in offbeat.run(worker, TWO_TO_ONE).results:
        assert weight == pytest.approx(1 / 3, abs=0.02)


def test_shares_by_speed_bring_all_to_the_average_together() -> None:
    def waited(shares: Any) -> list[float]:
        algorithm = offbeat.LocalSGD(4, shares=shares)
        run = offbeat.run(
            lambda: train(lambda rank: (56, 28, 14)[rank], algorithm),
            cluster(3, 0.0, (1.0, 0.5, 0.25)),
        )
        return [stats.wait_s - stats.join_wait_s for _, stats in run.results]

    assert max(waited("equal")) > 50
    assert max(waited("speed")) < 15  # the first round, and whole numbers


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 4},
        {"steps": 4, "overlap": 2},
        {"steps": 4, "overlap": 1, "quorum": 2, "grace_s": 0.3},
        {"steps": 4, "fragments": 2, "overlap": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [10, 12])
def test_a_run_resumes_bit_for_bit(settings: dict[str, Any], half: int) -> None:
    resumes_bit_for_bit(Di(**settings), cluster(3, 0.1, (1.0, 0.9, 0.4)), half, bucket_bytes=64)


def test_local_sgd_with_shares_resumes_bit_for_bit() -> None:
    resumes_bit_for_bit(offbeat.LocalSGD(4, "speed"), cluster(3, 0.1, (1.0, 0.9, 0.4)))


def test_what_all_agree_on_is_the_anchor() -> None:
    agree_on_the_base(Di(4, overlap=3), cluster(3, 0.1, (1.0, 0.9, 0.7)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number above 0, got 0"),
        ({"lr": 0.0}, r"the outer lr must be above 0, got 0.0"),
        ({"lr": -0.7}, r"the outer lr must be above 0, got -0.7"),
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1}, r"momentum must be at least 0 and below 1, got -0.1"),
        ({"steps": 10, "fragments": 3}, "fragments must divide the 10 steps of a round, got 3"),
        ({"steps": 4, "fragments": 8}, "fragments must divide the 4 steps of a round, got 8"),
        ({"steps": 4, "overlap": 5}, "overlap must be between 0 and 4, .* got 5"),
        ({"steps": 4, "fragments": 2, "overlap": 3}, "overlap must be between 0 and 2, .* got 3"),
        ({"lr": True}, r"the outer lr must be above 0, got True"),
        ({"overlap": True}, "overlap must be between 0 and 100, .* got True"),
        ({"overlap": -1}, "overlap must be between 0 and 100, .* got -1"),
        ({"grace_s": 1.0}, 'grace_s is for a quorum below "all", got 1.0'),
        ({"quorum": 2, "grace_s": -1.0}, "grace_s must be 0 or more seconds, got -1.0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Di(**settings)
