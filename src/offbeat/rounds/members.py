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
from offbeat.rounds.handing_on import HandingOn
from offbeat.rounds.header import AWAY, HERE

logger = logging.getLogger("offbeat")


class Members(HandingOn):
    """The part of an engine that lives through a loss, or a join."""

    __slots__ = ()

    def begin(self) -> None:
        """Start the backgrounds: the others' rounds may come from here on."""
        if self._world.survives:
            self.tell_step()
            self._world.control.kept().add(f"{self._place}/tells/{self._world.rank}", 1)
        if self._in_epoch == self._world.epoch:
            super().begin()
        if self._world.survives:
            self._world.regroups.append(self)
            self._say_through(self._in_epoch)
            self.epoch_over()  # perhaps, and before this engine could be told

    def tell_step(self) -> None:
        """Leave word of what this worker has computed: if it is lost, nobody else knows."""
        if self._world.dealing is not None:
            self._mark = self._world.dealing.mark()
        self._leave_word()

    def _leave_word(self) -> None:
        key = f"{self._place}/computed/{self._world.rank}"
        self._world.control.kept().set(key, self._word().encode())

    def _word(self) -> str:
        """What the others need to know if this worker is lost: how much it has computed.

        How much of that was given, they know themselves.
        """
        return repr(self._computed)

    def _lost_with(self, rank: int, word: str) -> float:
        """What a worker that is lost had not given, by its last word."""
        return max(float(word) - self._given_by[rank], 0.0)

    def tell_outcomes(self) -> None:
        """Have the program hear what has become of what it gave, as far as this worker knows."""

    @property
    def makes_rounds(self) -> bool:
        """Whether a round is under way, or soon will be: the program is in its loop.

        Not between two epochs: all meet in the newest one.
        """
        here = self._presence == HERE and not self._ended
        return not self._over and (here or self._started > self.log.completed)

    def epoch_over(self) -> None:
        """The members have changed: have everything come out of the old epoch, and regroup."""
        with self._state:
            if self._in_epoch == self._world.epoch:
                return
            self._over, self._lacking, self._room = True, (), None
            if self._world.loss not in self._news[-1:]:
                self._news.append(self._world.loss)
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
                        self._in_epoch = epoch
                        if not self._ended:
                            self._begin_backgrounds()
                        if self._lacks and not self._ended:
                            self._spawn(f"state of {self._name}", self._await_gift)
                        if self._lacking and self.striped is not None:
                            self._spawn(f"room of {self._name}", self._make_room)
                        self._state.notify_all()
                        break
        self._count_lost()
        self._say_through(epoch)
        self._say_changed(world.now() - began_s)
        self._say_again()

    def has_counted(self, epoch: int) -> bool:
        """Whether it has, what was lost when this epoch began."""
        return self._counted >= epoch

    def _say_through(self, epoch: int) -> None:
        with self._state:
            self._counted = max(self._counted, epoch)  # the next one may be through already
            self._state.notify_all()
        if all(each.has_counted(epoch) for each in list(self._world.regroups)):
            self._world.through("rounds", epoch)

    def given_marks(self, epoch: int) -> list[tuple[int, int]] | None:
        """Which of their data all have given, those who are lost too; all agree on it.

        None if these rounds are over.
        """
        with self._state:
            self._state.wait_for(lambda: self._counted >= epoch or self._world.epoch != epoch)
            return None if self._ended else list(self._marks)

    def await_regrouping(self, epoch: int) -> None:
        """Wait until the members of this epoch make rounds here, or it is over."""
        with self._state:
            self._state.wait_for(lambda: not self._regrouping or self._world.epoch != epoch)

    def _begin_anew(self, epoch: int) -> None:
        """Meet the others who are left, and be as far as they are."""
        world, members = self._world, self._world.members
        channel = world.channel(f"{self._place}/{epoch}", epoch=epoch)
        # Who lacks the state that rounds are applied to begins anew, whatever it knows of them.
        knows = -1 if self._lacks else self.log.completed
        mine = torch.tensor(self._tells(knows))
        all_of = torch.empty(len(members), len(mine), dtype=mine.dtype)
        channel.all_gather(mine, all_of).wait()
        completed, started, *_, joining = all_of.T.tolist()
        new = [rank for rank, knows in zip(members, completed, strict=True) if knows < 0]
        if len(new) == len(members):
            raise self._nobody_has_state()
        self._give_missed(channel, all_of.tolist())
        self._tell_new(channel, [rank for rank in members if rank not in new], new)
        with self._state:
            self._without_lost(members)
            self._with_new(new)
        if self._ended:
            return
        exchange = self._make(channel)
        if exchange.launches is not None and self._exchange.launches is not None:
            exchange.launches.go_on_after(self._exchange.launches)
        exchange.without([rank for rank, new in zip(members, joining, strict=True) if new])
        place = f"{self._place}/{epoch}"
        with self._state:
            start = self._start_of(*self._following)
            self._arrivals = Arrivals(world, place, self._rules, start)
            self._bells = Bells(world, place)
            self._exchange = exchange
            self._outbox, self._called, self._wanted = [], False, -1
        # A round had started; or nobody is left to start one, since all others have left, or pause:
        # that in which all hear of it is still to come. In lockstep they come to it by themselves.
        starts = max(started) > max(completed) or not self._following[1]
        if starts and world.rank == members[0] and not self._rules.lockstep:
            self._arrivals.go()

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

    def _count_lost(self) -> None:
        """Count what lost workers had computed, as they told, and given to no round."""
        world = self._world
        for rank in self._missed.intersection(world.members):  # another one in its place
            self._missed.discard(rank)
            self._given_by[rank] = 0.0
        for rank in {*range(world.size)}.difference(world.members, self._missed):
            with suppress(EpochOver):  # then later
                told = world.control.add(f"{self._place}/tells/{rank}", 0)
                word = world.control.get(f"{self._place}/computed/{rank}") if told else b""
                with self._state:
                    if rank not in self._missed:  # by who regroups since another loss
                        self._missed.add(rank)
                        self.lost_samples += self._lost_with(rank, word.decode()) if told else 0.0

    def _nobody_has_state(self) -> WorkerLostError:
        return WorkerLostError(
            f"{self._world.loss}, and nobody is left who has the state that "
            f"{len(self._world.members)} joining workers need: start again from a checkpoint"
        )

    def _say_changed(self, took_s: float) -> None:
        """One line for a person, and one for the records."""
        world = self._world
        with self._state:
            words, self._news = "; ".join(self._news), []
        if not words:  # who regroups since another loss has said it
            return
        left, size, number = len(world.members), world.size, self.knows_rounds
        kind, go = ("joined", "train") if world.loss.endswith("joined") else ("lost", "go on")
        if world.rank == world.members[0]:
            logger.warning(
                "%s; %d of %d workers %s, after %.3f s; %g samples are lost in all",
                *(words, left, size, go, took_s, self.lost_samples),
            )
        if world.records is not None:
            facts = {"words": words, "workers": left, "took_s": took_s, "round": number}
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
