"""Dealing again what lost workers had in hand.

Every worker leaves a trail of what it is dealt (trail.py), and rounds carry the *marks* of those
who give to them: which of its turns a worker is in, and how many batches of that are in what it has
given so far. So do entries, where every gradient comes by itself. When a worker is lost, nobody is
dealt anything for a moment. All tell what they hold. One of them reads the trails of the lost,
works out what is left (settling.py) and tells all. They go on from that with a new counter: what
the lost one may still have asked of the old one, nobody uses.

    worker 0   counts to 7 ──✗ tells: 0 2 4 6 ── "left: 5 and those from 8 on" ── counts anew: 5
    worker 1   counts to 8 ──✗ tells: 1 7 ───────────┐ hears it ──────────────── counts anew: 8
    worker 2   was dealt 3 5, has given 3 ──✗ lost

A loss in the middle of that ends it, and it begins anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from offbeat.data import runs, trail
from offbeat.data.settling import TURNS_KEPT, Held, Left, Settled, followed, settle
from offbeat.data.trail import Trail
from offbeat.errors import EpochOver
from offbeat.worlds import Control, World
from offbeat.worlds.current import present_world

_SERIALS = 2**12  # turns between two losses; float32 holds as many times as many


class Answer(NamedTuple):
    """What a worker is dealt when it asks for more."""

    numbers: list[range]
    dealt: int
    """How many of all have been dealt."""
    total: int
    version: int = 0
    """The epoch of the members that the rest was worked out in."""


class Share:
    """One worker's part of one turn: what it holds, and what is left to be dealt."""

    def __init__(self, held: Held, rest: list[range], given: Callable[[], int]) -> None:
        self.held = held
        self.rest = rest
        self.extras = held.extras
        self.gone: list[list[int]] = []
        self.given = given
        """How many batches of it the program has been given."""
        self.stepped = 0
        """And how many of them it has made steps of."""
        self.version = 0
        """As in an `Answer`."""

    @property
    def total(self) -> int:
        """Batches of this turn, those of earlier ones that come in it included."""
        return self.held.count + len(self.extras)

    def go_on(self, left: Left, version: int) -> None:
        """Workers were lost: this is left."""
        self.version, self.extras, self.gone = version, left.extras, left.gone
        self.rest = runs.unpacked(left.rest)


