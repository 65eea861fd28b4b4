"""Judges, and the crowd that they are shown on: a server and workers, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD

import offbeat
from offbeat.algorithms import ASGD, RennalaSGD, RescaledASGD, RingleaderASGD, RingmasterASGD
from offbeat.asynchronous import Asynchronous
from offbeat.errors import DeadlockError
from offbeat.lab import crowd
from offbeat.lab.crowd import Outcome
from offbeat.rounds import Enough, Judge, Ticket, Verdict

Method = Asynchronous | Judge
OPTIMA = torch.tensor([1.0, -1.0], dtype=torch.float64)


def drawn(seconds: Sequence[float], seed: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """Jobs take up to three times as long, as they are drawn one after the other."""
    table, draw = torch.tensor(seconds), torch.Generator().manual_seed(seed)
    return lambda workers, jobs: table[workers] * (1 + 2 * torch.rand(len(workers), generator=draw))


def towards_own(point: Tensor, worker: int, job: int) -> Tensor:
    """Of (x - c)^2 / 2, c each worker's own."""
    return point - OPTIMA[worker]


def noisy(point: Tensor, worker: int, job: int) -> Tensor:
    """Of x^2 / 2 with noise that is the job's own."""
    draw = torch.Generator().manual_seed(1_000_003 * worker + job)
    return point + torch.randn(len(point), generator=draw, dtype=point.dtype)


def ran(
    method: Method,
    seconds: Sequence[float] | Callable[[Tensor, Tensor], Tensor],
    *,
    gradient: crowd.Gradient = noisy,
    workers: int | None = None,
    lr: float = 0.01,
    start: float = 4.0,
    momentum: float = 0.0,
    **options: object,
) -> Outcome:
    return crowd.run(
        method,
        torch.tensor([start], dtype=torch.float64),
        gradient,
        lambda x: SGD(x, lr=lr, momentum=momentum),
        workers=len(seconds) if workers is None else workers,  # type: ignore[arg-type]
        seconds=seconds,
        **options,  # type: ignore[arg-type]
    )


class Counted:
    """Who has given how many gradients that count, in each update."""

    def __init__(self) -> None:
        self.given: list[dict[int, int]] = [{}]
        self.delays: list[int] = []

    def __call__(self, judge: Judge, gradient: Tensor, ticket: Ticket, verdict: Verdict) -> None:
        self.given[-1][ticket.worker] = self.given[-1].get(ticket.worker, 0) + 1
        self.delays.append(judge.version - verdict.update - ticket.version)
        if verdict.update:
            self.given.append({})


# --- by hand -------------------------------------------------------------------------------


def test_rennala_takes_what_comes_first_whosever_it_is() -> None:
    counted = Counted()
    found = ran(RennalaSGD(6), [1.0, 2.0, 4.0], updates=2, moments=True, watch=counted)
    assert found.moments_s == [4.0, 8.0]
    assert counted.given[:2] == [{0: 4, 1: 2}, {0: 4, 1: 2}]  # ties by rank: worker 2 is too late
    assert found.largest_delay == 0
    assert found.dropped == 0
    assert found.stopped == 2 * 2  # whoever brings the last one stops the two others


def test_rennala_without_stops_drops_what_is_old() -> None:
    found = ran(RennalaSGD(6, stop=False), [1.0, 2.0, 4.0], until_s=8.0)
    assert found.updates == 2
    assert found.dropped == 2  # worker 2's at 4 and 8 s: of the versions before
    assert found.stopped == 0


def test_ringleader_counts_every_worker_the_same() -> None:
    found = ran(
        RingleaderASGD(),
        [1.0, 2.5],
        gradient=towards_own,
        lr=0.25,
        updates=4,
        moments=True,
        at_s=[2.75, 4.0, 5.5],
        value=Tensor.item,
    )
    assert found.moments_s == [2.5, 3.0, 5.0, 6.0]
    assert [seen.value for seen in found.curve] == [3.0, 2.0, 1.375]
    assert found.point.item() == 0.75
    assert found.dropped == found.stopped == 0
    long = ran(RingleaderASGD(), [1.0, 2.5], gradient=towards_own, lr=0.25, updates=200)
    assert abs(long.point.item()) < 1e-6


@pytest.mark.parametrize("workers", [3, 5, 8])
def test_ringleaders_delay_is_at_most_twice_the_workers_less_two(workers: int) -> None:
    seconds = [1.0 + 0.37 * each for each in range(workers)]
    found = ran(RingleaderASGD(), drawn(seconds), workers=workers, updates=40 * workers)
    assert found.largest_delay == 2 * workers - 2
    assert found.updates == 40 * workers


