"""A worker joins: it takes part in rounds first, and gets what they have made so far meanwhile.

To the members that is a change of epoch, as a loss is (members.py); but it waits for the end of a
round, so that none is made again. The joiner regroups with them, and hears who must be there for
the next round. From then on it takes part in all rounds, as one that is away: it gives nothing,
holds up nobody, and its log has their results. It *lacks* the state that they are to be applied to:
model, optimizer, and so on.

    worker 0   round 7 ──┐ computes ─── round 8 ──┐ applies 8, copies its state ── round 9 ──────
               background  regroups ──┐                                  sends it ────┐
    worker 2   joins ───── regroups ──┐ round 8 ──┐ ─────────── (round 9) ────────────┐ takes it,
                                                                                        applies 9

The first worker that comes to the end of a step copies its own state for it; a background sends the
copy. It is of some round, k; the joiner drops the rounds up to k from its log, applies those after,
and is here. So nobody waits for what travels.

In a lockstep all wait for the one that copies. So where the state is large, several give a stripe
of it each (stripes.py). They need not ask each other which, nor of which round: that is the first
round of the new epoch, which nobody has made when all regroup. Its header says who was here, the
same to all: these have come to it in their programs, so that each will hold what it has made, and
nothing after it, at some moment, and copies its stripe then. Who is away is not waited for.

    worker 0   round 8 ──┐ applies 8, copies a half ── round 9 ───────────────────────────
    worker 1   round 8 ──┐ applies 8, copies a half ── round 9 ───────────────────────────
               backgrounds               send both halves ────┐
    worker 2   (round 8) ──┐ ────────── (round 9) ────────────┐ takes them, applies 9

Where nobody waits for the one that copies, one gives all: others come to the same round when they
like, and a joiner would wait for the slowest of them. So it is, too, where all programs have ended
their loops, or wait for the joiner: there may be no further round; and where several things are
attached, so that a round of one may have to wait for another. Who gives, one or several, is what
the first proposal in the store says.

If a worker is lost meanwhile, the one that gives among them, all regroup; then who still lacks the
state begins anew, and anyone else may give it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.errors import EpochOver, NobodyToJoinError
from offbeat.rounds.header import AWAY
from offbeat.rounds.packed import pack, unpack
from offbeat.rounds.presence import Presence
from offbeat.rounds.stripes import MOST_GIVERS, Gift, chosen, copy_stripe, ends_of, size_of
from offbeat.worlds.base import Channel, Control

Describe = Callable[[int], Gift]
"""What a joiner of this rank needs, which is not copied yet; called between two steps."""

_PIECE_BYTES = 2**24


class _Donation(NamedTuple):
    """What a worker has to do for one joiner."""

    rank: int
    """Who joins."""
    givers: tuple[int, ...]
    taken: int
    """The rounds that are in what it copies."""
    epoch: int
    control: Control


class Joining(Presence):
    """The part of an engine that joins, and has others join."""

    __slots__ = ()
    joins = True
    """Whether a worker can join these rounds."""

    # --- the joiner ------------------------------------------------------------------------

    def begin_to_join(self) -> None:
        """Be away, and give nothing to any round, until the state is here."""
        self._touch_memory()
        with self._state:
            # Nothing is to be folded onto what is not there.
            self._joining = self._lacks = self._taking = True
            self._presence, self._told_away, self._stays = AWAY, True, True
            self._away_since = self._world.now()
            self._state.notify_all()

    def _touch_memory(self) -> None:
        """Have in use what the first round needs: all who wait for this worker there wait less."""
        if self._exchange.launches is not None:
            self._exchange.launches.prepare()
            if not self.piles.written_late:
                self.piles.growing.flats.touch()

    def await_state(self) -> tuple[Tensor, Tensor]:
        """Block until others have given their state; what they have packed, and what is apart."""
        with self._state:
            self._state.wait_for(lambda: self._gift is not None or self._ended)
            gift, self._gift = self._gift, None
        if gift is None:
            raise self._nobody_to_join()
        return gift

    def _nobody_to_join(self) -> NobodyToJoinError:
        return NobodyToJoinError(
            f"worker {self._world.rank} has joined when all others had ended their loops: there is "
            "nothing left to do"
        )

    def joined(self) -> None:
        """The program has taken over the state, and all rounds since: be here."""
        with self._state:
            self._joining = False
        self._come_back()

    def _await_gift(self) -> None:
        """Take the state from whoever gives it; in the background."""
        world, key = self._world, self._gives(self._world.rank, self._in_epoch)
        said = world.control_in_epoch().get(f"{key}/by").decode()
        givers = tuple(int(rank) for rank in said.split())
        channel = world.channel(key, (*givers, world.rank), self._in_epoch)
        told = torch.empty(3, dtype=torch.int64)
        channel.recv(told, givers[0]).wait()
        own_bytes, size, taken = told.tolist()
        own = torch.empty(own_bytes, dtype=torch.uint8)
        channel.recv(own, givers[0]).wait()
        common = torch.empty(size, dtype=torch.uint8)
        stripes = {}
        for number, giver in enumerate(givers):
            begin, end = ends_of(size, number, len(givers))
            if begin < end:
                stripes[giver] = common[begin:end]
        channel.exchange({}, stripes).wait()
        with self._state:  # the givers may have come further than this worker's background
            self._state.wait_for(lambda: self.log.completed >= taken or self._over)
            if self._over:
                return
            self.log.know(taken)
            self.held_samples = self._held()
            self._lacks, self._gift = False, (own, common)
            self._state.notify_all()
        channel.close()

    def _held(self) -> float:
        """What rounds to come hold of this rank, which gives nothing before it is here."""
        return 0.0

    # --- those who take it in --------------------------------------------------------------

    @property
    def is_asked_for_state(self) -> bool:
        """Whether a worker that joins lacks what this one could give."""
        return self._is_asked()

    def give_stripe(self) -> None:
        """The program is about to apply a round: give a stripe of what the one before has made.

        If that is the round that all give stripes of, and the step has not come to its end yet.
        """
        if self._lacking and self.give_now is not None:
            with self._state:
                gives = self._is_asked() and self._gives_stripe()
            if gives:
                self.give_now()

    def give_state(self, describe: Describe, *, alone: bool) -> None:
        """Give one's own state to those who lack it, or a stripe, unless another worker does.

        All of it, if it is large, only if `alone`: then no round may follow. Called by the program,
        between two steps; the copy that it makes travels in the background.
        """
        with self.undisturbed():
            with self._state:
                givers, epoch = self._who_gives(alone), self._in_epoch
                if not givers or self._world.epoch != epoch:
                    return
                lacking, self._lacking = self._lacking, ()
                taken, control = self.log.taken, self._world.control_in_epoch()
            with suppress(EpochOver):
                for rank in lacking:
                    donation = _Donation(rank, givers, taken, epoch, control)
                    # A stripe is copied before anybody is asked: it is short, and rarely in vain.
                    if len(givers) > 1 or self._is_agreed(donation):
                        self._give_to(donation, describe(rank))

    def _who_gives(self, alone: bool) -> tuple[int, ...]:
        """Who gives the state now, this worker among them; nobody, if it does not; under lock."""
        if self._over or self.log.folded or self.log.taken < self._lacking_since:
            return ()  # a joiner's log has not all rounds that the parameters lack
        if self._gives_stripe():
            return self._givers
        mine, passed = (self._world.rank,), self.log.taken > self._lacking_since
        if alone or self.striped is None or (passed and not self._givers):
            return mine
        if passed:  # without this worker
            self._lacking, self._room = (), None
        return ()

    def _gives_stripe(self) -> bool:
        """Whether the parameters are what this worker is to give a stripe of; under lock."""
        at_it = self.log.taken == self._lacking_since + 1 and not self.log.folded
        return at_it and self._world.rank in self._givers

    def _note_here(self, round: int, here: tuple[int, ...]) -> None:
        """A round has completed, with these in their loops: perhaps they give; under lock."""
        if self._lacking and self.striped is not None and round == self._lacking_since:
            self._givers = chosen([rank for rank in here if rank not in self._lacking])

    def _give_to(self, donation: _Donation, gift: Gift) -> None:
        world, (rank, givers, taken, epoch, control) = self._world, donation
        key, size = self._gives(rank, epoch), size_of(gift.common)
        begin, end = ends_of(size, givers.index(world.rank), len(givers))
        stripe = self._take_room(end - begin)
        copy_stripe(gift.common, begin, end, stripe)
        own = pack(gift.state, gift.common) if world.rank == givers[0] else None

        def give() -> None:
            if len(givers) > 1 and not self._is_agreed(donation):
                return
            channel = self._world.channel(key, (*givers, rank), epoch)
            if own is not None:
                control.set(f"{key}/by", _words(givers))
                channel.send(torch.tensor([own.numel(), size, taken]), rank).wait()
                channel.send(own, rank).wait()
            if begin < end:
                channel.send(stripe, rank).wait()
            channel.close()

        self._spawn(f"state for worker {rank}", give)

    def _is_agreed(self, donation: _Donation) -> bool:
        """Whether these give to a joiner: they do, if no others have proposed themselves before."""
        key, proposal = self._gives(donation.rank, donation.epoch), _words(donation.givers)
        return donation.control.set_once(key, proposal) == proposal

    def _gives(self, rank: int, epoch: int) -> str:
        return f"{self._place}/{epoch}/state/{rank}"

    def _make_room(self) -> None:
        """Have memory for a stripe that is in use already; in the background.

        The first write to new memory takes several times as long as another one. By pieces: who
        regroups waits for this.
        """
        assert self.striped is not None
        with self._state:
            others = len(self._world.members) - len(self._lacking)
        begin, end = ends_of(self.striped(), 0, min(max(others, 1), MOST_GIVERS))
        room = torch.empty(end - begin, dtype=torch.uint8)
        for place in range(0, len(room), _PIECE_BYTES):
            if self._over:
                return
            room[place : place + _PIECE_BYTES].zero_()
        with self._state:
            self._room = room if self._lacking else None

    def _take_room(self, size: int) -> Tensor:
        with self._state:
            room, self._room = self._room, None
        if room is None or room.numel() < size:
            return torch.empty(size, dtype=torch.uint8)
        return room[:size]

    # --- regrouping ------------------------------------------------------------------------

    def _tell_new(self, channel: Channel, knows: list[int], new: list[int]) -> None:
        """Have those who are new know as much of the rounds as the others do."""
        if self._world.rank in new:
            told = torch.empty(1, dtype=torch.int64)
            channel.recv(told, knows[0]).wait()
            facts = torch.empty(int(told), dtype=torch.uint8)
            channel.recv(facts, knows[0]).wait()
            self._hear_facts(unpack(facts))
        elif new and self._world.rank == knows[0]:
            packed = pack(self._facts())
            for rank in new:
                channel.send(torch.tensor([packed.numel()]), rank).wait()
                channel.send(packed, rank).wait()

    def _facts(self) -> dict[str, Any]:
        return {
            **self._books(),
            "following": self._following,
            "quorum": self._quorum,
            "chosen": None if self._choose is None else vars(self._choose),
            "absent": self._absent,
            "carried": self._carried.told(),
        }

    def _books(self) -> dict[str, Any]:
        """How far rounds are, whoever starts them; who gave what to them, and what was lost."""
        return {
            "completed": self.log.completed,
            "offset": self._offset,
            "ended": self._ended,
            "marks": self._marks,
            "given_by": self._given_by,
            "missed": self._missed,
            "lost_samples": self.lost_samples,
        }

    def _hear_books(self, facts: dict[str, Any]) -> None:
        """Under lock."""
        self.log.begin_at(facts["completed"])
        self._started = self._steps = facts["completed"]
        self._offset, self._ended = facts["offset"], facts["ended"]
        self._marks, self._given_by = facts["marks"], facts["given_by"]
        self._missed, self.lost_samples = facts["missed"], facts["lost_samples"]
        self._latest = []

    def _hear_facts(self, facts: dict[str, Any]) -> None:
        with self._state:
            for given in (self._given, self._aside):  # of rounds that are others by now
                if given is not None:
                    self.piles.give_back(given[0])
            self._given = self._aside = None
            self._hear_books(facts)
            self._following = facts["following"]
            self._quorum, self._absent = facts["quorum"], facts["absent"]
            if self._choose is not None:
                vars(self._choose).update(facts["chosen"])
            self._carried.hear(facts["carried"])

    def _with_new(self, new: list[int]) -> None:
        """Count on those who are new, and lack the state: they are away; under lock."""
        number, active, due = self._following
        if new and not self._ended:
            self._following = number, tuple(sorted({*active, *new})), due - set(new)
            self._absent |= dict.fromkeys(new, number) if self._rules.lockstep else {}
            self._paused = tuple(rank for rank in self._paused if rank not in new)
        self._note_lacking(new)

    def _note_lacking(self, new: list[int]) -> None:
        """Have the program give its state to those who are new; under lock."""
        mine = self._lacks or self._ended
        self._lacking, self._lacking_since = () if mine else tuple(new), self.log.completed
        self._givers = ()


def _words(givers: tuple[int, ...]) -> bytes:
    return " ".join(map(str, givers)).encode()
