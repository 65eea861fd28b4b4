"""Ordinary training scripts end, and end right, whatever is in them.

Each seed is a script of `ordinary.py`. More of them: benchmarks/ordinary_scripts.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from ordinary import COLLECTIVES, SCHEDULERS, WORKERS, complaints_of, draw, judged
from pool import Ended, Pool

import offbeat

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(WORKERS) as made:
        yield made


@pytest.mark.parametrize("seed", range(20))
def test_an_ordinary_script_ends_right(pool: Pool, seed: int) -> None:
    verdict = judged(pool, draw(seed))
    assert not verdict.complaints, f"\n{verdict}"


# --- what finds out, itself ----------------------------------------------------------------


def test_a_seed_always_gives_the_same_script() -> None:
    assert all(draw(seed) == draw(seed) for seed in range(100))


def test_a_campaign_draws_everything_there_is() -> None:
    scripts = [draw(seed) for seed in range(800)]
    assert len({script.algorithm for script in scripts}) > 30
    assert {name for script in scripts for name in script.per_epoch} == set(COLLECTIVES)
    assert {script.per_step for script in scripts} == {None, *COLLECTIVES}
    assert {script.scheduler for script in scripts} == {None, *SCHEDULERS}
    assert {script.stepped for script in scripts} == {None, "step", "epoch", "attach"}
    assert {script.rate_from for script in scripts} == {None, "step", "round"}
    assert {script.evaluation for script in scripts} == {
        *(None, "away", "agreed", "plain", "barrier")
    }
    assert {script.data for script in scripts} == {
        *("share", "dealt", "dealt by processes", "rounds")
    }
    assert {script.follows for script in scripts} == {True, False}
    assert {script.pair for script in scripts} == {None, "encoder and head", "gan"}
    assert {script.call for script in scripts} == {"step()", "step(None)", "step(closure)"}
    assert any(script.leaves for script in scripts)
    assert any(script.raises for script in scripts)
    assert sum(script.equals_synchronous_sgd for script in scripts) >= 5


def _ended(rank: int, **other: Any) -> Ended:
    stats = offbeat.Stats(rank, steps=3, rounds=3, computed_samples=3.0, applied_samples=3.0)
    stats.replicas_identical = other.pop("identical", True)
    stats.applied_samples -= other.pop("lost", 0.0)
    usual = {"hashes": ["a"], "averages": ["c"], "dealt": [], "distance": None}
    return Ended(rank, {**usual, "stats": [stats], **other})


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (_ended(2), "right"),
        (_ended(2, hashes=["b"]), "replicas differ"),
        (_ended(2, averages=["d"]), "moving averages differ"),
        (_ended(2, identical=False), "replicas differ"),
        (_ended(2, identical=None), "replicas differ"),
        (_ended(2, lost=1.0), "samples lost"),
        (_ended(2, distance=1e-3), "not synchronous SGD"),
        (_ended(2, distance=float("nan")), "not synchronous SGD"),
        (Ended(2, error="KeyError: 3"), "KeyError"),
        (Ended(2, hung=True), "hang"),
    ],
)
def test_every_wrong_end_is_found(ended: Ended, kind: str) -> None:
    found, complaints = complaints_of(draw(2), [_ended(0), _ended(1), ended])
    assert found == kind
    assert bool(complaints) == (kind != "right")


def test_an_error_that_some_workers_do_not_hear_of_is_found() -> None:
    script = replace(draw(2), raises=(1, 0))
    told = [Ended(rank, error="WorkerLostError: 1") for rank in (0, 2)]
    raised = Ended(1, error="ABadBatch: worker 1")
    assert complaints_of(script, [told[0], raised, told[1]]) == ("right", [])
    assert complaints_of(script, [told[0], raised, _ended(2)])[0] == "no error"


def _hangs(stuck: int) -> int:
    if dist.get_rank() == stuck:
        time.sleep(1000)
    return dist.get_rank()


def test_a_hang_is_reported_with_the_stacks_and_the_next_script_runs(pool: Pool) -> None:
    pool.run(_hangs, -1, limit_s=30.0, after_error_s=3.0)  # all have imported this file by now
    ended = pool.run(_hangs, 1, limit_s=3.0, after_error_s=3.0)
    assert [one.hung for one in ended] == [False, True, False]
    assert "in _hangs" in ended[1].stacks
    assert [one.result for one in ended] == [0, None, 2]
    ended = pool.run(_hangs, -1, limit_s=30.0, after_error_s=3.0)
    assert [one.result for one in ended] == [0, 1, 2]


def _raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("a bad batch")
    dist.barrier()


def test_an_error_ends_the_process_and_so_the_collectives_of_the_others(pool: Pool) -> None:
    ended = pool.run(_raises, limit_s=30.0, after_error_s=20.0)
    assert "KeyError" in ended[1].error
    assert all(one.error and not one.hung for one in ended)
