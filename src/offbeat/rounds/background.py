"""What a worker's backgrounds do for its rounds: serve them, and carry messages.

Two activities beside the program. The *server* takes part in round after round. The *messenger*
says what the program has to say, so that it never waits for the control plane; arrives on the
program's behalf when a deadline has passed; and tells the others of a worker that is away. Being
away for less than a few milliseconds is nobody's business: it costs no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from offbeat.errors import EpochOver
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED
from offbeat.rounds.round import Round
from offbeat.rounds.service import Service
from offbeat.rounds.state import GRACE_S
from offbeat.worlds.base import Activity

PATIENCE_S = 2e-2
"""How long a worker that is away may be wanted by a lockstep before its background comes."""


class Background(Service):
    """The half of an engine that runs beside the program."""

    __slots__ = ()

    def begin(self) -> None:
        """Start the backgrounds: the others' rounds may come from here on."""
        self._begin_backgrounds()

    def _begin_backgrounds(self) -> None:
        server = self._answer_bells if self._rules.lockstep else self._serve
        self._activities = [
            self._spawn(f"rounds of {self._name}", server),
            self._spawn(f"messages of {self._name}", self._carry_messages),
        ]

    def _spawn(self, name: str, run: Callable[[], None]) -> Activity:
        """Do something in the background that ends with the epoch."""
        with self._state:
            self._running += 1

        def live() -> None:
            try:
                with suppress(EpochOver):
                    run()
            finally:
                with self._state:
                    self._running -= 1
                    self._state.notify_all()

        return self._world.spawn(name, live)

    # --- the messenger -----------------------------------------------------------------------

    def _deadline(self) -> float | None:
        """When the messenger has something to do, though nobody stirs it."""
        moments = []
        if self._rules.overdue_s is not None and not self._overdue:
            moments.append(self.gave_s + self._rules.overdue_s)
        if self._away_since is not None and not self._told_away:
            moments.append(self._away_since + GRACE_S)
        if self._waits_since is not None and not self._rules.lockstep:
            moment = self._waits_since + GRACE_S
            if self._world.now() < moment:
                moments.append(moment)
        if self._arrivals.opens_at is not None:
            moments.append(self._arrivals.opens_at)
        return min(moments, default=None)

    def _carry_messages(self) -> None:
        world, arrivals = self._world, self._arrivals
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._stirred or self._ended or self._over, until=self._deadline()
                )
                if self._ended or self._over:
                    return
                self._stirred, now = False, world.now()
                overdue_s = self._rules.overdue_s
                if overdue_s is not None and now >= self.gave_s + overdue_s and not self._overdue:
                    self._overdue = True
                    self._state.notify_all()
                rings = False
                if self._away_since is not None and now >= self._away_since + GRACE_S:
                    rings = self._rules.lockstep and not self._told_away
                    self._told_away = True
                number, opens = self.log.completed, arrivals.opens_at
                if opens is not None and now < opens:
                    opens = None
                if opens is not None:
                    arrivals.opens_at = None
                start, samples, arrival = arrivals.start, self._to_report(), self._arrives()
                outbox, self._outbox = [*self._outbox, (start, arrival)], []
            if rings:
                self._bells.ring("away", number)
            if opens is not None:
                arrivals.open(start)
            arrivals.report(start, samples)
            for message in outbox:
                arrivals.announce(*message)

    def _to_report(self) -> int:
        """What to add to the counter of samples; under lock.

        Nobody insists on more samples once somebody is away, or all wait.
        """
        if not self._knows_start():
            return 0
        away = self._presence in (PAUSED, LEFT) or self._told_away
        content = self._world.size if away else int(self._awaits > self._started)
        return self._arrivals.samples(self.piles.samples, content)

    # --- the server --------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended:
            number = self.log.completed
            self._arrivals.await_start(self._told_to_be_last)
            if self._rules.at_boundary:
                with self._state:
                    self._called = True
                    self._state.notify_all()
                    self._state.wait_for(lambda: self._may_give() or self._over)
                    self._called = False
                    if self._over:
                        return
            self._take_part(number)
            self._keep_short()
            members = self._world.members
            if self._world.rank == members[number % len(members)] and number > 0:
                self._arrivals.forget(number - 1)

    def _told_to_be_last(self) -> None:
        with self._state:
            self._arrivals.only_missing()

    def _may_give(self) -> bool:
        waits = self.log.completed < self._awaits
        return self._given is not None or waits or self._presence != HERE or self._overdue

    def _run_in_lockstep(self) -> None:
        """The program comes to the next round of a lockstep, and runs it."""
        coming: int | None = None
        while True:
            with self._state:
                # Which write what this round takes.
                self._state.wait_for(lambda: not (self._serving or self._folding or self._over))
                number = self.log.completed
                coming = number if coming is None else coming
                if self._ended or number > coming:  # its result came from somebody else
                    return
                # Who has left needs no round: it is there for those who do.
                self._in_round = self._presence == HERE
                asks = self._in_round and bool(self._absent)
                self._running += 1
            try:
                if self._presence in (PAUSED, LEFT):
                    self._give_if_asked()
                if asks:
                    self._bells.want(number)
                self._take_part(number)
                return
            except EpochOver:
                continue
            finally:
                with self._state:
                    self._running -= 1
                    if self._over:
                        self._state.notify_all()

    def _make_broken_round(self) -> None:
        """Make a round again that the background was in, while the program was away.

        An epoch has ended in the middle of it. The background serves only those who are away.
        """
        with self._state:
            self._state.wait_for(lambda: not (self._serving or self._over))
            broken = self._started > self.log.completed and not self._ended
        if broken:
            self._run_in_lockstep()

    def _give_if_asked(self) -> None:
        """The program serves the others, with all rounds applied: one who joins may ask it.

        For the state of something else that is attached, perhaps, which is not served meanwhile.
        """
        if self.give_now is not None:
            self.give_now()

    def _is_asked(self) -> bool:
        """Whether somebody who joins lacks what this worker could give."""
        return bool(self._lacking) and not self._over

    def _answer_bells(self) -> None:
        """In lockstep: take part in rounds while the program is away."""
        while True:
            why, number, rank = self._bells.hear()
            if why == "end":
                return
            with self._state:
                following, asks = self.log.completed, False
                if why == "away":
                    self._absent[rank] = number
                    asks = self._in_round and number == following
                else:
                    self._wanted = max(self._wanted, number)
                # It may be wanted before it is away: its own bell tells it to look again.
                if self._presence == AWAY and self._wanted == following:
                    # The program may have come and made the round, and be away again.
                    stays = self._stays_away()
                    self._serving = stays and self.log.completed == following
                number = following
            if asks:
                self._bells.want(number)
            if self._serving:
                try:
                    self._take_part(number)
                finally:
                    with self._state:
                        self._serving = False
                        self._state.notify_all()
                self._keep_short()

    def _stays_away(self) -> bool:
        """Say whether the program is really away, for a round that is wanted; under lock.

        Or only slow to return from where the others have been, too: it comes to the round then,
        and lockstep is as if nobody had been away.
        """
        if not self._stays:
            moment = self._world.now() + PATIENCE_S
            self._state.wait_for(lambda: self._presence != AWAY, until=moment)
            self._stays = self._presence == AWAY
        return self._stays

    # --- a log that does not grow --------------------------------------------------------------

    def _keep_short(self) -> None:
        """Fold the oldest rounds of a log that the program does not take from."""
        if self.fold is None or not self.log.too_long:  # nobody else makes it longer
            return
        with self._state:
            if not self.log.too_long or not self._may_fold_now():
                return
            self._folding = True
        self.fold(self._to_fold())
        with self._state:
            self._folding = False
            self._state.notify_all()

    def _may_fold_now(self) -> bool:
        """Say whether the program is in no need of what folding changes; under lock."""
        taking = self._taking or self._in_round
        return not taking and not self._ended and (self._elsewhere or not self.followed)

    def _to_fold(self) -> Iterator[Round]:
        while True:
            with self._state:
                if not self.log or not self.may_fold(self.log.oldest) or not self._may_fold_now():
                    return
                oldest = self.log.next(self.merge)
                self.log.folded += 1
            yield oldest
            with self._state:
                self.log.returned()

    def _join_backgrounds(self) -> None:
        if self._rules.lockstep:
            with suppress(EpochOver):  # then all hear that
                self._bells.want_nothing()
                if self._world.rank == self._world.members[0]:
                    self._bells.ring("end")
        for activity in self._activities:
            activity.join()
        with self._state:
            self._state.wait_for(lambda: not self._over)
