"""Codecs: what their codes stand for, how far off they are, and that they are right on average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat import GlobalQSGD, Half, Int4, Int8
from offbeat.clusters import Cluster
from offbeat.codecs import Codec, Coder
from offbeat.codecs.auto import Auto
from offbeat.worlds import enter_world

ALL: dict[str, Codec] = {
    "bfloat16": Half(),
    "float16": Half("float16"),
    "int8": Int8(),
    "int8-long-blocks": Int8(block=4096),
    "int4": Int4(),
    "int4-forgets": Int4(error_feedback=False),
    "standard": GlobalQSGD(),
    "standard-4": GlobalQSGD(bits=4),
    "standard-16": GlobalQSGD(bits=16),
    "foretold": GlobalQSGD(margin=1.5),
    "exponential": GlobalQSGD("exponential"),
    "exponential-4": GlobalQSGD("exponential", bits=4),
}
BYTES_A_NUMBER = {"bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5, "standard": 1}


def cluster(workers: int, network: str = "") -> Cluster:
    return Cluster.parse(f"workers = {workers}\n[compute]\nstep_s = 1.0\n{network}")


def summed(codec: Codec, given: Sequence[Tensor], rounds: int = 1) -> list[list[Tensor]]:
    """What every worker has after every round, of so many virtual ones that give these."""

    def worker() -> list[Tensor]:
        world = enter_world()
        coder, channel = codec.coder(world.size, world.rank), world.channel("sums")
        return [_sum(coder, channel, given[world.rank]) for _ in range(rounds)]

    return offbeat.run(worker, cluster(len(given))).results


def _sum(coder: Coder, channel: Any, given: Tensor) -> Tensor:
    tensor = given.clone()
    for each in coder.sums(channel, tensor, 0, True, None):
        for work in each:
            work.wait()
    coder.ended(channel, 0.0)
    return tensor


def gaussian(workers: int, numbers: int, seed: int = 0) -> Tensor:
    return torch.randn(workers, numbers, generator=torch.Generator().manual_seed(seed))


def nmse(codec: Codec, given: Tensor) -> float:
    """The squared error of the mean over its squared norm."""
    (got,) = summed(codec, list(given))[0]
    exact = given.double().sum(0)
    return float((got - exact).square().sum() / exact.square().sum())


# --- values ------------------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    given = torch.tensor([[1.27, -0.64, 0.012, 0.0], [0.0, 2.54, -0.013, 0.004]])
    for (got,) in summed(Int8(block=16), list(given)):
        # codes 127, -64, 1, 0 of .01 and 0, 127, -1, 0 of .02; of the sum 85, 127, -1, 0 of .01496
        assert got.tolist() == pytest.approx([1.271654, 1.9, -0.014961, 0.0], abs=2e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("workers", [2, 5])
def test_everyone_has_the_same_bits_near_the_sum(name: str, workers: int) -> None:
    bounds = {"bfloat16": 1e-4, "float16": 1e-6, "int8": 5e-4, "int8-long-blocks": 1e-3}
    bounds |= {"standard-16": 1e-6, "standard": 0.02, "int4": 0.1, "int4-forgets": 0.1}
    for numbers in (1, 7, 1000, 70_000):
        given = gaussian(workers, numbers)
        results = [each[0] for each in summed(ALL[name], list(given))]
        assert all(torch.equal(each, results[0]) for each in results)
        exact = given.sum(0)
        error = float((results[0] - exact).square().sum() / exact.square().sum())
        if numbers >= 1000:
            assert error < bounds.get(name, 2.0), (numbers, error)


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name: str) -> None:
    for (got,) in summed(ALL[name], [torch.zeros(100)] * 3):
        assert not got.any()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_no_later_round(name: str, bad: float) -> None:
    """What the round holds is of no matter: its header says that it is bad."""
    given = gaussian(2, 600)
    spoilt = given.clone()
    spoilt[1, 3] = bad

    def worker() -> Tensor:
        world = enter_world()
        coder, channel = ALL[name].coder(2, world.rank), world.channel("sums")
        _sum(coder, channel, spoilt[world.rank])
        return _sum(coder, channel, given[world.rank])

    for got in offbeat.run(worker, cluster(2)).results:
        assert got.isfinite().all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_scale_and_float64_are_taken(name: str, dtype: torch.dtype) -> None:
    given = gaussian(3, 500).to(dtype)
    (unit,) = summed(ALL[name], list(given))[0]
    assert unit.dtype == dtype
    for scale in (2.0**-70, 2.0**70):
        (got,) = summed(ALL[name], list(scale * given))[0]
        assert torch.equal(got / scale, unit)


@pytest.mark.parametrize(("name", "most"), BYTES_A_NUMBER.items())
def test_the_wire_carries_as_few_bytes_as_said(name: str, most: float) -> None:
    """On a network where a byte takes a second, and nothing else does."""
    given = gaussian(4, 2**16)

    def worker() -> float:
        world = enter_world()
        _sum(ALL[name].coder(4, world.rank), world.channel("sums"), given[world.rank])
        return world.now()

    network = "[network]\nbandwidth_bytes_per_s = 1.0\nall_reduce = 'ring'"
    seconds = offbeat.run(worker, cluster(4, network)).results[0]
    per_number = seconds / (2 * 3 / 4 * 2**16)
    assert most <= per_number < 1.07 * most


# --- errors ------------------------------------------------------------------------------------


def expected_nmse(workers: int, given: Tensor) -> float:
    """Of standard dithering: (M/s)^2 f (1 - f) of every number, where f is its share of a level."""
    level = given.abs().max().double() / (127 / workers)
    part = given.double().div(level).frac_().abs_()
    error = (part * (1 - part)).sum() * level.square()
    return float(error / given.double().sum(0).square().sum())


@pytest.mark.parametrize(
    ("workers", "standard", "exponential"), [(4, 0.0035, 0.25), (16, 0.062, 0.42), (64, 1.25, 0.62)]
)
def test_errors_are_those_of_the_theory_and_int8_has_none_of_them(
    workers: int, standard: float, exponential: float
) -> None:
    """Of 32,768 Gaussian numbers a worker.

    The standard kind's error grows with the square of the largest number of all, or, with a level
    or two, with that number: it is 4.8 to 5.6 for 64 workers, in 9 draws of 10. So the error is
    0.96 to 1.25, and larger for longer tensors. A published 1.25 is one such draw.
    """
    given = gaussian(workers, 2**15)
    found = nmse(GlobalQSGD(), given)
    assert found == pytest.approx(expected_nmse(workers, given), rel=0.02)
    assert found == pytest.approx(standard, rel=0.2)
    assert nmse(GlobalQSGD("exponential"), given) == pytest.approx(exponential, rel=0.1)
    assert nmse(Int8(), given) < 0.0005


@pytest.mark.parametrize("name", ["standard", "standard-4", "exponential", "exponential-4"])
def test_dithering_is_right_on_average(name: str) -> None:
    """400,000 trials of each of a few numbers, as so many copies of them: three standard errors."""
    workers = 3 if name.startswith("exp") else 4
    one = gaussian(workers, 3, seed=1)
    one[:, 0] = torch.linspace(-1, 1, workers)  # adds up to 0
    one[:, 1] *= 1e-3
    one[0, 2] = 2.5  # the largest is one worker's
    trials = 400_000
    (got,) = summed(ALL[name], list(one.repeat(1, trials)))[0]
    found = got.view(trials, 3).double()
    off = found.mean(0) - one.double().sum(0)
    doubt = found.std(0) / math.sqrt(trials)
    assert (off.abs() < 3 * doubt).all(), off / doubt


@pytest.mark.parametrize(
    ("workers", "numbers"), [(2, 10**6), (3, 10**6), (4, 10**6), (8, 10**6), (64, 10**5)]
)
def test_no_sum_overflows(workers: int, numbers: int) -> None:
    """All share their largest number."""
    sign = torch.ones(numbers)
    sign[1::2] = -1
    (got,) = summed(GlobalQSGD(), [sign] * workers)[0]
    assert (got * sign > 0).all()
    assert got.abs().max() <= workers * 1.0001
    assert (got.abs() >= workers * (1 - 10 * workers**0.5 / 127)).all()


@pytest.mark.parametrize(("workers", "numbers"), [(2, 10**6), (4, 10**6), (5, 10**5), (64, 10**4)])
def test_no_power_of_two_overflows(workers: int, numbers: int) -> None:
    """All share their largest number: a sum is at most the tree's headroom above it."""
    sign = torch.ones(numbers)
    sign[1::2] = -1
    (got,) = summed(GlobalQSGD("exponential"), [sign] * workers)[0]
    assert (got * sign > 0).all()
    assert got.abs().max() <= 2 ** (workers - 1).bit_length()


