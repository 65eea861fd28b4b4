"""One round on one worker: giving the pile, exchanging it, logging the result.

All that a worker's program (engine.py) and its backgrounds (background.py) share is here, under one
lock: whoever runs the round, the program in a lockstep or a background, does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from offbeat.rounds import told
from offbeat.rounds.arrivals import Arrivals
from offbeat.rounds.bells import Bells
from offbeat.rounds.exchange import Early, SumOverAll, Write
from offbeat.rounds.header import AWAY, HERE, PAUSED, Share, Shares
from offbeat.rounds.layout import Layout
from offbeat.rounds.log import Log
from offbeat.rounds.pile import Pile, Piles
from offbeat.rounds.round import Merge, Round
from offbeat.rounds.start import Measured, Rules, Start
from offbeat.worlds.base import Activity, World

GRACE_S = 2e-3
"""How long a worker may be away, or wait, before it says so."""


class Service:
    """What a worker's program and its backgrounds share, and one round of it."""

    # Python is slow to find the attributes of an object that has more than 30 of them without this.
    __slots__ = (
        *("_activities", "_arrivals", "_bells", "_choose", "_exchange", "_name", "_place"),
        *("_outbox", "_quorum", "_rules", "_state", "_world", "gave_s", "log", "piles"),
        *("early", "fold", "followed", "may_fold", "merge", "weight", "write"),
        *("_awaits", "_exchange_s", "_given", "_notes", "_offset", "_on_time_for", "_rates"),
        *("_resumes_after", "_seconds", "_started", "_steps", "_waits_since", "_went_on_for"),
        *("_called", "_comes", "_folding", "_overdue", "_says_later", "_stirred", "_taking"),
        *("_absent", "_away_since", "_in_round", "_presence", "_serving", "_stays", "_told_away"),
        *("_elsewhere", "_ended", "_ends", "_made", "_paused", "_resumed", "_settled"),
        *("_wanted", "_wants_room"),
    )

    def __init__(
        self,
        world: World,
        name: str,
        place: str,
        layout: Layout,
        rules: Rules,
        notes: int,
        rates: int,
        choose: Callable[[Measured], int] | None,
    ) -> None:
        self._world = world
        self._name = name
        self._place = place
        self._rules = rules
        self._choose = choose
        # `choose` sets after every round how many must be on time for the next one, from what was
        # measured; it must be the same pure function on every worker.
        header = told.header(world.size, len(layout.slots), notes + 3 * (choose is not None), rates)
        self._exchange = SumOverAll(world, world.channel(place), layout, header)
        self.write: Write | None = None
        """Writes what a round takes when it takes it; else `contribute` does."""
        self.weight: Callable[[Pile], float] = lambda pile: pile.samples
        self.early: Early | None = None
        self.fold: Callable[[Iterator[Round]], None] | None = None
        """Applies rounds to something other than the parameters: see log.py."""
        self.may_fold: Callable[[Round], bool] = lambda each: each.bad is None
        """Whether a round can be folded: not one that makes the program raise."""
        self.followed = False
        """Whether the program wants to hear of every round, and what it does then is its own."""
        self.merge: Merge | None = None
        """What the program does with a round; the others' first rounds may end before it is set."""
        self._state = world.condition(f"a round of {name!r}")
        # All below is shared by the program and the backgrounds, under _state.
        self.piles = Piles(layout, header.room)
        self.log = Log(self.piles)
        self._taking = self._folding = False
        self._wants_room = False  # a background waits for the program to take from the log
        self.gave_s = world.now()
        """When a round took this worker's pile for the last time."""
        self._given: tuple[Pile, Share] | None = None  # taken from the program, for the round
        self._steps = 0  # contributions of this worker
        self._made = 0  # of them, those that it has not told the others of
        self._ends = False  # it asks all to end their loops
        self._started = 0  # rounds that have taken this worker's pile
        self._resumes_after = 0  # rounds that the program's next gradient will know of, at least
        self._went_on_for = 0  # the round that its next gradient is on time for, or a later one
        self._on_time_for = -1
        self._comes = False  # it has come to the next round of a lockstep
        self._says_later = False  # it arrives when it has applied the rounds at hand
        self._rates: tuple[float, ...] = ()
        self._notes: tuple[float, ...] = ()
        self._seconds = self._exchange_s = 0.0
        self._called = False  # a round has started, and waits for the program's next boundary
        self._awaits = 0  # rounds that the program waits for; until then it piles up nothing
        self._waits_since: float | None = None
        self._overdue = False
        self._presence = HERE
        self._away_since: float | None = None
        self._told_away = False
        self._elsewhere = False  # away, and in nothing of its own: it waits for others
        self._stays = False  # in lockstep: it is known to be away for longer
        self._absent: dict[int, int] = {}  # in lockstep: who is away, from which round on
        self._wanted = -1  # in lockstep: the round that somebody has asked for
        self._in_round = False  # in lockstep: the program is in the next round
        self._serving = False  # in lockstep: the background is, since the program is away
        self._settled = False  # all are paused, or have left
        self._paused = 0
        self._resumed = ""  # the key of the latest pause
        self._ended = False  # all have left
        self._offset = 0  # rounds before this engine began, less those without a number
        self._quorum = told.quorum_of(rules.quorum, world.size)
        self._arrivals = Arrivals(world, place, rules, self._first_start())
        self._bells = Bells(world, place)
        self._outbox: list[tuple[Start, int]] = []  # arrivals that the messenger has to announce
        self._stirred = False  # the messenger has something to look at
        self._activities: list[Activity] = []

    # --- what must be there for the next round ---------------------------------------------

    def _first_start(self) -> Start:
        everyone = self._world.members
        due = frozenset(everyone if self._rules.max_staleness_rounds == 0 else ())
        return self._start_of(0, everyone, due)

    def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> Start:
        # A worker that has left brings nothing more: the samples may never be enough.
        least = self._rules.least_samples if len(active) == self._world.size else 0.0
        return told.start(round, self._quorum, self._offset + round, active, due, least)

    # --- arrivals; under lock ----------------------------------------------------------------

    def _knows_start(self) -> bool:
        """Whether it is known who must be there for the next round."""
        return self._started == self.log.completed and not self._ended and not self._settled

    def _has_arrived(self) -> bool:
        """Whether the others have been told that this worker is on time for the next round."""
        return self._knows_start() and self._arrivals.on_time

    def _to_say(self) -> tuple[Start, int]:
        """What the program has to announce itself, if anything; or stir the messenger to do so."""
        rules, arrivals = self._rules, self._arrivals
        if rules.lockstep:
            return arrivals.start, 0
        if not rules.by_messenger:
            return arrivals.start, self._arrives()
        if rules.bounded or self._outbox or self._standing() != arrivals.announced:
            self._stir()
        return arrivals.start, 0

    def _arrives(self) -> int:
        """What to add to the counter of arrivals, which is to follow."""
        arrivals, before = self._arrivals, self._arrivals.announced
        arrivals.announced = self._standing()
        return arrivals.announced - before

    def _standing(self) -> int:
        """What the counter of arrivals should hold of this worker."""
        arrivals, presence = self._arrivals, self._presence
        if not self._knows_start() or self._rules.lockstep:
            return arrivals.announced
        since = self._waits_since
        return arrivals.standing(
            on_time=self._on_time_for == arrivals.start.round or self._overdue,
            waits=since is not None and self._world.now() >= since + GRACE_S,
            given=bool(arrivals.start.due) and self.piles.micro_batches > 0,
            presence=HERE if presence == AWAY and not self._told_away else presence,
        )

    def _stir(self) -> None:
        """Have the messenger look; under lock."""
        self._stirred = True
        self._state.notify_all()

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
            self._in_round = False
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
