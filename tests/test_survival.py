"""A worker is lost, and the others train on: in virtual time, at every moment there is.

Whatever the method and the moment: nobody hangs, replicas are identical, and of what the survivors
have computed nothing is lost and nothing counts twice.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from crashes import STEPS, Lives, samples_of
from test_contract import ALGORITHMS

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash
from offbeat.errors import EpochOver, WorkerLostError
from offbeat.rounds.members import Members
from offbeat.rounds.pile import Pile
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
    return lives.check(fates, all_told=True)


def moments(lives: Lives | OneRound, monkeypatch: pytest.MonkeyPatch) -> list[float]:
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


def test_what_a_worker_sets_aside_while_a_round_breaks_off_is_in_the_next() -> None:
    """It arrives for the next round just when a loss ends the one under way."""
    lives = Lives(ALGORITHMS["diloco-grace"].make(WORKERS))
    assert lived_through(lives, (1, 1.8288351165749406), latency_s=0.02) == 1


def test_who_regroups_twice_in_a_row_counts_what_is_lost_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Worker 1 is lost while the others ask how much worker 0 had computed."""
    lives, crashes = Lives(ALGORITHMS["dmsgd-ring"].make(WORKERS)), ((0, 10.3733394), (1, 10.66502))
    assert lived_through(lives, *crashes, latency_s=0.1) == 2
    assert "worker 1 was lost" in caplog.text
    assert all(record.message.startswith("worker") for record in caplog.records)


def test_who_is_ending_may_not_hear_how_much_is_lost() -> None:
    """Worker 3 is lost when all have made their steps: `lost_samples` is a lower bound then."""
    lives = Lives(ALGORITHMS["edm-lazy-ring"].make(WORKERS))
    assert lived_through(lives, (3, 12.05486109660233), latency_s=0.1) == 1


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


def test_what_is_opened_just_when_another_is_lost_counts_in_no_other_epoch() -> None:
    """Two are lost, when a worker is about to meet the others in the epoch after the first."""
    lives = Lives(offbeat.RingmasterASGD(max_delay=2, stop="never"))
    crashes = (2, 3.6536581715554792), (3, 3.687521783550412)
    assert lived_through(lives, *crashes, latency_s=0.02) == 2


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


