"""One round on one worker: giving the pile, exchanging it, logging the result.

Whoever runs the round, the program in a lockstep or a background, does the same.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from offbeat.errors import EpochOver
from offbeat.rounds import told
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED, Share, Shares
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Round
from offbeat.rounds.state import State


class Service(State):
    """One round, and the rounds that the program takes from the log."""

    __slots__ = ()

    # --- one round ---------------------------------------------------------------------------

    def _take_part(self, number: int) -> None:
        """Give the pile to a round that has started, exchange it, and log the result."""
        with self._state:
            self._await_room()
            if self._given is None:
                self._set_aside()
            if self._started == number:
                self._count_round()
            assert self._given is not None
            (pile, share), self._given, self._aside = self._given, self._aside, None
        pile.carry(self._carried.next(self._offset + number))
        began_s, launches = self._world.now(), self._exchange.launches
        filled = pile.micro_batches if self.write is None else pile.written
        if not filled and not launches:
            pile.zero()
        if self._choose is not None:
            square = pile.square / pile.samples**2 if pile.samples else 0.0
            share.notes = (*share.notes, self._seconds, square, self._exchange_s)
        if self.early is not None:
            share.changed = self.early.keep(pile, here=share.presence == HERE)
        while pile.unseen:  # by the program: it has better things to do
            assert launches is not None, "where none are launched, the program has looked"
            launches.see_and_launch(pile)
        share.bad = pile.bad_slot

        try:
            shares = self._exchange.reduce(pile, share)
            while shares.changed:
                assert self.early is not None, "nobody else launches buckets early"
                self.early.restore(pile)
                shares = self._exchange.reduce(pile, self._share_again(share, pile))
        except EpochOver:  # the round is made again, with the same; or somebody has its result
            with self._state:  # and what the program has set aside meanwhile waits
                self._given, self._aside = (pile, share), self._given
            raise
        self._complete(number, pile, shares, began_s)

    def _complete(self, number: int, pile: Pile, shares: Shares, began_s: float) -> None:
        """The exchange is over."""
        if self.early is not None:
            self.early.finished()
        if self._world.survives:
            self._keep_result(pile)
            self._note_given(shares)
        ended_s = self._world.now()
        self._exchange_s = ended_s - began_s
        self._log_round(number, pile, shares, began_s, ended_s)
        self._world.round_over()

    def _note_given(self, shares: Shares) -> None:
        """Know what everybody has given, in case that it is lost."""
        for rank, samples in enumerate(shares.samples):
            self._given_by[rank] += samples
        for rank, (turn, batch) in enumerate(shares.marks):
            if turn:
                self._marks[rank] = int(turn), int(batch)

    def _keep_result(self, pile: Pile) -> None:
        """Have what was summed up until the next round is, for who may have missed it.

        The next one's exchange has everybody, so by then nobody has. Some merges change what they
        read: of those that move models a copy is kept.
        """
        self._latest_group, self._latest_part = pile.group, pile.part
        if self.write is None:
            self.piles.keep(pile)
            self._latest = pile.tensors
        else:
            tensors = pile.tensors
            if [each.shape for each in tensors] != [each.shape for each in self._latest]:
                self._latest = [torch.empty_like(each) for each in tensors]
            torch._foreach_copy_(self._latest, tensors)

    def _await_room(self) -> None:
        """Wait for a program that must come for rounds before there is room for one; under lock."""
        if self.log.full and self.merge and self._is_awaited():
            self._wants_room = True
            self._state.wait_for(lambda: not self.log.full or not self._is_awaited() or self._over)
            self._wants_room = False

    def _is_awaited(self) -> bool:
        """Say whether the program is sure to come for rounds, without any further one."""
        away, here = self._presence == AWAY, self._presence == HERE
        if self.log.completed < self._awaits:
            return False
        if self.followed and not self._elsewhere and (away or here):
            return away or not self._rules.lockstep
        return self._taking and not away and not self._rules.lockstep

    def _give(self) -> None:
        """Take the pile for the round that has started; under lock."""
        self._set_aside()
        self._count_round()

    def _set_aside(self, arrives: bool = False) -> None:
        """Take the pile for the next round, or nothing, if it must stay; under lock."""
        keeps = self._keeps_pile() and not arrives
        if keeps:
            pile = self.piles.nothing()
        else:
            if self.piles.micro_batches or self.land is not None:
                self._write(self.piles.growing)
            pile = self.piles.take()
            self.gave_s = self._world.now()
        given = pile, self._share_of(pile, self._started, keeps)
        if self._given is None:
            self._given = given
        else:  # the round before is to be made again
            self._aside = given
        self._notes = ()
        self._carried.tell(self._presence == LEFT)
        pile.made, pile.after = 0 if keeps else self._made, self.made
        if not keeps:
            self._made = 0

    def _count_round(self) -> None:
        """A round has started, and has what this worker gives; under lock."""
        self._started += 1
        self._overdue = False
        if self._rules.overdue_s is not None:
            self._stir()

    def _keeps_pile(self) -> bool:
        """Whether rounds take nothing from this worker: it has not come, or all pause.

        Where a round takes what was computed since the last one, whatever it is, a checkpoint cuts
        nothing short.
        """
        comes = not self._rules.at_arrival or self._may_flush()
        return not comes or (self._rules.keeps and self._presence == PAUSED)

    def _may_flush(self) -> bool:
        """Whether this worker has left, and gives all that it has; of fragments, if all travel."""
        return self._presence == LEFT and self._carried.flushes

    def _prepare_flush(self) -> None:
        """Of fragments, others than the latest have moved: an empty pile is none; under lock."""
        if self._carried.in_fragments and self._weighed and not self.piles.samples:
            pile = self.piles.growing
            pile.samples, pile.micro_batches = self._weighed, 1

    def _write(self, pile: Pile) -> None:
        """Fill the buffer at the last moment; under lock.

        Not without samples: such a round may hold none at all, and then nobody applies it. But
        where rounds land, all give to each.
        """
        if self.write is None or pile.written:
            return
        if pile.samples or self.land is not None:
            self.piles.furnish(pile)
            number = self._offset + self._started + self._is_set_aside()
            number, pile.buckets = self._carried.given(number, self._presence == LEFT)
            launches = self._exchange.launches if self._in_round else None
            weight, buckets = self.weight(pile), pile.buckets
            for _ in self.write(number, pile.flats, weight, self._in_round, buckets):
                if launches is not None:  # the next bucket is written while this one travels
                    launches.see_and_launch(pile)
            pile.written = True
            pile.unseen = launches is None and self.land is None  # a model has been looked at

    def _share_of(self, pile: Pile, round: int, keeps: bool) -> Share:
        """What this worker's part of the header says."""
        known, samples = max(self.log.taken, self._resumes_after), pile.samples
        weight = self.weight(pile) if samples else 0.0
        if keeps and self._presence == HERE:
            weight = self._weight_of_late()
        self._weighed = weight or self._weighed
        return Share(
            round=self._offset + round,
            samples=samples,
            presence=self._presence,
            age=0 if self._presence != HERE else round + 1 - known,
            stale=0 if pile.oldest_round is None else round - pile.oldest_round + 1,
            notes=self._notes,
            micro_batches=pile.micro_batches if samples else 0,
            weight=weight,
            stale_samples=samples * round - pile.known_samples,
            made=0 if keeps else self._made,
            ends=self._ends,
            rates=self._rates,
            used=pile.used,
            mark=(0, 0) if keeps else self._mark,
        )

    def _weight_of_late(self) -> float:
        """What a worker that has not come counts in the mean of moves: as much as if it had.

        So that nothing counts more for being early: a round of half the workers moves the base by
        half of what it would with all of them, and the other half's moves will do so, too.
        """
        return self.weight(self.piles.growing) if self.piles.samples else self._weighed

    def _share_again(self, share: Share, pile: Pile) -> Share:
        """The same part, of a pile that was filled anew."""
        share.samples, share.used, share.bad = pile.samples, pile.used, pile.bad_slot
        share.weight = self.weight(pile) if pile.samples else 0.0
        share.micro_batches = pile.micro_batches if pile.samples else 0
        share.changed = False
        return share

    def _log_round(
        self, round: int, pile: Pile, shares: Shares, began_s: float, ended_s: float
    ) -> None:
        """Append the round, and draw from its header what the next one needs."""
        size, rules = self._world.size, self._rules
        samples, number = shares.total_samples, self._offset + round
        away, paused = shares.away, shares.paused
        divisor = samples / pile.unit
        if rules.divisor != "samples":
            divisor = shares.weight if rules.divisor == "moves" else float(shares.members)
        completed = told.round_of(shares, number, divisor)
        if pile.buckets is not None:
            completed = completed.but(buckets=pile.buckets)
        if pile.group:
            completed = completed.but(group=pile.group, divisor=float(len(pile.group)))
        if self._choose is not None and completed.ranks:
            self._quorum = told.quorum_of(self._choose(told.measured(completed, pile)), size)
        due = shares.due(rules.max_staleness_rounds)
        flushing = self._carried.ended(shares.left)
        active = shares.active or flushing
        following = self._start_of(round + 1, active, due) if active else None
        over = not shares.here and not away and not flushing
        kept: Pile | None = pile
        mine = {"began_s": began_s, "ended_s": ended_s, "mine": pile.made, "after": pile.after}
        if self.land is not None:
            completed, kept = self.land(completed, pile.flats), None
        with self._state:  # for as short as can be: the program may want to go on
            if over and not samples and (rules.keeps or not paused):
                self.log.pass_by()  # all have left, or pause, and nobody brought anything
                self._offset -= 1  # it has no number
                self.piles.pass_by()
                self.piles.give_back(pile)
            else:
                self.log.append(completed, kept, **mine)
                if kept is None:
                    self.piles.give_back(pile)
            if over:
                self._paused = paused
                self._settled, self._ended = bool(paused), not paused
            self._in_round = False
            if self._absent or away:
                self._note_absent(round, away)
            self._note_here(round, shares.here)
            if following is not None:
                self._arrivals.begin(following)
            said = self._to_say()
            if not self._rules.lockstep:
                self.piles.prepare()
            self._state.notify_all()
        self._say(said)

    def _note_here(self, round: int, here: tuple[int, ...]) -> None:
        """See joining.py; under lock."""

    def _note_absent(self, round: int, away: tuple[int, ...]) -> None:
        """In lockstep: who was away in a round is so until a later one says otherwise."""
        for rank, since in list(self._absent.items()):
            if since <= round and rank not in away:
                del self._absent[rank]
        self._absent.update(dict.fromkeys(away, round + 1))

    # --- the log -------------------------------------------------------------------------------

    def _take(self, waited_s: float, last: int | None = None) -> Generator[Round, None, None]:
        with self._state:
            adopts = self._begin_taking()
        yield from self._taken(adopts, waited_s, last)

    def _begin_taking(self) -> bool:
        """Have nothing folded from here on; say whether something was. Under lock."""
        if self._folding:
            self._state.wait_for(lambda: not self._folding)
        self._taking = True
        return bool(self.log.adopt())

    def _taken(self, adopts: bool, waited_s: float, last: int | None) -> Iterator[Round]:
        """Have the reader adopt what was folded, then yield all rounds after it.

        Only then is the log looked at: if it is empty, the background may fold what comes next.

            program      adopts ────────────┐ finds the log empty: no longer `_taking`
            background   four more rounds ──────────────────────────── folds them
        """
        try:
            if adopts and self.merge is not None:
                self.merge.adopt()
            with self._state:
                taken = self._next(waited_s, last)
            while taken is not None:
                yield taken
                with self._state:
                    taken = self._next(0.0, last)
        finally:  # not under lock: the reader may have let go of it, wherever that is noticed
            self._taking = False

    def _next(self, waited_s: float, last: int | None) -> Round | None:
        """Take back the round that was lent, if any, and lend the next one; None for the end.

        Under lock.
        """
        log = self.log
        log.returned()
        if self._wants_room:
            self._state.notify_all()
        if not log or (last is not None and log.taken >= last):
            self._taking = False
            return None
        log.taken += 1
        return log.next(self.merge, waited_s, self.spares and not self.followed)
