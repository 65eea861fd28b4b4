"""A worker is lost where models are averaged in groups: what the others gave is in rounds, once.

A round shifts each of a group by (mean - given). So nothing is lost if the mean is that of what the
group's workers have given, the lost one perhaps among them, and each who is left is shifted by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from crashes import Lives, Schedule
from test_contract import ALGORITHMS
from test_survival import WORKERS, lived_through
from torch import Tensor

import offbeat
from offbeat.clusters.events import Crash
from offbeat.merges import Public
from offbeat.rounds import Flats, Round
from offbeat.rounds.handing_on import HandingOn
from offbeat.worlds.virtual import current_virtual_world

EVERYONE = {0, 1, 2, 3}


def now() -> float:
    world = current_virtual_world()
    assert world is not None
    return world.now()


class Shifts:
    """What everybody has given to every round, and what it has got of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: dict[tuple[int, int], Tensor] = {}
        self.landed: defaultdict[int, dict[int, tuple[tuple[int, ...], Tensor]]] = defaultdict(dict)
        self.ends_s: set[float] = set()
        give, land = Public.give, Public.land

        def gives(merge: Public, round: int, into: Flats, *rest: Any) -> Iterator[None]:
            yield from give(merge, round, into, *rest)
            self.given[round, offbeat.rank()] = torch.cat(into.bodies)

        def lands(merge: Public, round: Round, sums: Flats) -> Round:
            assert offbeat.rank() not in self.landed[round.round], "once"
            self.ends_s.add(now())
            self.landed[round.round][offbeat.rank()] = round.group, torch.cat(sums.bodies)
            return land(merge, round, sums)

        patch.setattr(Public, "give", gives)
        patch.setattr(Public, "land", lands)

    def check(self, survivors: set[int]) -> None:
        for number, by_rank in self.landed.items():
            assert survivors <= by_rank.keys()
            for rank, (group, total) in by_rank.items():
                assert rank in group
                torch.testing.assert_close(total, sum(self.given[number, each] for each in group))
                for other in survivors.intersection(group):
                    assert by_rank[other][0] == group
                    assert torch.equal(by_rank[other][1], total)  # to the bit
        self.given.clear()
        self.landed.clear()


def lost_by(schedule: Schedule, *crashes: tuple[int, float]) -> set[int]:
    """Run with workers that crash at moments; who has."""
    events = tuple(Crash(kind="crash", worker=rank, at_s=moment) for rank, moment in crashes)
    lives = schedule.lives()
    fates = offbeat.run(lives, schedule.cluster.model_copy(update={"events": events})).results
    lives.check(fates)
    return {rank for rank, fate in enumerate(fates) if fate is None}


@pytest.mark.parametrize("name", ["wagma-pairs", "wagma-paper"])
def test_what_survivors_gave_to_their_groups_is_in_rounds_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear of a loss one to two latencies later: some when the round has ended for them."""
    received = _counted(monkeypatch, "_receive")
    added = _counted(monkeypatch, "_sum_again")
    schedule = Schedule(name, (2, 1, 2, 2), (1.0, 0.7, 0.45, 0.9))
    shifts, draws, crashed = Shifts(monkeypatch), Random(name), 0
    assert not lost_by(schedule)
    ends_s = sorted(shifts.ends_s)
    shifts.check(EVERYONE)
    for end_s in ends_s:
        for number, latencies in enumerate((1.25, 1.5, 1.75)):
            first, second, *_ = draws.sample(sorted(EVERYONE), 4)
            moment = end_s - latencies * schedule.latency_s
            soon = moment + draws.uniform(0, 4) * schedule.latency_s
            lost = lost_by(schedule, *[(first, moment), (second, soon)][: 1 + number % 2])
            shifts.check(EVERYONE - lost)
            crashed += len(lost)
    assert crashed > len(ends_s)
    assert received
    assert added  # of a group of which nobody had the result


@pytest.mark.parametrize(
    ("name", "crashes"),
    [
        ("wagma-default", [(2, 9.425729920790165), (0, 9.425729920790165)]),
        ("wagma-paper", [(0, 9.682754798721888), (2, 10.40563326486312)]),
        ("wagma-paper", [(0, 9.682754798721888)]),
    ],
)
def test_those_who_are_left_make_the_last_round_of_all_though_they_have_left(
    name: str, crashes: list[tuple[int, float]]
) -> None:
    """Worker 0 is the last to leave, and is lost while all are in the round that says so."""
    lives = Lives(ALGORITHMS[name].make(WORKERS))
    assert lived_through(lives, *crashes, latency_s=0.1) == len(crashes)


def _counted(patch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Of an engine's method: which workers have called it."""
    called: list[int] = []
    method = getattr(HandingOn, name)

    def noted(engine: HandingOn, *arguments: Any) -> None:
        called.append(engine._world.rank)
        method(engine, *arguments)

    patch.setattr(HandingOn, name, noted)
    return called
