"""The partial all-reduce: a round starts when its quorum is there, and everyone takes part.

Every worker has a background activity that serves round after round. When a round starts, it takes
what the worker's pile holds at that moment, be it fresh, late or nothing, and joins an ordinary
all-reduce of it. The worker's own program only adds to the pile and reads results.

    worker 0   compute ──┐ on time: arrives, starts round 7 ────┐ applies 7
    worker 1   compute ──────┐ on time: waits ──────────────────┐ applies 7
    worker 2   compute ──────────────────────────────────────────────┐ late: adds to its pile,
               background takes part in round 7 with what was there    applies 7, goes on

Results form a *replicated log*: every worker takes every round's record, once and in order. So
replicas that apply them stay bit-identical, however late some are.

The protocol. All that workers must agree on for round r they know from the header of round r-1:
who is still active, who is a candidate (see quorum.py), and who is *due*. A worker is due if its
gradient would become too stale by missing this round. Round r starts when enough candidates are
on time (their gradient is of the parameters after round r-1, and they wait for round r) and all
due workers have added something to their pile. Each arrival is counted once, in one counter of the
control plane that has a field for each kind. The arrival that completes what is needed sets the
key that every background activity waits for. Where one candidate suffices and nobody is due, the
arrival sets the key itself: no counting, one message.

A worker that has left is counted too, until a header has told everyone: a round also starts when
all candidates are there or have left. The round in which all are leaving is the last.

Variations, in `Rules`. With `hold`, a round that has started takes a worker's pile only between
two micro-batches: when the program hands it over, or waits. So no gradient of older parameters
comes after it, and the program need not wait either: it may hand over, and go on computing.

    worker 0   compute ──┐ ready ─ compute ──┐ hands over, applies 6, goes on ───────────
    worker 1   compute ──────────────┐ ready: round 7 starts; hands over, applies 6 ─────
               background                    └── all-reduce of 7 ──┘

The last to come must know that it is, or it would begin another micro-batch before it hears that
the round has started. So whoever sees that one arrival is missing tells all: the one that it is
hands over with its arrival.

A second activity, the messenger, then sends what the program has to say, so that it never waits
for the control plane; and it arrives on the program's behalf when a deadline has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from operator import mul
from typing import Any, Literal

import torch

from offbeat.errors import ClosedError, DisagreementError
from offbeat.rounds.agreement import agree, different_rates
from offbeat.rounds.header import Share, Shares, in_parts, room, written
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Round, first_bad
from offbeat.rounds.rules import DUE, LEFT, ON_TIME, Measured, Rules, Start
from offbeat.worlds.base import World

# The field above the counter of samples: workers that ask for no more of them.
_CONTENT = 1 << 40
_HERE, _LEFT_FOR_GOOD, _PAUSED = range(3)  # what a worker is, in the header

_SMALL = 2**16  # numbers that are zeroed in no time

Arrival = Literal["on time", "late", "dropped"]


class PartialAllReduce:
    """A partial all-reduce over one layout, from its first round to its last.

    `choose`, if given, sets after every round how many must be on time for the next one, from what
    was measured; it must be the same pure function on every worker.
    """

    def __init__(
        self,
        world: World,
        name: str,
        layout: Layout,
        rules: Rules,
        choose: Callable[[Measured], int] | None = None,
    ) -> None:
        self._quorum = Quorum.of(rules.quorum, world.size)
        self._rules = rules
        self._choose = choose
        self.write: Callable[[int, Flats, float], None] | None = None
        """Writes what a round takes, times samples, when it takes it; else `contribute` does."""
        # Not the name: a name may be used again, or be another one on some workers.
        self._place = f"partial/{next(world.numbers)}"
        agree(
            world,
            self._place,
            {
                "the name": name,
                **{
                    rule.replace("quorum", "the quorum"): str(it)
                    for rule, it in asdict(rules).items()
                },
                "tensors": [
                    f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}"
                    for name, tensor in zip(layout.names, layout.parameters, strict=True)
                ],
            },
        )
        self._world = world
        self._name = name
        self._layout = layout
        self._tells_the_last = rules.hold and not rules.bounded
        self._kinds_of_keys = ["go", "arrived", *(["samples"] if rules.bounded else [])]
        self._kinds_of_keys += ["one missing"] if self._tells_the_last else []
        self._small = sum(bucket.numel for bucket in layout.buckets) <= _SMALL
        self._channel = world.channel(self._place)
        for bucket in layout.buckets:  # make the groups now, not in the first round
            self._channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()
        self._state = world.condition(f"a round of {name!r}")
        # All below is shared by the program and the background activities, under _state.
        self._pile: Pile | None = None  # made, or taken from the spare ones, when there is need
        self.gave_s = world.now()
        """When a round took this worker's pile for the last time."""
        self._spare: list[Pile] = []
        self._given: tuple[Pile, Share] | None = None  # taken from the program, for the round
        self._log: deque[tuple[Round, Pile]] = deque()
        self._disagreement: DisagreementError | None = None
        self._stopped = False
        self._taken = 0  # rounds that the program has taken from the log
        self._started = 0  # rounds that have taken this worker's pile
        self._completed = 0
        self._resumes_after = 0  # rounds that the program's next gradient will know of, at least
        self._went_on_for = 0  # the round that its next gradient is on time for, or a later one
        self._on_time_for = -1
        self._delay = 0
        self._says_later = False  # it arrives when it has applied the rounds at hand
        self._knew = 0  # rounds that the latest gradient knew of
        self._learning_rates = 0.0
        self._seconds = 0.0
        self._called = False  # a round has started, and waits for the program's next boundary
        self._awaits = 0  # rounds that the program waits for; until then it piles up nothing
        self._overdue = False
        self._alarm: float | None = None
        self._away = _HERE
        self._settled = False  # all are paused, or have left
        self._paused = 0
        self._ended = False  # all have left
        self._offset = 0  # rounds before this collective began: those of a checkpoint
        self._start = self._first_start()
        self._announced = 0  # what this worker has added to the current round's counter
        self._reported = 0  # what it has added to the counter of samples
        self._only_missing_in = -1  # the round of which everyone else is there
        self._outbox: list[tuple[Start, int]] = []  # arrivals that the messenger has to announce
        self._stirred = False  # the messenger has something to look at
        self._activities = [world.spawn(f"rounds of {name}", self._serve)]
        if rules.messenger:
            self._set_alarm()
            self._activities.append(world.spawn(f"messages of {name}", self._carry_messages))

    # --- what the worker's program calls ---------------------------------------------------

    def contribute(
        self,
        add: Callable[[Pile], None],
        *,
        arrive: bool = True,
        delay: int = 0,
        learning_rates: float = 0.0,
        seconds: float = 0.0,
        drop_late: bool = False,
    ) -> Arrival:
        """Have `add` put a gradient of the newest taken parameters on the pile, and arrive or not.

        Does not wait. It is late if a round has started since this worker went on to compute it;
        with `hold`, if more rounds than `delay` have started since those parameters. With
        `drop_late` it is then not added. With a `delay`, and without `hold`, the others hear of the
        arrival when `results` is through, or when the round before ends, if that is later: so that
        the background does not work while the program applies the round before.
        """
        with self._state:
            if self._away:
                raise ClosedError(f"a contribution to {self._name!r} after leaving it")
            in_time_for = self._taken + delay if self._rules.hold else self._went_on_for
            late = self._started > max(self._taken, in_time_for)
            if not (late and drop_late):
                before = self.pile.samples
                add(self.pile)
                self.pile.known_samples += (self.pile.samples - before) * self._taken
                if self.pile.oldest_round is None:
                    self.pile.oldest_round = self._taken
            self._learning_rates, self._seconds = learning_rates, seconds
            self._delay, self._knew = delay, self._taken
            # On time: wait for the round that will take this. Late: only for one under way. With a
            # delay: for one that is so much older; but who is late does not know how old its next
            # gradient will be, so where staleness has a bound it waits.
            on_time = arrive and not late
            self._went_on_for = self._started + on_time
            unbounded = self._rules.max_staleness_rounds is None
            self._resumes_after = self._went_on_for - (delay if on_time or unbounded else 0)
            self._on_time_for = self._started if on_time else -1
            if on_time and self._completes_quorum():
                self._outbox.append((self._start, self._arrives()))
                self._called = True
            self._says_later = bool(delay) and not self._rules.hold
            start, arrival = (self._start, 0) if self._says_later else self._arrival()
        self._announce(start, arrival)
        return "on time" if not late else "dropped" if drop_late else "late"

    def arrive(self) -> None:
        """Count as there for the next round, with whatever will be on the pile."""
        with self._state:
            self._on_time_for = self._started
            start, arrival = self._arrival()
        self._announce(start, arrival)

    def arrive_at(self, moment: float) -> None:
        """Arrive at that moment, unless a round has taken the pile before."""
        with self._state:
            self._alarm = moment if self._alarm is None else min(moment, self._alarm)
            self._stir()

    @property
    def pile(self) -> Pile:
        """What no round has taken yet. Its buffer is often that of the round applied last."""
        if self._pile is None:
            self._pile = self._spare.pop() if self._spare else self._new_pile()
            self._pile.clear()
        return self._pile

    @property
    def piled(self) -> int:
        """Micro-batches on it."""
        return 0 if self._pile is None else self._pile.micro_batches

    @property
    def piled_samples(self) -> float:
        """Their samples."""
        return 0.0 if self._pile is None else self._pile.samples

    @property
    def gave_rounds(self) -> int:
        """Rounds that have taken this worker's pile, those before a checkpoint included."""
        return self._offset + self._started

    @property
    def called(self) -> bool:
        """Whether a round has started and waits for this worker to hand over its pile."""
        with self._state:
            return self._called and self._given is None

    def await_call(self) -> None:
        """Arrive with a full pile, and wait until a round has taken it."""
        with self._state:
            given = self._on_time_for = self._started
            self._awaits = given + 1
            self._stir()
            self._state.wait_for(lambda: self._started > given)

    def hand_over(self) -> None:
        """Give the pile to the round that waits for it; go on with an empty one."""
        with self._state:
            if self._called and self._given is None:
                self._give()
                self._resumes_after = self._started
                self._state.notify_all()

    def wait_until(self, moment: float) -> bool:
        """Wait for that moment, or for a round that starts without the gradient at hand."""
        with self._state:
            return self._state.wait_for(lambda: self._started > self._taken, until=moment)

    def results(self, *, delay: int | None = None, wait: bool = True) -> Iterator[Round]:
        """Wait for what `contribute` said to wait for; yield every record not taken, in order.

        With a `delay`, all rounds but the latest so many that this worker has given to. Without
        `wait`, those that are there. A record's buffers are lent until the next one is asked for.
        """
        began = self._world.now()
        with self._state:
            last = self._resumes_after if delay is None else self._started - delay
            if wait and self._completed < last:
                self._awaits = last
                self._stir()
                self._state.wait_for(lambda: self._completed >= last or self._ended)
        waited_s = self._world.now() - began
        yield from self._take(waited_s, None if delay is None else last)
        if self._says_later:
            self._says_later = False
            with self._state:
                start, arrival = self._arrival()
            self._announce(start, arrival)

    def leave(self) -> Iterator[Round]:
        """Contribute nothing more; yield the records of the others' rounds until all have left."""
        yield from self._served(_LEFT_FOR_GOOD)
        for activity in self._activities:
            activity.join()

    def stop(self) -> None:
        """Leave without looking at the records: everyone raises the same error, and does so."""
        with self._state:
            self._stopped = True
        for _ in self.leave():
            pass

    def _served(self, away: int) -> Iterator[Round]:
        with self._state:
            self._away = away
            if self.piled:
                self._write(self.pile)  # now: from here on the program changes parameters any time
            start, arrival = self._arrival()
            self._state.notify_all()
        self._announce(start, arrival)
        done = False
        while not done:
            with self._state:
                self._state.wait_for(lambda: bool(self._log) or self._is_over(away))
                done = self._is_over(away)
            yield from self._take(0.0)

    def _is_over(self, away: int) -> bool:
        """Whoever has left for good serves on when the others pause."""
        return self._ended or (self._settled and away == _PAUSED)

    def settle(self) -> Iterator[Round]:
        """Pause together with everyone; yield the records of the rounds until all have paused.

        Then every worker knows of the same rounds, and what is pending is on the piles. `resume`
        follows, on every worker.
        """
        yield from self._served(_PAUSED)

    def resume(self) -> None:
        """Go on after `settle`, once everyone has seen what it wanted to see."""
        key = self._key("resume", self._completed)
        if self._world.control.add(key, 1) == self._paused:
            self._world.control.set(f"{key}/all", b"1")
        self._world.control.wait(f"{key}/all")
        with self._state:
            self._away = _HERE
            self._settled = self._overdue = False
            self.gave_s = self._world.now()
            self._set_alarm()
            self._stir()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`."""
        pile = self.pile.state_dict()
        if pile["oldest_round"] is not None:
            pile["oldest_round"] -= self._taken
            pile["known_samples"] -= self._taken * pile["samples"]
        return {
            "round": self._offset + self._taken,
            "pile": pile,
            "chosen": self._quorum.needed if self._choose else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rounds of a checkpoint; before the first contribution."""
        with self._state:
            if self._started or self.piled:
                raise ClosedError(f"{self._name!r} has begun: load its state before the first step")
            self._offset = state["round"]
            if state["chosen"] is not None:
                self._quorum = Quorum.of(state["chosen"], self._world.size)
            self._start = self._first_start()
            self.pile.load_state_dict(state["pile"])

    @property
    def more(self) -> bool:
        """Whether the log holds rounds that the program has not taken."""
        return bool(self._log)

    def _take(self, waited_s: float, last: int | None = None) -> Iterator[Round]:
        while True:
            with self._state:
                if not self._log or (last is not None and self._taken >= last):
                    if self._disagreement is not None and not self._stopped:
                        raise self._disagreement
                    return
                record, pile = self._log.popleft()
                self._taken += 1
            yield record.taken(waited_s)
            waited_s = 0.0
            with self._state:
                if self.write is None or not self._spare:  # else one is enough
                    self._spare.append(pile)

    # --- arrivals --------------------------------------------------------------------------

    def _arrival(self) -> tuple[Start, int]:
        """What this worker has to add to the counter of the next round, if anything; under lock."""
        if self._rules.messenger:
            self._stir()
            return self._start, 0
        return self._start, self._arrives()

    def _arrives(self) -> int:
        start, rank = self._start, self._world.rank
        if self._started > self._completed or self._ended or self._settled:
            return 0  # who must be there for the next round is not known yet
        arrived = 0
        if rank in start.candidates and not self._announced % DUE:
            if self._away:
                arrived += LEFT
            elif self._on_time_for == start.round or self._overdue:
                arrived += ON_TIME
        given = self.piled > 0 or self._away
        if given and rank in start.due and not self._announced // DUE:
            arrived += DUE
        self._announced += arrived
        return arrived

    def _completes_quorum(self) -> bool:
        """Say whether the round starts with this worker's arrival; under lock, with `hold`.

        Then it need not wait to be called, which it would notice one micro-batch later.
        """
        start, known = self._start, self._started == self._completed and not self._settled
        missing = self._world.rank in start.candidates and not self._announced
        last = start.needed == 1 or self._only_missing_in == start.round
        return self._tells_the_last and known and missing and last and not start.due

    def _announce(self, start: Start, arrived: int) -> None:
        if not arrived:
            return
        if start.needed > 1 or start.due or arrived != ON_TIME or self._rules.bounded:
            total = self._world.control.add(self._key("arrived", start.round), arrived)
            if self._tells_the_last and start.met(total + ON_TIME):
                self._world.control.set(self._key("one missing", start.round), b"1")
            if not start.met(total) or start.met(total - arrived):
                return
        if not start.least_samples or self._enough(start, self._sum("samples", start)):
            self._go(start)

    def _enough(self, start: Start, reported: int) -> bool:
        content, samples = divmod(reported, _CONTENT)
        return samples >= start.least_samples or content >= self._world.size

    def _go(self, start: Start) -> None:
        if self._tells_the_last and start.needed > 1:
            self._world.control.set(self._key("one missing", start.round), b"1")
        self._world.control.set(self._key("go", start.round), b"1")

    def _sum(self, what: str, start: Start) -> int:
        return self._world.control.add(self._key(what, start.round), 0)

    def _first_start(self) -> Start:
        everyone = self._world.members
        due = frozenset(everyone if self._rules.max_staleness_rounds == 0 else ())
        return self._start_of(0, everyone, due)

    def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> Start:
        number, full_every = self._offset + round, self._rules.full_every
        # Somebody who has left brings nothing more: do not insist.
        least = self._rules.least_samples if len(active) == self._world.size else 0.0
        if full_every is not None and (number + 1) % full_every == 0:
            return Start(round, frozenset(active), len(active), due, least)
        return Start(round, *self._quorum.for_round(number, active), due, least)

    def _key(self, what: str, round: int) -> str:
        return f"{self._place}/{what}/{round}"

    # --- the messenger ---------------------------------------------------------------------

    def _stir(self) -> None:
        """Have the messenger look; under lock."""
        self._stirred = True
        self._state.notify_all()

    def _set_alarm(self) -> None:
        overdue_s = self._rules.overdue_s
        self._alarm = None if overdue_s is None else self._world.now() + overdue_s

    def _carry_messages(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stirred or self._ended, until=self._alarm)
                if self._ended:
                    return
                self._stirred = False
                if self._alarm is not None and self._world.now() >= self._alarm:
                    self._alarm, self._overdue = None, True
                    self._state.notify_all()
                start, samples, arrival = self._start, self._to_report(), self._arrives()
                outbox, self._outbox = [*self._outbox, (start, arrival)], []
            if samples:
                self._report(start, samples)
            for message in outbox:
                self._announce(*message)

    def _to_report(self) -> int:
        """What to add to the counter of samples; under lock.

        Nobody insists on more samples once somebody is away, or all wait.
        """
        if not self._rules.bounded or self._started > self._completed or self._settled:
            return 0
        content = self._world.size if self._away else int(self._awaits > self._started)
        new = int(self.piled_samples) + content * _CONTENT - self._reported
        self._reported += new
        return new

    def _report(self, start: Start, samples: int) -> None:
        total = self._world.control.add(self._key("samples", start.round), samples)
        before, most = total - samples, self._rules.most_samples
        if total % _CONTENT >= most > before % _CONTENT or (
            self._enough(start, total)
            and not self._enough(start, before)
            and start.met(self._sum("arrived", start))
        ):
            self._go(start)

    # --- the background activity -----------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended:
            number = self._completed
            if self._tells_the_last and self._start.needed > 1:
                self._world.control.wait(self._key("one missing", number))
                with self._state:
                    self._only_missing_in = number
            self._world.control.wait(self._key("go", number))
            with self._state:
                if self._rules.hold:
                    self._called = True
                    self._state.notify_all()
                    self._state.wait_for(self._may_give)
                    self._called = False
                if self._given is None:
                    self._give()
                assert self._given is not None
                (pile, share), self._given = self._given, None
            began_s = self._world.now()
            self._reduce(pile, share)
            sum_square = _square(pile) if self._choose else 0.0
            self._log_round(number, pile, pile.flats.read_margin(), sum_square, began_s)
            with self._state:
                if self._small and not self.piled:
                    self.pile.zero()  # now, not in the round that may find it empty
            if self._world.rank == number % self._world.size and number > 0:
                # Everyone has passed the round before: its keys are of no more use.
                for what in self._kinds_of_keys:
                    self._world.control.delete(self._key(what, number - 1))

    def _may_give(self) -> bool:
        waits = self._completed < self._awaits
        return self._given is not None or waits or bool(self._away) or self._overdue

    def _give(self) -> None:
        """Take the pile for the round that has started; under lock."""
        if self.piled:
            self._write(self.pile)
        self._given = self.pile, self._share_of(self.pile, self._started)
        self._pile = None
        self._started += 1
        self.gave_s = self._world.now()
        self._reported = 0
        self._overdue = False
        self._set_alarm()

    def _write(self, pile: Pile) -> None:
        """Fill the buffer at the last moment, so that a spare one will do; under lock."""
        if self.write is None or pile.written:
            return
        if self._spare:
            pile.exchange(self._spare[-1])
        self.write(self._offset + self._started, pile.flats, pile.samples)
        pile.written = pile.unseen = True

    def _new_pile(self) -> Pile:
        """A pile whose buffer has room for the header, so that a round is one message less."""
        return Pile(self._layout, room(self._world.size, len(self._layout.slots)))

    def _share_of(self, pile: Pile, round: int) -> Share:
        """What this worker's part of the header says."""
        counts = self._on_time_for == round and self._knew == max(round - self._delay, 0)
        return Share(
            *in_parts(pile.samples),
            micro_batches=pile.micro_batches,
            rates=self._learning_rates if counts else 0.0,
            away=self._away,
            age=0 if self._away else round + 1 - max(self._taken, self._resumes_after),
            stale=0 if pile.oldest_round is None else round - pile.oldest_round + 1,
            stale_samples=pile.samples * round - pile.known_samples,
            bad=0.0,  # unless the round finds one
            seconds=self._seconds,
            square=_square(pile) / pile.samples**2 if self._choose and pile.samples else 0.0,
        )

    def _reduce(self, pile: Pile, share: Share) -> None:
        """All-reduce a pile, with the header in its margin; see there why not by torch."""
        flats = pile.flats
        if not pile.micro_batches:
            pile.zero()
        if pile.unseen:  # not by the program: it has better things to do
            pile.look_for_bad()
        share = share._replace(bad=pile.bad_slot)
        flats.write_margin(written(share, pile.used, self._world.rank, self._world.size))
        pile.blank = False
        for work in [self._channel.all_reduce(tensor) for tensor in flats.tensors]:
            work.wait()

    def _log_round(
        self, round: int, pile: Pile, header: list[float], sum_square: float, began_s: float
    ) -> None:
        """Append the record, and draw from the header what the next round needs."""
        size = self._world.size
        shares = Shares(header, size)
        samples = sum(shares.samples)
        number = self._offset + round
        record = Round(
            round=number,
            sum=pile.flats,
            samples_by_rank=shares.samples,
            divisor=float(size) if self._rules.divisor == "workers" else samples / pile.unit,
            used=shares.used,
            staleness_rounds=max(int(max(shares.stale)) - 1, 0),
            mean_staleness_rounds=sum(shares.stale_samples) / samples if samples else 0.0,
            micro_batches=int(sum(map(mul, shares.micro_batches, map(bool, shares.samples)))),
            seconds_by_rank=tuple(shares.seconds),
            began_s=began_s,
            ended_s=self._world.now(),
            bad=first_bad(shares.bad),
        )
        if self._choose is not None and record.ranks:
            measured = Measured(
                round=number,
                seconds=record.seconds_by_rank,
                samples=tuple(shares.samples[rank] for rank in record.ranks),
                squares=tuple(shares.square[rank] for rank in record.ranks),
                mean_square=sum_square / samples**2,
            )
            self._quorum = Quorum.of(self._choose(measured), size)
        here, paused = (
            tuple(rank for rank in range(size) if shares.away[rank] == away)
            for away in (_HERE, _PAUSED)
        )
        # Those who have paused, if nobody else is here, will all be back before the next round.
        active, limit = here or paused, self._rules.max_staleness_rounds
        due = (rank for rank in active if limit is not None and shares.age[rank] >= limit)
        following = self._start_of(round + 1, active, frozenset(due)) if active else self._start
        # Those on time know the same rounds. The program raises it, after the rounds before.
        different = different_rates(number, shares.rates)
        with self._state:  # for as short as can be: the program may want to go on
            self._disagreement = self._disagreement or different
            if self._disagreement is None:
                self._log.append((record, pile))
            self._completed += 1
            if not here:
                self._paused = len(paused)
                self._settled, self._ended = bool(paused), not paused
            self._start = following
            self._announced = 0
            start, arrival = self._arrival()
            self._state.notify_all()
        self._announce(start, arrival)


def _square(pile: Pile) -> float:
    return sum(float(view.double().square().sum()) for view in pile.flats.views)
