"""A worker is lost, and the others train on: in virtual time, at every moment there is.

Whatever the method and the moment: nobody hangs, replicas are identical, and of what the survivors
have computed nothing is lost and nothing counts twice.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from crashes import STEPS, Lives, samples_of
from test_contract import ALGORITHMS

import offbeat
from offbeat.asynchronous import Asynchronous
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash
from offbeat.errors import EpochOver, WorkerLostError
from offbeat.rounds.members import Members
from offbeat.worlds import clock

WORKERS = len(STEPS)
TIMES = "two-slow-of-eight"
FEW = 2


def cluster(*crashes: tuple[int, float], latency_s: float | None = None) -> Cluster:
    events = tuple(Crash(kind="crash", worker=rank, at_s=moment) for rank, moment in crashes)
    there = Cluster.load(TIMES).resized(WORKERS)
    network = there.network
    if latency_s is not None:
        slow = {"latency_s": latency_s, "control_latency_s": latency_s}
        network = network.model_copy(update=slow)
    return there.model_copy(update={"events": events, "network": network})


def lived_through(lives: Lives, *crashes: tuple[int, float], latency_s: float | None = None) -> int:
    """Run, and check what must hold; return how many were lost."""
    fates = offbeat.run(lives, cluster(*crashes, latency_s=latency_s)).results
    assert {rank for rank, fate in enumerate(fates) if fate is None} <= {
        rank for rank, _ in crashes
    }
    return lives.check(fates, all_told=not isinstance(lives.algorithm, Asynchronous))


def moments(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When anything happens in a run once all are attached, and between two such moments."""
    seen: set[float] = set()
    pop = clock.heappop

    def noted(heap: Any) -> Any:
        due = pop(heap)
        seen.add(due[0])
        return due

    with monkeypatch.context() as patch:
        patch.setattr(clock, "heappop", noted)
        offbeat.run(lives, cluster())
    times = sorted(moment for moment in seen if moment > lives.attached_s)
    between = [(a + b) / 2 for a, b in pairwise(times)]
    return sorted([*times, *between])


every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@every_algorithm
def test_the_others_train_on_whoever_is_lost(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, random = ALGORITHMS[name].make(WORKERS), Random(name)
    try:
        times = moments(Lives(algorithm), monkeypatch)
    except ValueError as error:
        assert not algorithm.survives
        pytest.skip(str(error))
    lost = 0
    for number in range(FEW):
        first, second = random.sample(range(WORKERS), 2)
        moment = random.choice(times)
        crashes = [(first, moment)]
        if number:  # another one, at the same time, or while the others regroup
            crashes.append((second, moment + random.choice([0.0, 5e-5, 1e-4, 3e-4, 0.1])))
        lost += lived_through(Lives(algorithm), *crashes)
    assert lost > 0


def test_a_round_that_some_have_completed_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hear of a loss while the others still complete a round: all must have it.

    That is so if the lost one dies a little before the end of an exchange: they hear of it 50 to
    100 microseconds later, one after another.
    """
    handed, lives = 0, Lives(offbeat.SyncSGD())
    take = Members._take_missed

    def counted(self: Members, *arguments: Any) -> None:
        nonlocal handed
        handed += 1
        take(self, *arguments)

    monkeypatch.setattr(Members, "_take_missed", counted)
    for moment in moments(lives, monkeypatch)[::4]:
        lived_through(Lives(offbeat.SyncSGD()), (3, moment - 9e-5))
    assert handed > 0


def test_who_arrives_while_the_others_regroup_is_heard() -> None:
    """The last one that a round waits for starts it by itself; not between two epochs."""
    three = "workers = 3\nspeed = [1.0, 0.7, 0.5]\n[compute]\nstep_s = 1.0\n"
    three += "[network]\nlatency_s = 0.02\n[[event]]\nkind = 'crash'\nworker = 1\nat_s = "
    for hundredths in range(240, 260):
        fates = offbeat.run(Lives(offbeat.ABSSGD()), Cluster.parse(three + f"{hundredths / 100}"))
        assert [fate is None for fate in fates.results] == [False, True, False]


def test_the_round_is_made_again_with_what_the_others_gave() -> None:
    """Worker 2 dies in the middle of round 1; the others' gradients are in it all the same."""
    fates = offbeat.run(Lives(offbeat.SyncSGD()), cluster((2, 0.3))).results
    assert fates[2] is None
    assert fates[0].by_rank[2] < sum(samples_of(2, step) for step in range(STEPS[2]))
    for rank in (0, 1, 3):
        assert fates[0].by_rank[rank] == fates[rank].computed


def test_with_fewer_than_min_workers_the_run_ends() -> None:
    lives = Lives(offbeat.SyncSGD(), min_workers=3)
    assert lived_through(lives, (1, 0.3)) == 1
    with pytest.raises(WorkerLostError, match=r"2 of the workers are left, and min_workers is 3"):
        offbeat.run(Lives(offbeat.SyncSGD(), min_workers=3), cluster((1, 0.3), (0, 0.31)))


def test_without_survive_everybody_raises() -> None:
    with pytest.raises(WorkerLostError, match=r"worker 1 was lost.*survive=True") as caught:
        offbeat.run(Lives(offbeat.SyncSGD(), survive=False), cluster((1, 0.3)))
    assert not isinstance(caught.value, EpochOver)


def test_the_environment_says_whether_to_survive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFBEAT_SURVIVE", "1")
    assert lived_through(Lives(offbeat.SyncSGD(), survive=None), (1, 0.3)) == 1
    with caplog.at_level("WARNING"):  # said for a whole job: a method that cannot does without
        offbeat.run(Lives(offbeat.WAGMASGD(), survive=None), cluster())
    assert "WAGMASGD cannot go on when a worker is lost yet" in caplog.text
    monkeypatch.setenv("OFFBEAT_SURVIVE", "yes")
    with pytest.raises(ValueError, match="OFFBEAT_SURVIVE must be 0 or 1, got 'yes'"):
        Lives(offbeat.SyncSGD(), survive=None)()


@pytest.mark.parametrize("least", [0, -1, 1.5, True])
def test_min_workers_must_be_a_number_of_workers(least: Any) -> None:
    with pytest.raises(ValueError, match="min_workers must be a number of workers above 0"):
        Lives(offbeat.SyncSGD(), min_workers=least)()


def test_a_loss_is_one_line_and_in_the_records(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, Any]] = []
    offbeat.run(Lives(offbeat.EagerSGD()), cluster((1, 0.3)), records=lines.append)
    assert [record.message.partition(" at")[0] for record in caplog.records] == [
        "worker 1 was lost"
    ]
    assert "3 of 4 workers go on" in caplog.records[0].message
    lost = [line for line in lines if line["kind"] == "lost"]
    assert {line["rank"] for line in lost} == {0, 2, 3}
    assert all(line["workers"] == 3 for line in lost)


def test_a_loss_in_the_middle_of_a_checkpoint_holds_up_nobody() -> None:
    """All pause in state_dict(): whoever dies on the way there, or in it, is not waited for."""

    def train() -> bool | None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, optimizer, offbeat.EagerSGD(), survive=True) as dp:
            for step in range(4):
                model(torch.full((1, 3), float(step))).square().mean().backward()
                optimizer.step()
                dp.state_dict()
        return dp.stats().replicas_identical

    whole = offbeat.run(train, cluster())
    lost = 0
    for number in range(12):
        results = offbeat.run(train, cluster((number % 4, whole.seconds * (number + 1) / 13)))
        lost += results.results.count(None)
        assert set(results.results) <= {True, None}
    assert lost > 6