def test_speeds_of_two_to_one_bias_asgd_and_not_rescaled_asgd() -> None:
    def settled(method: Asynchronous) -> float:
        return ran(
            method, [1.0, 2.0], gradient=towards_own, lr=2e-3, start=0.0, updates=6_000
        ).point.item()

    assert settled(ASGD()) == pytest.approx(1 / 3, abs=2e-3)
    assert settled(RescaledASGD()) == pytest.approx(0.0, abs=2e-3)


def test_rescaled_asgd_is_asgd_for_equal_speeds() -> None:
    plain, rescaled = (
        ran(method, [1.0, 1.0, 1.0], updates=50) for method in (ASGD(), RescaledASGD())
    )
    assert torch.equal(plain.point, rescaled.point)


def test_a_late_gradient_counts_less_where_asgd_adapts() -> None:
    scales: list[float] = []
    ran(
        ASGD(delay_adaptive=True),
        [1.0, 5.5],
        updates=6,
        watch=lambda judge, gradient, ticket, verdict: scales.append(verdict.scale),
    )
    assert scales == [1.0, 1.0, 1.0, 1.0, 1.0, 2 / 5]  # worker 1 comes after five updates


# --- what Ringmaster ASGD promises ---------------------------------------------------------


@pytest.mark.parametrize("stop", ["never", "expired", "longer"])
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_no_delay_reaches_the_limit(limit: int, stop: str) -> None:
    seconds = [1.0 + 0.5 * each for each in range(12)]
    method = RingmasterASGD(limit, stop)  # type: ignore[arg-type]
    counted = Counted()
    found = ran(method, drawn(seconds), workers=12, updates=300, watch=counted)
    assert max(counted.delays) == found.largest_delay == limit - 1
    if stop == "expired":
        assert found.dropped == 0
        assert found.gradients == found.updates
    else:
        assert found.dropped > 0


def test_without_a_limit_ringmaster_is_asgd() -> None:
    seconds = [1.0 + 0.3 * each for each in range(9)]
    ours, theirs = (
        ran(method, drawn(seconds), workers=9, updates=200, moments=True)
        for method in (RingmasterASGD(math.inf, "expired"), ASGD())
    )
    assert torch.equal(ours.point, theirs.point)
    assert ours.moments_s == theirs.moments_s
    assert ours.stopped == 0


@pytest.mark.parametrize(
    "method",
    [
        ASGD(),
        ASGD(delay_adaptive=True),
        RingmasterASGD(1, "expired"),
        RingmasterASGD(5),
        RennalaSGD(1),
        RingleaderASGD(),
        RescaledASGD(),
    ],
    ids=repr,
)
def test_one_worker_is_plain_sgd(method: Asynchronous) -> None:
    point = torch.tensor([4.0], dtype=torch.float64)
    optimizer = SGD([point], lr=0.01, momentum=0.9)
    for step in range(50):
        point.grad = noisy(point, 0, step)
        optimizer.step()
    found = ran(method, [0.5], momentum=0.9, updates=50)
    assert torch.equal(found.point, point)
    assert found.seconds == 25.0
    assert found.dropped == 0


def test_a_limit_of_one_with_stops_is_m_synchronous_with_m_one() -> None:
    seconds = [1.0 + 0.5 * each for each in range(6)]
    first = Enough(6, gradients=1, workers=1)
    ours, theirs = (
        ran(method, drawn(seconds), workers=6, updates=100, moments=True)
        for method in (RingmasterASGD(1, "expired"), first)
    )
    assert torch.equal(ours.point, theirs.point)
    assert ours.moments_s == theirs.moments_s
    assert ours.stopped == theirs.stopped == 500


PROFILES: dict[str, Callable[[int], float]] = {
    "1": lambda i: 1.0,
    "sqrt(i)": lambda i: math.sqrt(i),
    "i": lambda i: float(i),
    "i^2": lambda i: float(i * i),
}


def most_seconds(seconds: Sequence[float], limit: int) -> float:
    """t(R): what R updates in a row take at most, of workers from the fastest on."""
    speed, best = 0.0, math.inf
    for m, each in enumerate(seconds, start=1):
        speed += 1 / each
        best = min(best, (m + limit) / speed)
    return 2 * best