class Again:
    """One worker's part in it; `world.dealing`."""

    def __init__(self, world: World, before: Again | None = None) -> None:
        """`before` is this worker's part in a world that it was expelled from."""
        self._world = world
        self._stale = [] if before is None else before.left_behind
        self._place = "dealing"
        self._state = world.condition("what lost workers had been dealt")
        self._epoch = min(world.epoch, 0)
        self.joiner = world.joins
        """Whether others were there before this worker."""
        self.newcomer = world.joins and not world.returns
        """And it has not been there before."""
        self._settles = False
        self._settled = Settled()
        self._trail = self._new_trail()
        self._shares: list[Share] = []
        self._serial = 0
        self._latest: Share | None = None

    # --- while nobody is lost --------------------------------------------------------------

    def begin(self, held: Held, rest: list[range], given: Callable[[], int]) -> Share:
        """This worker begins a turn."""
        with self._state:
            self._state.wait_for(lambda: not self._settles)
            self._serial += 1
            held.serial = self._serial
            share = Share(held, rest, given)
            for left in self._settled.left:
                if (left.deal, left.turn) == (held.deal, held.turn):
                    self._begin_left(left, share)
            self._shares = [each for each in self._shares if not _is_long_ago(each.held, held)]
            self._shares.append(share)
        return share

    def _begin_left(self, left: Left, share: Share) -> None:
        """Others were in this turn when a worker was lost, or it has left something for it."""
        if left.count is None:
            left.count = share.held.count
            left.rest = [[left.count, left.count + len(left.extras)], *runs.packed(share.rest)]
        share.go_on(left, self._epoch)

    def newest(self, deal: str) -> tuple[int, int] | None:
        """The turn of a deal that others have come to, and its epoch: a joiner begins with that."""
        with self._state:
            self._state.wait_for(lambda: not self._settles)
            begun = [each for each in self._settled.left if each.deal == deal and each.count]
        return max(((each.turn, each.epoch) for each in begun), default=None)

    def knows(self, deal: str, turn: int) -> bool:
        """Whether it is known what is left of a turn."""
        with self._state:
            self._state.wait_for(lambda: not self._settles)
            return any((each.deal, each.turn) == (deal, turn) for each in self._settled.left)

    def extras(self, deal: str, turn: int) -> list[list[int]]:
        """What comes in a turn that this worker has not begun, of earlier ones."""
        found = (each for each in self._settled.left if (each.deal, each.turn) == (deal, turn))
        return next((each.extras for each in found), [])

    def tell_begun(self, share: Share) -> None:
        """The others can know of the turn, and of what was done of it when it was saved."""
        facts = asdict(share.held)
        serial = facts.pop("serial")
        with self._state:
            told, oldest = self._trail, self._shares[0].held.serial
        with suppress(EpochOver):  # then all have been told
            control = self._world.control_in_epoch().kept()
            told.tell(control, [serial, facts])
            told.forget(control, oldest)

    def ask(self, share: Share, add: Callable[[Control, Share], Answer]) -> Answer:
        """Have `add` ask for more, until it has been dealt them, and they will not be again."""
        while True:
            with self._state:
                self._state.wait_for(lambda: not self._settles)
                epoch, told = self._epoch, self._trail
            try:
                control = self._world.control_in_epoch()
                if self._world.epoch != epoch:
                    raise EpochOver("another worker was lost meanwhile")
                answer = add(control, share)
                numbers = runs.packed(answer.numbers)
                if numbers:
                    told.tell(control.kept(), [share.held.serial, numbers, share.given()])
            except EpochOver:
                self._await(epoch)
                continue
            with self._state:
                if self._settles or self._epoch != epoch:
                    continue  # what it was dealt is dealt again
                share.held.dealt += numbers
            return answer

    def renewed(self, share: Share, version: int) -> Answer | None:
        """Nothing, and what is left, if that was worked out anew since this version."""
        with self._state:
            self._state.wait_for(lambda: not self._settles)
            if share.version == version:
                return None
            return Answer([], share.total - runs.length(share.rest), share.total, share.version)

    def ends(self, share: Share, version: int) -> bool:
        """Have this worker's turn be over, unless there is more since this version."""
        with self._state:
            self._state.wait_for(lambda: not self._settles)
            share.held.over = share.version == version
            return share.held.over

    def _await(self, epoch: int) -> None:
        with self._state:
            self._state.wait_for(lambda: self._settles or self._epoch != epoch)

    def drawn(self, share: Share) -> None:
        """The program goes on with a batch of this turn."""
        self._latest = share

    def mark(self) -> tuple[int, int]:
        """Which of its turns this worker is in, and how many batches of it it has computed."""
        if (latest := self._latest) is None:
            return 0, 0
        latest.stepped = latest.given()
        return latest.held.serial, latest.stepped

    # --- when this worker was expelled -----------------------------------------------------

    @property
    def left_behind(self) -> list[Share]:
        """What the program may still hold batches of, when others have been dealt them again."""
        return [*self._stale, *([] if self._latest is None else [self._latest])]

    def takes_stale(self) -> bool:
        """Whether the program makes a step of such a batch; each is asked for once."""
        for share in self._stale:
            if (given := share.given()) > share.stepped:
                share.stepped = given
                return True
        return False

    # --- when somebody is ------------------------------------------------------------------

    def epoch_over(self) -> None:
        """The members have changed."""
        with self._state:
            if self._epoch == self._world.epoch:
                return
            begins, self._settles = not self._settles, True
            self._state.notify_all()
        if begins:
            self._world.spawn("deals again", self._settle)

    def _settle(self) -> None:
        world = self._world
        while True:
            epoch = world.epoch
            with suppress(EpochOver):
                settled = self._agreed(epoch)
                with self._state:
                    goes_on = world.epoch == epoch
                    if goes_on:
                        self._go_on(settled, epoch)
                if goes_on:
                    world.through("dealing", epoch)
                    return

    def _agreed(self, epoch: int) -> Settled:
        world, control = self._world, self._world.control_in_epoch()
        members, here = world.members, f"{self._place}/{epoch}"
        if world.epoch != epoch:
            raise EpochOver("another worker was lost meanwhile")
        mine: list[Any] | None = [asdict(share.held) for share in self._shares]
        if self.joiner and not mine:
            mine = None  # it has missed nothing, wherever the others are
        control.set(f"{here}/held/{world.rank}", json.dumps(mine).encode())
        if world.rank == members[0]:
            held = {rank: self._told(control, f"{here}/held/{rank}") for rank in members}
            settled = self._work_out(control, epoch, held)
            control.kept().set(f"{here}/settled", json.dumps(settled.to_json()).encode())
            control.kept().add(f"{here}/is-settled", 1)
        return Settled.of_json(json.loads(control.get(f"{here}/settled")))

    def _told(self, control: Control, key: str) -> list[Held] | None:
        told = json.loads(control.get(key))
        return None if told is None else [Held(**each) for each in told]

    def _work_out(
        self, control: Control, epoch: int, told: Mapping[int, list[Held] | None]
    ) -> Settled:
        held = {rank: its for rank, its in told.items() if its is not None}
        before, since = self._newest(control, epoch)
        everyone = range(self._world.size) if since == 0 else before.held
        gone = [rank for rank in everyone if rank not in told]
        marks = self._marks(epoch)
        lost = []
        for rank in gone:
            entries = trail.read(control, f"{self._place}/{since}/of/{rank}")
            its, asked = followed(before.held.get(rank, []), entries)
            lost.append((its, asked if marks is None else marks[rank]))
        settled = settle(before, held, lost) if held else before
        settled.held |= {rank: [] for rank in told if rank not in held}
        return settled

    def _newest(self, control: Control, epoch: int) -> tuple[Settled, int]:
        """What was worked out last, and in which epoch: perhaps nobody here has heard of it."""
        for each in range(epoch - 1, self._epoch, -1):
            if control.add(f"{self._place}/{each}/is-settled", 0):
                found = control.get(f"{self._place}/{each}/settled")
                return Settled.of_json(json.loads(found)), each
        return self._settled, max(self._epoch, 0)

    def _marks(self, epoch: int) -> list[tuple[int, int]] | None:
        """What the rounds of this worker's attachments hold; None if they do not say."""
        engines = [each for each in self._world.regroups if hasattr(each, "given_marks")]
        several = [marks for each in engines if (marks := each.given_marks(epoch)) is not None]
        return [min(marks) for marks in zip(*several, strict=True)] if several else None

    def _go_on(self, settled: Settled, epoch: int) -> None:
        """Deal again what is left; under lock."""
        self._settled, self._epoch, self._settles = settled, epoch, False
        if not self._shares:  # later than what a worker of this rank has marked that was lost
            self._serial = max(self._serial, epoch * _SERIALS)
        self._trail = self._new_trail()
        for share in self._shares:
            for left in settled.left:
                if (left.deal, left.turn) == (share.held.deal, share.held.turn):
                    share.go_on(left, epoch)
        self._state.notify_all()

    def _new_trail(self) -> Trail:
        return Trail(f"{self._place}/{self._epoch}/of/{self._world.rank}")


def _is_long_ago(turn: Held, now: Held) -> bool:
    return turn.deal == now.deal and turn.turn <= now.turn - TURNS_KEPT


def deal_again(world: World, before: World | None = None) -> None:
    """Have data that are dealt in this world dealt again, if losses are survived there.

    `before` is the one that this worker was expelled from.
    """
    if world.survives and world.size > 1 and world.dealing is None:
        world.dealing = Again(world, None if before is None else dealing(before))
        world.dealing.epoch_over()  # perhaps, and before it could be told


def again_here() -> Again | None:
    """Who deals again in the present world, if losses are survived there."""
    world = present_world()
    return world.dealing if world is not None and isinstance(world.dealing, Again) else None


def dealing(world: World) -> Again:
    """Who deals again here, where losses are survived."""
    assert isinstance(world.dealing, Again)
    return world.dealing