def test_dithering_differs_between_workers_and_rounds_and_not_between_runs() -> None:
    given = [gaussian(1, 1000)[0]] * 2
    first, second = summed(GlobalQSGD(), given, rounds=2)[0]
    assert not torch.equal(first, second)
    again, _ = summed(GlobalQSGD(), given, rounds=2)[0]
    assert torch.equal(first, again)
    other, _ = summed(GlobalQSGD(seed=1), given, rounds=2)[0]
    assert not torch.equal(first, other)


# --- a scale that is foretold ------------------------------------------------------------------


def _collectives(codec: Codec, given: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """By round: the sum, and how many collectives it took. Two workers give the same."""

    def worker() -> list[tuple[Tensor, int]]:
        world = enter_world()
        coder, channel = codec.coder(2, world.rank), world.channel("sums")
        found = []
        for each in given:
            tensor, count = each.clone(), 0
            for part in coder.sums(channel, tensor, 0, True, None):
                for work in part:
                    work.wait()
                    count += 1
            coder.ended(channel, 0.0)
            found.append((tensor, count))
        return found

    first, other = offbeat.run(worker, cluster(2)).results
    for (mine, _), (its, _) in zip(first, other, strict=True):
        assert torch.equal(mine, its) or not mine.isfinite().all()
    return list(first)


@pytest.mark.parametrize("kind", ["standard", "exponential"])
def test_a_scale_that_held_costs_no_message(kind: Any) -> None:
    """The first round agrees on it. The others are at most 1.5 times as large, or a bit smaller."""
    numbers = gaussian(1, 1000)[0]
    given = [numbers * size for size in (1.0, 1.4, 1.0, 0.3)]
    assert [count for _, count in _collectives(GlobalQSGD(kind), given)] == [3, 3, 3, 3]
    assert [count for _, count in _collectives(GlobalQSGD(kind, margin=1.5), given)] == [3, 2, 2, 2]


def test_numbers_beyond_what_was_foretold_or_far_below_it_go_again() -> None:
    """In full: errors are those of a scale that all have agreed on, or a margin's times as large.

    A round of zeros tells nothing, and one that is not finite is applied by nobody.
    """
    numbers, bad = gaussian(1, 1000)[0], torch.full((1000,), math.nan)
    sizes = (1.0, 1.6, 100.0, 1.0, 0.0, math.nan, 1.0)
    given = [bad if math.isnan(size) else numbers * size for size in sizes]
    found = _collectives(GlobalQSGD(margin=1.5), given)
    assert [count for _, count in found] == [3, 3, 3, 3, 2, 2, 2]
    for (got, _), exact in zip(found, given, strict=True):
        if exact.isfinite().all():
            level = 2 * 1.5 * float(exact.abs().max()) / 127
            assert float((got - 2 * exact).abs().max()) <= 2 * level


# --- error feedback ----------------------------------------------------------------------------


def _mean_of_rounds(codec: Codec, given: Tensor, rounds: int) -> float:
    """The squared error of the mean over rounds that all give the same."""
    mean = torch.stack(summed(codec, list(given), rounds)[0]).double().mean(0)
    exact = given.double().sum(0)
    return float((mean - exact).square().sum() / exact.square().sum())


def test_error_feedback_brings_everything_in_the_end() -> None:
    given = gaussian(3, 2000)
    assert _mean_of_rounds(Int4(error_feedback=False), given, 40) > 5e-3
    assert _mean_of_rounds(Int4(), given, 40) < 5e-5
    assert _mean_of_rounds(Int4(), given, 40) < _mean_of_rounds(Int4(), given, 10) / 4


def test_who_brings_nothing_keeps_what_it_has_left_out() -> None:
    """Nobody may apply such a round."""
    given = gaussian(2, 300)

    def worker() -> list[Any]:
        world = enter_world()
        coder, channel = Int4().coder(2, world.rank), world.channel("sums")
        _sum(coder, channel, given[world.rank])
        before = coder.state_dict()
        tensor = torch.zeros(300)
        for each in coder.sums(channel, tensor, 0, False, None):
            for work in each:
                work.wait()
        coder.keep()
        assert not tensor.any()
        after = coder.state_dict()
        assert torch.equal(before["left_out"][0], after["left_out"][0])
        assert before["left_out"][0].any()
        return [before["owned"], after["owned"]]

    for before, after in offbeat.run(worker, cluster(2)).results:
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_other_members_find_what_a_worker_has_left_out() -> None:
    """One of three is gone: the two go on with theirs, and the whole still comes in the end."""
    given = gaussian(3, 500)

    def worker() -> Tensor | None:
        world = enter_world()
        coder = Int4().coder(3, world.rank)
        both = world.channel("both", (0, 1)) if world.rank < 2 else None
        first = _sum(coder, world.channel("all"), given[world.rank])
        if both is None:
            return None
        coder.regroup(2)
        rest = [_sum(coder, both, given[world.rank]) for _ in range(39)]
        left_out = coder.state_dict()["left_out"][0]
        assert left_out.abs().max() < 1.0
        return torch.stack([first, *rest]).sum(0)

    got = offbeat.run(worker, cluster(3)).results
    assert torch.equal(got[0], got[1])
    exact = 40 * given[:2].sum(0) + given[2]
    assert float((got[0] - exact).abs().max()) < 2.0  # a few quanta, not 40 of them


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GlobalQSGD(bits=1), "bits must be between 2 and 16, got 1"),
        (lambda: GlobalQSGD(bits=17), "bits must be between 2 and 16, got 17"),
        (lambda: GlobalQSGD(bits=7.5), "bits must be a whole number"),  # type: ignore[arg-type]
        (lambda: GlobalQSGD("exponential", bits=9), "between 2 and 8 for exponential"),
        (lambda: GlobalQSGD("cubic"), "kind must be 'standard' or"),  # type: ignore[arg-type]
        (lambda: GlobalQSGD("exponential", bits=2).check(3), "take more bits, or Int8"),
        (lambda: GlobalQSGD(margin=0.9), "margin must be a number of at least 1"),
        (lambda: GlobalQSGD(margin=True), "margin must be a number of at least 1"),
        (lambda: GlobalQSGD(margin=math.nan), "margin must be a number of at least 1"),
        (lambda: Half("float8"), "kind must be 'bfloat16' or"),  # type: ignore[arg-type]
        (lambda: Int8(block=0), "block must be a multiple of 16"),
        (lambda: Int8(block=100), "block must be a multiple of 16"),
        (lambda: Int4(error_feedback="yes"), "must be True or False"),  # type: ignore[arg-type]
        (lambda: Auto(Int4()), "without error feedback"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