@pytest.mark.parametrize("limit", [1, 10, 50, 100])
@pytest.mark.parametrize("profile", PROFILES)
def test_as_many_updates_as_the_limit_take_at_most_their_bound(profile: str, limit: int) -> None:
    seconds = [PROFILES[profile](i) for i in range(1, 101)]
    _assert_in_time(seconds, limit)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 50.0), min_size=1, max_size=30).map(sorted),
    st.integers(min_value=1, max_value=40),
)
def test_that_bound_holds_for_any_speeds(seconds: list[float], limit: int) -> None:
    _assert_in_time(seconds, limit)


def _assert_in_time(seconds: list[float], limit: int) -> None:
    method = RingmasterASGD(limit, "expired")
    found = ran(method, seconds, gradient=lambda x, *_: x, updates=6 * limit, moments=True)
    moments = [0.0, *found.moments_s]
    longest = max(later - early for early, later in zip(moments, moments[limit:], strict=False))
    assert longest <= most_seconds(seconds, limit) * (1 + 1e-9)


# --- who is stopped ------------------------------------------------------------------------


def test_who_may_choose_goes_on_if_little_is_left() -> None:
    # The second worker's job is one of 10 s, but for its first, of 100. After 3 updates it may
    # choose: 97 s are left then, where a new job would take 10.
    def seconds(workers: Tensor, jobs: Tensor) -> Tensor:
        return torch.where(workers == 0, 1.0, torch.where(jobs == 0, 100.0, 10.0))

    limited = RingmasterASGD(3, "longer")
    found = ran(limited, seconds, workers=2, expected_s=[1.0, 10.0], until_s=13.5)
    assert found.stopped == 1
    # Of the new one, 7 s or less are left whenever it is asked: it goes on, to be dropped at 13 s.
    assert found.dropped == 1
    assert found.updates == 13
    assert found.models == 13 + 1 + 1
    everybody = ran(RingmasterASGD(3, "expired"), seconds, workers=2, until_s=13.5)
    assert everybody.stopped == 4  # after 3, 6, 9 and 12 updates
    unknown = ran(limited, seconds, workers=2, until_s=13.5)
    assert unknown.stopped == 0  # nothing is known of worker 1: it has finished nothing


def test_who_has_given_waits_for_the_next_version_where_once_is_asked() -> None:
    counted = Counted()
    judge = Enough(3, gradients=2, workers=2, once=True)
    found = ran(judge, [1.0, 3.0, 7.0], updates=3, moments=True, watch=counted)
    assert found.moments_s == [3.0, 6.0, 9.0]
    assert counted.given[:3] == [{0: 1, 1: 1}] * 3
    topped_up = Counted()
    judge = Enough(3, gradients=2, workers=2)
    ran(judge, [1.0, 3.0, 7.0], updates=3, watch=topped_up)
    assert topped_up.given[:3] == [{0: 3, 1: 1}] * 3


def test_without_stops_those_who_wait_go_on_and_the_late_are_dropped() -> None:
    judge = Enough(3, gradients=2, workers=2, once=True, stops=False)
    found = ran(judge, [1.0, 3.0, 7.0], until_s=14.5, moments=True)
    # Worker 2 comes at 7 s with what it began at 0, and at 14 s with what it began at 7.
    assert found.moments_s == [3.0, 6.0, 9.0, 12.0]
    assert found.dropped == 2
    assert found.stopped == 0


# --- what a server costs -------------------------------------------------------------------

CLUSTER = """
workers = 3
speed = [1.0, 0.5, 0.25]
[compute]
step_s = 1.0
[network]
latency_s = 0.25
bandwidth_bytes_per_s = 16.0
"""


def test_messages_to_and_from_the_server_take_their_time() -> None:
    # A model and a gradient are 8 bytes: 0.75 s a message. Worker 0 is where the server is.
    found = crowd.run(
        ASGD(),
        torch.zeros(1, dtype=torch.float64),
        noisy,
        lambda x: SGD(x, lr=0.1),
        seconds=offbeat.Cluster.parse(CLUSTER),
        until_s=6.5,
        moments=True,
    )
    # All have the parameters; a word to begin takes 0.25 s.
    # Worker 1: 0.25 + 2 + 0.75 = 3 s, then 0.75 down + 2 + 0.75 = 6.5 s. Worker 2: 0.25 + 4 + 0.75.
    assert found.moments_s == [1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 5.0, 6.0, 6.5]
    assert found.models == found.gradients == 9
    assert found.sent_bytes == 8 * 18


