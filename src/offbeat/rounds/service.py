"""One round on one worker: giving the pile, exchanging it, logging the result.

Whoever runs the round, the program in a lockstep or a background, does the same.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from offbeat.rounds import told
from offbeat.rounds.header import AWAY, HERE, PAUSED, Share, Shares
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
                self._give()
            assert self._given is not None
            (pile, share), self._given = self._given, None
        began_s = self._world.now()
        filled = pile.micro_batches if self.write is None else pile.written
        if not filled and not self._exchange.launched:
            pile.zero()
        if self._choose is not None:
            square = pile.square / pile.samples**2 if pile.samples else 0.0
            share.notes = (*share.notes, self._seconds, square, self._exchange_s)
        if self.early is not None:
            share.changed = self.early.keep(pile, here=share.presence == HERE)
        while pile.unseen:  # by the program: it has better things to do
            self._exchange.see_and_launch(pile)
        share.bad = pile.bad_slot

        shares = self._exchange.reduce(pile, share)
        while shares.changed:
            assert self.early is not None, "nobody else launches buckets early"
            self.early.restore(pile)
            shares = self._exchange.reduce(pile, self._share_again(share, pile))
        if self.early is not None:
            self.early.finished()
        ended_s = self._world.now()
        self._exchange_s = ended_s - began_s
        self._log_round(number, pile, shares, began_s, ended_s)

    def _await_room(self) -> None:
        """Wait for a program that must come for rounds before there is room for one; under lock."""
        if self.log.full and self.merge and self._is_awaited():
            self._wants_room = True
            self._state.wait_for(lambda: not self.log.full or not self._is_awaited())
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
        if self._keeps_pile():
            pile = self.piles.nothing()
        else:
            if self.piles.micro_batches:
                self._write(self.piles.growing)
            pile = self.piles.take()
        self._given = pile, self._share_of(pile, self._started)
        self._notes = ()
        if not self._keeps_pile():
            self._made = 0
        self._started += 1
        self.gave_s = self._world.now()
        self._overdue = False
        if self._rules.overdue_s is not None:
            self._stir()

    def _keeps_pile(self) -> bool:
        """Whether rounds take nothing from this worker: a checkpoint must not cut one short.

        Where a round takes what was computed since the last one, whatever it is, there is nothing
        to cut.
        """
        return self._rules.even and self._presence == PAUSED

    def _write(self, pile: Pile) -> None:
        """Fill the buffer at the last moment; under lock.

        Not without samples: such a round may hold none at all, and then nobody applies it.
        """
        if self.write is not None and pile.samples and not pile.written:
            self.piles.furnish(pile)
            number, weight = self._offset + self._started, self.weight(pile)
            for _ in self.write(number, pile.flats, weight, self._in_round):
                if self._in_round:  # the next bucket is written while this one travels
                    self._exchange.see_and_launch(pile)
            pile.written, pile.unseen = True, not self._in_round

    def _share_of(self, pile: Pile, round: int) -> Share:
        """What this worker's part of the header says."""
        known = max(self.log.taken, self._resumes_after)
        return Share(
            samples=pile.samples,
            presence=self._presence,
            age=0 if self._presence != HERE else round + 1 - known,
            stale=0 if pile.oldest_round is None else round - pile.oldest_round + 1,
            notes=self._notes,
            micro_batches=pile.micro_batches if pile.samples else 0,
            weight=self.weight(pile) if pile.samples else 0.0,
            stale_samples=pile.samples * round - pile.known_samples,
            made=0 if self._keeps_pile() else self._made,
            ends=self._ends,
            rates=self._rates,
            used=pile.used,
        )

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
            divisor = shares.weight if rules.divisor == "moves" else float(size)
        completed = told.round_of(shares, number, divisor)
        if self._choose is not None and completed.ranks:
            self._quorum = told.quorum_of(self._choose(told.measured(completed, pile)), size)
        due = shares.due(rules.max_staleness_rounds)
        following = self._start_of(round + 1, shares.active, due) if shares.active else None
        over = not shares.here and not away
        with self._state:  # for as short as can be: the program may want to go on
            if over and not samples and (rules.even or not paused):
                self.log.pass_by()  # all have left, or pause, and nobody brought anything
                self._offset -= 1  # it has no number
                self.piles.pass_by()
                self.piles.give_back(pile)
            else:
                self.log.append(completed, pile, began_s, ended_s)
            if over:
                self._paused = len(paused)
                self._settled, self._ended = bool(paused), not paused
            self._in_round = self._runs = False
            if self._absent or away:
                self._note_absent(round, away)
            if following is not None:
                self._arrivals.begin(following)
            said = self._to_say()
            if not self._rules.lockstep:
                self.piles.prepare()
            self._state.notify_all()
        self._arrivals.announce(*said)

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
        if adopts and self.merge is not None:
            self.merge.adopt()
        try:
            while (taken := self._next(waited_s, last)) is not None:
                yield taken
                waited_s = 0.0
        finally:  # not under lock: the reader may have let go of it, wherever that is noticed
            self._taking = False

    def _next(self, waited_s: float, last: int | None) -> Round | None:
        """Take back the round that was lent, if any, and lend the next one; None for the end."""
        with self._state:
            self.log.returned()
            if self._wants_room:
                self._state.notify_all()
            if not self.log or (last is not None and self.log.taken >= last):
                self._taking = False
                return None
            self.log.taken += 1
            return self.log.next(self.merge, waited_s)
