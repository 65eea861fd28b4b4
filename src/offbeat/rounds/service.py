"""One round on one worker: giving the pile, exchanging it, logging the result.

All that a worker's program (engine.py) and its backgrounds (background.py) share is here, under one
lock: whoever runs the round, the program in a lockstep or a background, does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import lru_cache

from offbeat.rounds.arrivals import Arrivals
from offbeat.rounds.bells import Bells
from offbeat.rounds.exchange import Early, SumOverAll, Write
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED, Header, Share, Shares
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.log import Log
from offbeat.rounds.pile import Pile, Piles
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Merge, Round
from offbeat.rounds.start import Measured, Rules, Start
from offbeat.worlds.base import Activity, World

GRACE_S = 2e-3
"""How long a worker may be away, or wait, before it says so."""


class Service:
    """What a worker's program and its backgrounds share, and one round of it."""

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
        header = Header(world.size, len(layout.slots), notes + 3 * (choose is not None), rates)
        self._exchange = SumOverAll(world, world.channel(place), layout, header)
        self.write: Write | None = None
        """Writes what a round takes when it takes it; else `contribute` does."""
        self.weight: Callable[[Pile], float] = lambda pile: pile.samples
        self.early: Early | None = None
        self.fold: Callable[[Iterator[Round]], None] | None = None
        """Applies rounds to something other than the parameters: see log.py."""
        self.may_fold: Callable[[Round], bool] = lambda each: each.bad is None
        """Whether a round can be folded: not one that makes the program raise."""
        self.merge: Merge | None = None
        """What the program does with a round; the others' first rounds may end before it is set."""
        self._state = world.condition(f"a round of {name!r}")
        # All below is shared by the program and the backgrounds, under _state.
        self.piles = Piles(layout, header.room)
        self.log = Log(self.piles)
        self._taking = self._folding = False
        self.gave_s = world.now()
        """When a round took this worker's pile for the last time."""
        self._given: tuple[Pile, Share] | None = None  # taken from the program, for the round
        self._steps = 0  # contributions of this worker
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
        self._quorum = Quorum.of(rules.quorum, world.size)
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
        return Start(round, *self._quorum.for_round(self._offset + round, active), due, least)

    # --- arrivals; under lock ----------------------------------------------------------------

    @property
    def _knows_start(self) -> bool:
        """Whether it is known who must be there for the next round."""
        return self._started == self.log.completed and not self._ended and not self._settled

    @property
    def _has_arrived(self) -> bool:
        """Whether the others have been told that this worker is on time for the next round."""
        return self._knows_start and self._arrivals.on_time

    def _to_say(self) -> tuple[Start, int]:
        """What the program has to announce itself, if anything."""
        if self._rules.by_messenger or self._rules.lockstep:
            self._stir()
            return self._arrivals.start, 0
        return self._arrivals.start, self._arrives()

    def _arrives(self) -> int:
        if not self._knows_start or self._rules.lockstep:
            return 0
        start, presence = self._arrivals.start, self._presence
        since = self._waits_since
        return self._arrivals.arrival(
            on_time=self._on_time_for == start.round or self._overdue,
            waits=since is not None and self._world.now() >= since + GRACE_S,
            given=self.piles.micro_batches > 0,
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

        def refill() -> Share:
            assert self.early is not None, "nobody else launches buckets early"
            self.early.restore(pile)
            return self._share_again(share, pile)

        shares = self._exchange.reduce(pile, share, refill)
        if self.early is not None:
            self.early.finished()
        self._exchange_s = self._world.now() - began_s
        self._log_round(number, pile, shares, began_s)

    def _give(self) -> None:
        """Take the pile for the round that has started; under lock."""
        if self._keeps_pile:
            pile = self.piles.nothing()
        else:
            if self.piles.micro_batches:
                self._write(self.piles.growing)
            pile = self.piles.take()
        self._given = pile, self._share_of(pile, self._started)
        self._notes = ()
        self._started += 1
        self.gave_s = self._world.now()
        self._overdue = False
        if self._rules.overdue_s is not None:
            self._stir()

    @property
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

    def _log_round(self, round: int, pile: Pile, shares: Shares, began_s: float) -> None:
        """Append the round, and draw from its header what the next one needs."""
        size, rules = self._world.size, self._rules
        samples, number = shares.total_samples, self._offset + round
        here, away, paused = shares.here, shares.away, shares.paused
        divisor = {"workers": float(size), "moves": shares.weight}.get(
            rules.divisor, samples / pile.unit
        )
        completed = _told(shares, number, divisor).but(
            sum=pile.flats, began_s=began_s, ended_s=self._world.now()
        )
        if self._choose is not None and completed.ranks:
            self._quorum = Quorum.of(self._choose(_measured(completed, pile)), size)
        active, limit = shares.active, rules.max_staleness_rounds
        computing = here if here or away else paused
        due = () if limit is None else [rank for rank in computing if shares.age[rank] >= limit]
        following = self._start_of(round + 1, active, frozenset(due)) if active else None
        over = not here and not away
        with self._state:  # for as short as can be: the program may want to go on
            if over and not samples and (rules.even or not paused):
                self.log.pass_by()  # all have left, or pause, and nobody brought anything
                self._offset -= 1  # it has no number
                self.piles.pass_by()
                self.piles.give_back(pile)
            else:
                self.log.append(completed, pile)
            if over:
                self._paused = len(paused)
                self._settled, self._ended = bool(paused), not paused
            self._in_round = False
            for rank, since in list(self._absent.items()):
                if since <= round and rank not in away:
                    del self._absent[rank]
            self._absent.update(dict.fromkeys(away, round + 1))
            if following is not None:
                self._arrivals.begin(following)
            said = self._to_say()
            if not self._rules.lockstep:
                self.piles.prepare()
            self._state.notify_all()
        self._arrivals.announce(*said)

    # --- the log -------------------------------------------------------------------------------

    def _take(self, waited_s: float, last: int | None = None) -> Generator[Round, None, None]:
        with self._state:
            self._state.wait_for(lambda: not self._folding)
            self._taking = True
            adopts = bool(self.log.adopt())
            self.log.returned()  # by a reader that has not read to the end
        if adopts and self.merge is not None:
            self.merge.adopt()
        try:
            while True:
                with self._state:
                    if not self.log or (last is not None and self.log.taken >= last):
                        self._taking = False
                        self._state.notify_all()
                        return
                    taken = self.log.next()
                    self.log.taken += 1
                    self._state.notify_all()
                yield taken.but(merge=self.merge, waited_s=waited_s)
                with self._state:
                    self.log.returned()
                waited_s = 0.0
        finally:  # not under lock: the reader may have let go of it, wherever that is noticed
            self._taking = False


_NOTHING = Flats(Layout((), ()))


@lru_cache(maxsize=8)
def _told(shares: Shares, number: int, divisor: float) -> Round:
    """What a round says to everyone alike: made once for all the workers of a virtual run."""
    samples = shares.total_samples
    return Round(
        round=number,
        sum=_NOTHING,
        samples_by_rank=shares.samples,
        divisor=divisor,
        used=shares.used,
        rates=shares.rates,
        staleness_rounds=max(shares.stale - 1, 0),
        mean_staleness_rounds=shares.stale_samples / samples if samples else 0.0,
        micro_batches=shares.micro_batches,
        notes_by_rank=shares.notes,
        here=len(shares.presence) - shares.presence.count(LEFT),
        bad=shares.bad,
    )


def _measured(completed: Round, pile: Pile) -> Measured:
    """What a round shows of those who took part; their last three notes."""
    last = [notes[-3:] for notes in completed.notes_by_rank]
    exchanges = [exchange_s for _, _, exchange_s in last if exchange_s]
    return Measured(
        round=completed.round,
        seconds=tuple(seconds for seconds, _, _ in last),
        samples=tuple(completed.samples_by_rank[rank] for rank in completed.ranks),
        squares=tuple(last[rank][1] for rank in completed.ranks),
        mean_square=pile.square / completed.samples**2,
        exchange_s=min(exchanges, default=0.0),
    )
