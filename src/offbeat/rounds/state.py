"""What a worker's program (engine.py) and its backgrounds (background.py) share, under one lock.

Also what follows from it at once: what must be there for the next round, and what this worker has
to say of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from torch import Tensor

from offbeat.errors import EpochOver
from offbeat.rounds import told
from offbeat.rounds.arrivals import Arrivals
from offbeat.rounds.bells import Bells
from offbeat.rounds.exchange import Early, Exchange, MakeExchange, Write
from offbeat.rounds.fragments import Carried, Fragments
from offbeat.rounds.header import AWAY, HERE, Share
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.log import Log
from offbeat.rounds.pile import Pile, Piles
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Merge, Round
from offbeat.rounds.start import Measured, Rules, Start
from offbeat.worlds.base import Activity, Channel, World

Land = Callable[[Round, Flats], Round]
"""Gets a round and its sum; returns what the log keeps of it."""
Said = tuple[Arrivals, Start, int]
GRACE_S = 2e-3
"""How long a worker may be away, or wait, before it says so."""


class State:
    """One worker's part in the rounds of one layout."""

    # Python is slow to find the attributes of an object that has more than 30 of them without this.
    __slots__ = (
        *(
            "_activities",
            "_arrivals",
            "_aside",
            "_bells",
            "_choose",
            "_exchange",
            "_name",
            "_place",
        ),
        *("_outbox", "_quorum", "_rules", "_state", "_world", "gave_s", "log", "piles"),
        *("early", "fold", "followed", "land", "may_fold", "merge", "weight", "write"),
        *("_awaits", "_exchange_s", "_given", "_notes", "_offset", "_on_time_for", "_rates"),
        *("_resumes_after", "_seconds", "_started", "_steps", "_waits_since", "_went_on_for"),
        *(
            "_called",
            "_comes",
            "_folding",
            "_overdue",
            "_says_later",
            "_stirred",
            "_taking",
        ),
        *("_absent", "_away_since", "_in_round", "_presence", "_serving", "_stays", "_told_away"),
        *("_elsewhere", "_ended", "_ends", "_made", "_paused", "_resumed", "_settled"),
        *("_carried", "_period_quorum", "_wanted", "_wants_room", "_weighed", "made"),
        *("_computed", "_counted", "_given_by", "_mark", "_marks", "_missed", "lost_samples"),
        "held_samples",
        *("_began_among", "_following", "_header", "_in_epoch", "_latest", "_latest_group"),
        *("_latest_part", "_make", "_over", "_regrouping", "_running"),
        *("_gift", "_lacking", "_lacking_since", "_joining", "_lacks", "give_now", "_news"),
        *("_givers", "_room", "spares", "striped"),
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
        exchange: MakeExchange,
    ) -> None:
        self._world = world
        self._name = name
        self._place = place
        self._rules = rules
        self._choose = choose
        # `choose` sets after every round how many must be on time for the next one, from what was
        # measured; it must be the same pure function on every worker.
        notes += 3 * (choose is not None)
        header = told.header(world.size, len(layout.slots), notes, rates, world.survives)
        self._make: Callable[[Channel], Exchange] = lambda channel: exchange(
            world, channel, layout, header
        )
        self._header = header
        channel, self._exchange = self._opened()
        self._began_among, self._in_epoch = channel.members, channel.epoch
        self.write: Write | None = None
        """Writes what a round takes when it takes it; else `contribute` does."""
        self.weight: Callable[[Pile], float] = lambda pile: pile.samples
        self.land: Land | None = None
        """Takes what every round has summed up, before anybody hears of it. Then this worker gives
        to every round, with samples or without: what it has written is its model."""
        self.early: Early | None = None
        self.fold: Callable[[Iterator[Round]], None] | None = None
        """Applies rounds to something other than the parameters: see log.py."""
        self.may_fold: Callable[[Round], bool] = lambda each: each.bad is None
        """Whether a round can be folded: not one that makes the program raise."""
        self.spares = False
        """Whether a result's sum is no more needed once the program has applied it."""
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
        self._aside: tuple[Pile, Share] | None = None  # and for the next, while that is made again
        self._steps = 0  # contributions of this worker
        self._made = 0  # of them, those that it has not told the others of
        self.made = 0
        """Steps that this worker has made in all, those before a checkpoint included."""
        self._ends = False  # it asks all to end their loops
        self._started = 0  # rounds that have taken this worker's pile
        self._resumes_after = 0  # rounds that the program's next gradient will know of, at least
        self._went_on_for = 0  # the round that its next gradient is on time for, or a later one
        self._on_time_for = -1
        fragments = None
        if rules.fragments != 1:
            fragments = Fragments(layout, rules.fragments, rules.quorum != "all")
        self._carried = Carried(fragments)
        self._weighed = 0.0  # what this worker counted in the latest mean of moves
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
        self._paused: tuple[int, ...] = ()  # who makes a checkpoint with this worker
        self._resumed: list[tuple[str, int]] = []  # where those paused have met, by epoch
        self._ended = False  # all have left
        self._counted = -1  # the epoch before which all that was lost is
        self._over = False  # the members have changed, and this engine is to begin anew
        self._regrouping = False  # it does so
        self._running = 0  # who is in the middle of something that ends with an epoch
        self._lacks = False  # it joins, and has not got what rounds are applied to
        self._joining = False  # its program has not taken that over yet
        self._gift: tuple[Tensor, Tensor] | None = None  # that, from the others
        self._lacking: tuple[int, ...] = ()  # who else does, since this round
        self._lacking_since = 0
        self._givers: tuple[int, ...] = ()  # who give a stripe each of what the next round makes
        self._room: Tensor | None = None  # memory for one
        self.striped: Callable[[], int] | None = None
        """How many bytes all can give stripes of, if the state is to be given so."""
        self._news: list[str] = []  # how the members have changed, which nobody has said yet
        self.give_now: Callable[[], None] | None = None
        """Gives this worker's state to who lacks it; called while its program serves the others."""
        self._latest: list[Tensor] = []  # what the latest round summed up, for who has missed it
        self._latest_group: tuple[int, ...] = ()  # over whom, if not over all
        self._latest_part = -1  # its name: the least rank of the group that it was meant to be of
        self._mark = 0, 0  # which of its data this worker has computed: see data/again.py
        self._marks = [(0, 0)] * world.size  # and which of theirs all have given
        self._computed = 0.0  # samples that this worker has put on its pile
        self._given_by = [0.0] * world.size  # and those that rounds hold of everybody
        self._missed: set[int] = set()  # lost workers whose lost samples are counted
        self.lost_samples = 0.0
        """What lost workers had computed, as they told, and given to no round."""
        self.held_samples = 0.0
        """Of who was lost in the place of this worker, which has joined: what was added up, and is
        in none of the rounds that others have applied for it."""
        self._offset = 0  # rounds before this engine began, less those without a number
        self._quorum, self._period_quorum = self._first_quorums()
        self._arrivals = Arrivals(world, place, rules, self._first_start())
        self._bells = Bells(world, place)
        self._outbox: list[tuple[Start, int]] = []  # arrivals that the messenger has to announce
        self._stirred = False  # the messenger has something to look at
        self._activities: list[Activity] = []

    def _opened(self) -> tuple[Channel, Exchange]:
        """Have all members make their exchange in the same epoch."""

        def make(epoch: int) -> tuple[Channel, Exchange]:
            channel = self._world.channel(self._place, epoch=epoch)
            return channel, self._make(channel)

        return self._world.together(f"{self._place}/opened", make)

    @property
    def behind(self) -> bool:
        """Whether a round has started whose result the program does not know yet."""
        return self._started > self.log.taken

    # --- what must be there for the next round ---------------------------------------------

    def _first_quorums(self) -> tuple[Quorum, Quorum]:
        """Fractions are of those who are there."""
        one, other = (
            told.quorum_of(
                it, len(self._began_among) if isinstance(it, float) else self._world.size
            )
            for it in (self._rules.quorum, self._rules.period_quorum)
        )
        return one, other

    def _first_start(self) -> Start:
        everyone = self._began_among
        due = frozenset(everyone if self._rules.max_staleness_rounds == 0 else ())
        return self._start_of(0, everyone, due)

    def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> Start:
        self._following = round, active, due
        # A worker that has left brings nothing more: the samples may never be enough.
        enough = len(active) == len(self._world.members)
        least = self._rules.least_samples if enough else 0.0
        number = self._offset + round
        quorum = self._period_quorum if self._rules.periodic(number) else self._quorum
        return told.start(round, quorum, number, active, due, least)

    # --- arrivals; under lock ----------------------------------------------------------------

    def _knows_start(self) -> bool:
        """Whether it is known who must be there for the next round."""
        return self._started == self.log.completed and not (self._ended or self._settled)

    def _has_arrived(self) -> bool:
        """Whether the others have been told that this worker is on time for the next round."""
        return self._knows_start() and self._arrivals.on_time

    def _to_say(self) -> Said:
        """What the program has to announce itself, if anything; or stir the messenger to do so."""
        rules, arrivals = self._rules, self._arrivals
        if rules.lockstep:
            return arrivals, arrivals.start, 0
        if not rules.by_messenger:
            return arrivals, arrivals.start, self._arrives()
        if rules.bounded or self._outbox or self._standing() != arrivals.announced:
            self._stir()
        return arrivals, arrivals.start, 0

    def _say(self, said: Said) -> None:
        """Announce it; not under lock."""
        arrivals, start, arrived = said
        if arrived:
            with suppress(EpochOver):  # it is said again in the next one
                arrivals.announce(start, arrived)

    def _arrives(self) -> int:
        """What to add to the counter of arrivals, which is to follow."""
        arrivals = self._arrivals
        before, arrivals.announced = arrivals.announced, self._standing()
        return arrivals.announced - before

    def _standing(self) -> int:
        """What the counter of arrivals should hold of this worker."""
        arrivals, presence, since = self._arrivals, self._presence, self._waits_since
        if self._rules.lockstep or not self._knows_start():
            return arrivals.announced
        if (presence == AWAY and not self._told_away) or self._is_set_aside():
            presence = HERE  # whatever its program does
        start = arrivals.start
        on_time = self._on_time_for == start.round or self._overdue
        silent = not arrivals.announced and not on_time and since is None
        if silent and presence == HERE and not start.due:
            return 0  # it computes
        return arrivals.standing(
            on_time=on_time,
            waits=since is not None and self._world.now() >= since + GRACE_S,
            given=bool(start.due) and self.piles.micro_batches > 0,
            presence=presence,
        )

    def _is_set_aside(self) -> bool:
        """Whether a pile waits for the next round to start: where it is given at arrival."""
        given = self._aside or self._given
        if not self._rules.at_arrival or given is None:
            return False
        return given[1].round >= self._offset + self._started  # else of one that has started

    def _stir(self) -> None:
        """Have the messenger look; under lock."""
        self._stirred = True
        self._state.notify_all()