def test_who_is_lost_by_a_mistake_in_its_script_is_not_to_be_survived() -> None:
    def train() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with suppress(KeyError), offbeat.attach(model, optimizer) as dp:
            for step in range(9):
                if (dp.rank, step) == (1, 4):
                    raise KeyError("a bad batch")
                model(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()

    with pytest.raises(WorkerLostError, match="worker 1 was lost at virtual time") as caught:
        offbeat.run(train, cluster())
    assert (caught.value.rank, caught.value.raised) == (1, True)
    assert "(KeyError: 'a bad batch'). Worker 1's script has raised that" in str(caught.value)
    assert "survive" not in str(caught.value)


class Mortal(offbeat.SyncSGD):
    """A method of somebody's own that cannot do it."""

    @property
    def survives(self) -> bool:
        return False


def test_the_environment_says_whether_to_survive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFBEAT_SURVIVE", "1")
    assert lived_through(Lives(offbeat.SyncSGD(), survive=None), (1, 0.3)) == 1
    with caplog.at_level("WARNING"):  # said for a whole job: a method that cannot does without
        offbeat.run(Lives(Mortal(), survive=None), cluster())
    assert "Mortal cannot go on when a worker is lost" in caplog.text
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


@pytest.mark.parametrize("kind", [offbeat.EagerSGD, offbeat.WaitFreeLocalSGD, offbeat.WAGMASGD])
def test_those_who_pause_go_on_if_the_one_they_wait_for_is_lost(
    kind: type[offbeat.Algorithm],
) -> None:
    """All others pause when worker 3 is lost, which makes rounds: nobody is left to start one."""

    def train() -> tuple[bool | None, float, float, float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, optimizer, kind(), survive=True, freeze_s=None) as dp:
            for step in range(9 if dp.rank == 3 else 4):
                if step == (6 if dp.rank == 3 else 1):
                    dp.state_dict()
                dp.samples(2)
                model(torch.full((1, 3), float(step))).square().mean().backward()
                optimizer.step()
        stats = dp.stats()
        computed, applied = stats.computed_samples, stats.applied_samples
        return stats.replicas_identical, computed, applied, stats.dropped_samples

    even = "workers = 4\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = 0.01\n"
    lost = "[[event]]\nkind = 'crash'\nworker = 3\nat_s = 4.5\n"
    results = offbeat.run(train, Cluster.parse(even + lost)).results
    assert results == [(True, 8.0, 8.0, 0.0)] * 3 + [None]


class OneRound:
    """Each worker's program: a move of its own, one round, and where that leads."""

    def __init__(self, algorithm: offbeat.Algorithm, codec: offbeat.codecs.Codec | None) -> None:
        self._settings = {"algorithm": algorithm, "codec": codec, "survive": True}
        self.attached_s = 0.0

    def __call__(self) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with offbeat.attach(model, optimizer, **self._settings) as dp:
            self.attached_s = max(self.attached_s, dp.seconds)
            (-(1.0 + dp.rank) * model.weight).sum().backward()
            optimizer.step()
        return float(model.weight.detach())


@pytest.mark.parametrize(
    ("algorithm", "codec"),
    [
        (offbeat.SyncSGD(), None),
        (offbeat.SyncSGD(), offbeat.Half()),
        (offbeat.SyncSGD(), offbeat.Int8()),
        (offbeat.EagerSGD("all"), None),
        (offbeat.LocalSGD(1), None),
        (offbeat.DiLoCo(1, lr=1.0, momentum=0.0), None),
        (offbeat.DiLoCo(1, lr=1.0, momentum=0.0, average="directions"), None),
    ],
    ids=str,
)
def test_what_a_lost_worker_gave_is_in_the_round_or_is_not(
    algorithm: offbeat.Algorithm,
    codec: offbeat.codecs.Codec | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round that is made again is of what the others gave, not of a sum that was there."""
    program, found = OneRound(algorithm, codec), []
    for moment in moments(program, monkeypatch):
        fates = offbeat.run(program, cluster((3, moment - 9e-5))).results
        found += [fate for fate in fates if fate is not None]
    with_it, without = 2.5, 2.0  # the mean of 1, 2, 3 and 4, and that of the first three
    assert all(min(abs(each - with_it), abs(each - without)) < 0.05 for each in found)
    assert min(found) < 2.1
    assert max(found) > 2.4


# --- what travels --------------------------------------------------------------------------


def _copies(cluster: Cluster) -> list[tuple[list[Pile], list[Pile]]]:
    """By worker: its buffers for what travels, in the first epoch and in the last."""

    def train() -> tuple[list[Pile], list[Pile]]:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offbeat.attach(model, optimizer, survive=True, algorithm=offbeat.SyncSGD()) as dp:
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(2, 3)).square().mean().backward()
                optimizer.step()
                launches = dp._replica.engine._exchange.launches
                assert launches is not None
                if step == 0:
                    first = list(launches._idle)
            return first, list(launches._idle)

    return [each for each in offbeat.run(train, cluster).results if each is not None]


def _losing(at_s: float, speed: float) -> Cluster:
    """Worker 2 of this speed is lost."""
    crash = Crash(kind="crash", worker=2, at_s=at_s)
    cluster = Cluster.parse(
        f"workers = 3\nspeed = [1.0, 1.0, {speed}]\n[compute]\nstep_s = 1.0\n"
        "[network]\nlatency_s = 0.0001"
    )
    return cluster.model_copy(update={"events": (crash,)})


def test_the_buffer_of_what_travels_serves_after_a_loss_too() -> None:
    for first, last in _copies(_losing(2.5, speed=1.0)):  # while all compute
        assert len(first) == 1
        assert last == first


def test_the_buffer_of_a_round_that_was_broken_off_does_not() -> None:
    """What was under way may still write to it."""
    for first, last in _copies(_losing(3.0, speed=0.6)):  # while the others wait
        assert len(first) == len(last) == 1
        assert last != first
