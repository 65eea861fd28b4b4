"""A worker is lost: the others go on.

The world says that an epoch is over (worlds/base.py): whatever waits among its members raises. So
this worker's backgrounds end, and its program comes out of a lockstep. Then it *regroups*: it meets
those who are left, on a channel of the new epoch, and all tell which rounds they have completed.

    worker 0   round 7 ──┐ applies 7, gives to 8 ──✗ regroups: sends 7 ───┐ round 8 again ──┐
    worker 1   round 7 ──────────────────────────✗ regroups: takes 7 ─────┐ round 8 ────────┐
    worker 2   round 7 ──✗ lost

A round that somebody has completed holds what the lost worker gave. Who has missed its end gets
the sum from one who has it. A round that nobody has completed is made again, with what the others
gave to it, which they have kept: not one gradient of theirs is lost, and none counts twice.

The lost worker keeps its place in headers, where it is said to be gone; nobody waits for it again.
Everything else goes on as it is: piles, the log, whoever is on time, away, paused or has left. Who
had said so says it again, since the counters of arrivals begin anew. A second loss in the middle of
all this ends the new epoch as well, and all begins anew.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from offbeat.errors import EpochOver, WorkerLostError
from offbeat.rounds import told
from offbeat.rounds.arrivals import Arrivals
from offbeat.rounds.bells import Bells
from offbeat.rounds.header import AWAY, read
from offbeat.rounds.joining import Joining
from offbeat.worlds.base import Channel

logger = logging.getLogger("offbeat")


class Members(Joining):
    """The part of an engine that lives through a loss, or a join."""

    __slots__ = ()
    marks = True
    """Whether rounds carry the marks of those who give to them: see data/again.py."""

    def begin(self) -> None:
        """Start the backgrounds: the others' rounds may come from here on."""
        if self._world.survives:
            self._world.regroups.append(self)
            self.tell_step()
            self._world.control.add(f"{self._place}/tells/{self._world.rank}", 1)
        super().begin()

    def tell_step(self) -> None:
        """Leave word of what this worker has computed: if it is lost, nobody else knows."""
        if self._world.dealing is not None:
            self._mark = self._world.dealing.mark()
        key = f"{self._place}/computed/{self._world.rank}"
        self._world.control.set(key, repr(self._computed).encode())

    def epoch_over(self) -> None:
        """The members have changed: have everything come out of the old epoch, and regroup."""
        with self._state:
            self._over, self._lacking = True, ()
            begins, self._regrouping = not self._regrouping, True
            self._state.notify_all()
        if begins:
            self._world.spawn(f"members of {self._name}", self._regroup)

    def _regroup(self) -> None:
        world, began_s = self._world, self._world.now()
        while True:
            with self._state:
                self._state.wait_for(lambda: not self._running)
            epoch = world.epoch
            with suppress(EpochOver):
                self._begin_anew(epoch)
                with self._state:
                    if world.epoch == epoch:
                        self._over = self._regrouping = False
                        if not self._ended:
                            self._begin_backgrounds()
                        if self._lacks and not self._ended:
                            self._spawn(f"state of {self._name}", self._await_gift)
                        self._state.notify_all()
                        break
        self._count_lost()
        self._say_changed(world.now() - began_s)
        self._say_again()

    def given_marks(self, epoch: int) -> list[tuple[int, int]] | None:
        """Which of their data all have given, those who are lost too; all agree on it.

        None if these rounds do not say, or are over.
        """
        with self._state:
            self._state.wait_for(lambda: not self._regrouping or self._world.epoch != epoch)
            return None if self._ended or not self.marks else list(self._marks)

    def _begin_anew(self, epoch: int) -> None:
        """Meet the others who are left, and be as far as they are."""
        world, members = self._world, self._world.members
        channel = world.channel(f"{self._place}/{epoch}")
        if channel.epoch != epoch:
            raise EpochOver("another worker was lost meanwhile")
        # Who lacks the state that rounds are applied to begins anew, whatever it knows of them.
        knows = -1 if self._lacks else self.log.completed
        mine = torch.tensor([knows, self._started, bool(self._latest)])
        all_of = torch.empty(len(members), 3, dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        completed, started, has = all_of.T.tolist()
        new = [rank for rank, knows in zip(members, completed, strict=True) if knows < 0]
        if len(new) == len(members):
            raise self._nobody_has_state()
        self._give_missed(channel, completed, has)
        self._tell_new(channel, [rank for rank in members if rank not in new], new)
        with self._state:
            self._without_lost(members)
            self._with_new(new)
        if self._ended:
            return
        exchange = self._make(channel)
        place = f"{self._place}/{epoch}"
        with self._state:
            start = self._start_of(*self._following)
            self._arrivals = Arrivals(world, place, self._rules, start)
            self._bells = Bells(world, place)
            self._exchange = exchange
            self._outbox, self._called, self._wanted = [], False, -1
        if max(started) > max(completed) and world.rank == members[0] and not self._rules.lockstep:
            self._arrivals.go()

    def _give_missed(self, channel: Channel, completed: list[int], has: list[int]) -> None:
        """Have the latest round completed by everybody, if anybody has, but for who is new."""
        newest, ranks = max(completed), channel.members
        known = zip(ranks, completed, has, strict=True)
        have = [rank for rank, n, result in known if result and n == newest]
        behind = [rank for rank, n in zip(ranks, completed, strict=True) if 0 <= n < newest]
        if self._world.rank in behind:
            self._take_missed(channel, have[0], newest)
        elif behind and self._world.rank == have[0]:
            works = [channel.send(each, rank) for rank in behind for each in self._latest]
            for work in works:
                work.wait()

    def _take_missed(self, channel: Channel, source: int, newest: int) -> None:
        began_s, number = self._world.now(), self.log.completed
        assert number == newest - 1, "whoever completes a round has the others' part of it"
        with self._state:
            assert self._given is not None, "this worker's part is in that round"
            (pile, _), result = self._given, self.piles.nothing()
            if self._exchange.launches is not None:
                self._exchange.launches.missed()
        result.buckets = pile.buckets
        for each in result.tensors:
            channel.recv(each, source).wait()
        with self._state:
            self._given = None
            pile.flats, result.flats = result.flats, pile.flats
            result.blank = False
            self.piles.give_back(result)
        margin = pile.flats.margin
        shares = read(self._header, margin.read(), margin.kind)
        self._complete(number, pile, shares, began_s)

    def _without_lost(self, members: tuple[int, ...]) -> None:
        """Have nobody wait for who is lost; under lock."""
        number, active, due = self._following
        active = tuple(rank for rank in active if rank in members)
        self._following = number, active, due & frozenset(members)
        self._absent = {rank: since for rank, since in self._absent.items() if rank in members}
        if isinstance(self._rules.quorum, float) and self._choose is None:
            self._quorum = told.quorum_of(self._rules.quorum, len(members))
        if isinstance(self._rules.period_quorum, float):
            self._period_quorum = told.quorum_of(self._rules.period_quorum, len(members))
        if not active and not self._ended:  # all others have left
            self._settled, self._ended = False, True
            self._state.notify_all()

    def _count_lost(self) -> None:
        """Count what lost workers had computed, as they told, and given to no round."""
        world = self._world
        for rank in self._missed.intersection(world.members):  # another one in its place
            self._missed.discard(rank)
            self._given_by[rank] = 0.0
        for rank in {*range(world.size)}.difference(world.members, self._missed):
            with suppress(EpochOver):  # then later
                if world.control.add(f"{self._place}/tells/{rank}", 0):
                    told = float(world.control.get(f"{self._place}/computed/{rank}"))
                    self.lost_samples += max(told - self._given_by[rank], 0.0)
                self._missed.add(rank)

    def _nobody_has_state(self) -> WorkerLostError:
        return WorkerLostError(
            f"{self._world.loss}, and nobody is left who has the state that "
            f"{len(self._world.members)} joining workers need: start again from a checkpoint"
        )

    def _say_changed(self, took_s: float) -> None:
        """One line for a person, and one for the records."""
        world = self._world
        left, size, number = len(world.members), world.size, self.knows_rounds
        kind, go = ("joined", "train") if world.loss.endswith("joined") else ("lost", "go on")
        if world.rank == world.members[0]:
            logger.warning(
                "%s; %d of %d workers %s, after %.3f s; %g samples are lost in all",
                *(world.loss, left, size, go, took_s, self.lost_samples),
            )
        if world.records is not None:
            facts = {"words": world.loss, "workers": left, "took_s": took_s, "round": number}
            facts["lost_samples"] = self.lost_samples
            world.records({"kind": kind, "rank": world.rank, "at_s": world.now(), **facts})

    def _say_again(self) -> None:
        """Tell the others what they have been told in the epoch before."""
        if self._ended:
            return
        with self._state:
            rings = self._rules.lockstep and self._presence == AWAY and self._told_away
            self._stir()
            said = self._to_say()
        with suppress(EpochOver):
            if rings:
                self._bells.ring("away", self.log.completed)
        self._say(said)

    @property
    def knows_rounds(self) -> int:
        """Rounds that the program knows of, those before a checkpoint included."""
        return self._offset + self.log.taken
