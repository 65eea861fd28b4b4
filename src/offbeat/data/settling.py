"""What is left of every turn when workers have been lost: one worker works it out for all.

Of what a lost worker was dealt, it has *given* the batches up to its mark: the rounds that all have
completed hold them. Everything else that no survivor holds, the others are dealt again. If a turn
is still under way for somebody, in that turn; else in the next, as *extras*: they have numbers
above those of the turn's own batches.

All that is said here can be written as JSON.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from offbeat.data import runs
from offbeat.data.trail import Entry

Runs = list[list[int]]
Mark = tuple[int, int]
TURNS_KEPT = 8
"""Of how many turns of a deal a worker knows what it was dealt."""


@dataclass
class Held:
    """What one worker was dealt in one turn."""

    serial: int
    """The number of the turn among all of that worker's, of whatever deal."""
    deal: str
    turn: int
    epoch: int
    count: int
    done: Runs
    """What it had computed when the turn was saved, if it goes on from a checkpoint."""
    dealt: Runs
    """What it was dealt since, in this order; first what was in its hand then."""
    extras: Runs = field(default_factory=list)
    """Batches of earlier turns in it when it was saved."""
    over: bool = False
    """Whether it asks for no more."""


@dataclass
class Left:
    """What is left of one turn."""

    deal: str
    turn: int
    epoch: int = 0
    count: int | None = None
    """Its own batches; None if nobody has begun it."""
    extras: Runs = field(default_factory=list)
    """Batches of earlier turns that come in this one: epoch and number there."""
    gone: Runs = field(default_factory=list)
    """What workers had given that have been lost since; and what comes in a later turn instead."""
    rest: Runs = field(default_factory=list)
    """What nobody holds and nobody has given. Of a turn that nobody has begun, all."""


@dataclass
class Settled:
    """What all go on from."""

    left: list[Left] = field(default_factory=list)
    held: dict[int, list[Held]] = field(default_factory=dict)
    """By member."""

    def to_json(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Settled:
        """From the store."""
        left = [Left(**each) for each in told["left"]]
        held = {int(rank): [Held(**each) for each in of] for rank, of in told["held"].items()}
        return cls(left, held)


def followed(held: Iterable[Held], trail: Iterable[Entry]) -> tuple[list[Held], Mark]:
    """What a worker holds that has left this trail since; and how far it was when it asked last."""
    turns, mark = {each.serial: each for each in held}, (0, 0)
    for serial, *facts in trail:
        if isinstance(facts[0], dict):
            turns[serial] = Held(serial, **facts[0])
        elif serial in turns:
            numbers, given = facts
            turns[serial].dealt += numbers
            mark = serial, given
    return list(turns.values()), mark


def settle(
    before: Settled, members: Mapping[int, list[Held]], lost: Iterable[tuple[list[Held], Mark]]
) -> Settled:
    """Work out what is left, from what the members hold, and the lost ones held and had given."""
    settled, lost = Settled(held=dict(members)), list(lost)
    before = Settled.of_json(before.to_json())  # a copy: this may be broken off, and begin anew
    deals = {each.deal for each in before.left}
    deals |= {each.deal for held in (*members.values(), *(of for of, _ in lost)) for each in held}
    for deal in sorted(deals):
        settled.left += _settle_deal(deal, before, members, lost)
    return settled


def _settle_deal(
    deal: str,
    before: Settled,
    members: Mapping[int, list[Held]],
    lost: list[tuple[list[Held], Mark]],
) -> list[Left]:
    turns = _turns(deal, before, members, lost)
    newest = {
        rank: max((each.turn for each in held if each.deal == deal), default=0)
        for rank, held in members.items()
    }
    holding: defaultdict[int, list[Held]] = defaultdict(list)
    for held in members.values():
        for each in held:
            if each.deal == deal:
                holding[each.turn].append(each)
    found: list[Left] = []
    orphans: Runs = []
    carries = any(_is_trained_on(deal, *each) for each in lost)
    for turn in sorted(turns):
        left = turns[turn]
        ends = all(each.over for each in holding[turn]) and min(newest.values()) >= turn
        if max(newest.values()) >= turn + TURNS_KEPT:  # too long ago to know who held what
            continue
        if left.count is not None:
            total = left.count + len(left.extras)
            held_runs = [run for each in holding[turn] for run in (*each.done, *each.dealt)]
            rest = runs.others(total, runs.unpacked([*left.gone, *held_runs]))
            if ends:
                orphans += _named(left, rest) if carries else []
                left.gone += runs.packed(rest)
                rest = []
            left.rest = runs.packed(rest)
        if not ends and orphans:
            orphans = _put(left, orphans)
        found.append(left)
    if orphans:
        following = Left(deal, max((*turns, 0)) + 1)
        _put(following, orphans)
        found.append(following)
    return found


def _turns(
    deal: str,
    before: Settled,
    members: Mapping[int, list[Held]],
    lost: list[tuple[list[Held], Mark]],
) -> dict[int, Left]:
    """Every turn that is known, and what lost workers have given of it."""
    turns = {each.turn: each for each in before.left if each.deal == deal}
    for held in (*members.values(), *(of for of, _ in lost)):
        for each in held:
            if each.deal == deal:
                left = turns.setdefault(each.turn, Left(deal, each.turn))
                left.epoch, left.count = each.epoch, each.count
                left.extras = left.extras or each.extras
    for held, mark in lost:
        for each in held:
            if each.deal == deal:
                turns[each.turn].gone += [*each.done, *_given(each, mark)]
    return turns


def _given(held: Held, mark: Mark) -> Runs:
    """What a lost worker has given of a turn."""
    serial, batches = mark
    if held.serial > serial:
        return []
    dealt = runs.unpacked(held.dealt)
    number = batches if held.serial == serial else runs.length(dealt)
    return runs.packed(runs.part(dealt, 0, number))


def _named(left: Left, rest: list[range]) -> Runs:
    """Batches by their epoch, and their number in that."""
    assert left.count is not None
    return [
        [left.epoch, number] if number < left.count else left.extras[number - left.count]
        for run in rest
        for number in run
    ]


def _put(left: Left, orphans: Runs) -> Runs:
    """Have them come in this turn, before what is left of it; none remains."""
    left.extras = [*left.extras, *orphans]
    if left.count is not None:
        total = left.count + len(left.extras)
        left.rest = [[total - len(orphans), total], *left.rest]
    return []


def _is_trained_on(deal: str, held: list[Held], mark: Mark) -> bool:
    """Whether its worker makes steps from a deal; of one to evaluate by, what is over is over."""
    return any(each.deal == deal and each.serial == max(mark[0], 1) for each in held)
