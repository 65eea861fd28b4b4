"""When is it over? Loops that all workers end with the same round, and what an end has cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch

from offbeat.apply import Applier
from offbeat.replica import Replica, Stats
from offbeat.worlds.base import Channel, World

_LEAST_S = 0.5
_LEAST_SHARE = 0.1
"""Of a worker's time: to have waited less at the end is not worth a line."""
_PORTING = "docs/porting.md"


@dataclass(frozen=True)
class Goal:
    """What a loop is to reach; whichever comes first."""

    samples: float | None = None
    rounds: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given:
            raise ValueError("until() needs at least one of samples=, rounds= and seconds=")
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        if self.seconds == 0:
            raise ValueError("seconds must be above 0, got 0")
        if self.rounds is not None and self.rounds != int(self.rounds):
            raise ValueError(f"rounds must be a whole number, got {self.rounds!r}")


class Counted(Protocol):
    """What has rounds; others, once it has joined again."""

    _replica: Replica
    _apply: Applier

    def _take_newest(self) -> None: ...


def steps(goal: Goal, dp: Counted) -> Iterator[int]:
    """Count this worker's steps until all have reached the goal.

    Rounds and samples are what all workers know alike, so all end with the same round. Clocks are
    not: whoever's time is up asks all to end with the next round. Nor are samples, where a worker
    hears of its neighbours' only.
    """
    rounds = math.inf if goal.rounds is None else goal.rounds
    samples = math.inf if goal.samples is None else goal.samples
    ends_s = math.inf if goal.seconds is None else dp._replica.world.now() + goal.seconds
    for step in count():
        known, more = dp._replica.engine.held_back
        if dp._replica.round + known >= rounds or dp._apply.samples + more >= samples:
            dp._take_newest()  # else it may wait for rounds that those who have ended do not make
        replica, applier, engine = dp._replica, dp._apply, dp._replica.engine
        enough = applier.samples >= samples
        if replica.round >= rounds or applier.asked_to_end or (enough and engine.known_share == 1):
            return
        if enough or replica.world.now() >= ends_s:
            engine.ask_end()
        yield step


def note_join(world: World, channel: Channel, stats: Stats, took_s: float, served: int) -> str:
    """Tell the others how long this worker has waited at the end, and hear it of them.

    It has served so many of their steps meanwhile. Returns what whoever has waited the longest has
    to say of it, if it is worth a line; on all others nothing.
    """
    mine = torch.tensor([stats.join_wait_s, took_s, float(stats.steps)], dtype=torch.float64)
    members = channel.members
    told = torch.empty(len(members), 3, dtype=torch.float64)
    channel.all_gather(mine, told).wait()
    waits, times, steps_made = told.T.tolist()
    last, longest = waits.index(min(waits)), waits.index(max(waits))
    waited_s = waits[members.index(world.rank)]
    if waited_s == waits[last] or times[last] == waits[last]:  # who has just joined, and no more
        return ""
    stats.waited_for = members[last]
    at_its_pace = (waited_s - waits[last]) * steps_made[last] / (times[last] - waits[last])
    left = min(round(at_its_pace), served)  # it may have been busy with something else
    little = waited_s <= max(_LEAST_S, _LEAST_SHARE * took_s)
    if members[longest] != world.rank or little or not left:
        return ""
    remedy = ": to use that time, deal the data (offbeat.Deal), or end by dp.until(...)"
    if world.deals:
        remedy = (
            ", though data are dealt. Have all go by the same epochs: for epoch in "
            "range(deal.epoch, epochs), which a worker that has joined begins where the others are"
        )
    return (
        f"worker {world.rank} waited {waited_s:.1f} s at the end for worker {members[last]}, which "
        f"had about {left} steps left{remedy}; see {_PORTING}"
    )