def test_models_to_several_leave_the_server_one_after_the_other() -> None:
    text = CLUSTER.replace("[1.0, 0.5, 0.25]", "[1.0, 1.0, 1.0]")
    judge = Enough(3, gradients=1)
    found = crowd.run(
        judge,
        torch.zeros(1, dtype=torch.float64),
        noisy,
        lambda x: SGD(x, lr=0.1),
        seconds=offbeat.Cluster.parse(text.replace("latency_s = 0.25", "latency_s = 0.0")),
        updates=3,
        moments=True,
    )
    # Worker 0 is always first: its own messages are free, the others' gradients take 0.5 s more.
    assert found.moments_s == [1.0, 2.0, 3.0]
    assert found.stopped == 6
    assert found.models == 9


def test_a_worker_that_has_crashed_brings_nothing() -> None:
    text = CLUSTER + '[[event]]\nkind = "crash"\nworker = 0\nat_s = 2.5\n'
    cluster = offbeat.Cluster.parse(text.split("[network]")[0] + text.split("16.0")[1])
    assert ran_on(cluster, until_s=9.0).updates == 2 + 4 + 2
    with pytest.raises(DeadlockError, match="nobody computes, after 0 updates"):
        ran_on(offbeat.Cluster.parse(DOOMED), updates=5)


DOOMED = """
workers = 1
[compute]
step_s = 1.0
[[event]]
kind = "crash"
worker = 0
at_s = 0.5
"""


def ran_on(cluster: offbeat.Cluster, **options: object) -> Outcome:
    return crowd.run(
        ASGD(),
        torch.zeros(1, dtype=torch.float64),
        noisy,
        lambda x: SGD(x, lr=0.1),
        seconds=cluster,
        **options,  # type: ignore[arg-type]
    )


def test_a_crowd_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="give until_s, updates or done"):
        ran(ASGD(), [1.0])
    with pytest.raises(ValueError, match="the judge is for 3 workers, but there are 2"):
        ran(Enough(3), [1.0, 1.0], updates=1)
    with pytest.raises(ValueError, match="seconds are of 3 workers, but there are 2"):
        ran(ASGD(), [1.0, 1.0, 1.0], workers=2, updates=1)


# --- what is computed ----------------------------------------------------------------------


def test_a_gradient_is_computed_when_its_job_ends_at_what_it_began_with() -> None:
    asked: list[tuple[int, int, float]] = []

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        asked.append((worker, job, point.item()))
        return torch.ones_like(point)

    ran(ASGD(), [1.0, 2.5], gradient=gradient, lr=1.0, start=0.0, updates=5)
    assert asked == [(0, 0, 0.0), (0, 1, -1.0), (1, 0, 0.0), (0, 2, -2.0), (0, 3, -4.0)]


def test_a_job_that_is_stopped_is_never_computed() -> None:
    computed = 0

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        nonlocal computed
        computed += 1
        return point

    seconds = [1.0 + each for each in range(50)]
    found = ran(RingmasterASGD(2, "expired"), seconds, gradient=gradient, updates=40)
    assert found.stopped > 500
    assert computed == 40


def test_parameters_that_nobody_computes_at_are_let_go_of() -> None:
    import weakref

    seen: list[weakref.ref[Tensor]] = []

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        seen.append(weakref.ref(point))
        return point.clone()

    alive: list[int] = []
    ran(
        RingmasterASGD(4, "expired"),
        [1.0, 1.5, 40.0],
        gradient=gradient,
        updates=100,
        done=lambda _: alive.append(len({id(r()) for r in seen if r() is not None})) or False,  # type: ignore[func-returns-value]
    )
    assert max(alive) <= 4


def test_a_torch_model_trains_in_a_crowd_as_by_hand() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 3)
    by_hand = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    by_hand.load_state_dict(model.state_dict())
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        by_hand(x).square().mean().backward()
        optimizer.step()

    def loss(model: torch.nn.Module, worker: int, job: int) -> Tensor:
        found: Tensor = model(x).square().mean()
        return found

    start, gradient = crowd.of_model(model, loss)
    found = crowd.run(
        ASGD(),
        start,
        gradient,
        lambda x: SGD(x, lr=0.1),
        workers=1,
        seconds=[1.0],
        updates=10,
    )
    expected = torch.cat([each.detach().flatten() for each in by_hand.parameters()])
    assert torch.equal(found.point, expected)
