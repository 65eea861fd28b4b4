"""Telling the others that one is there, and hearing that a round starts: the control plane's part.

For each round there is one counter of arrivals (see start.py) and one key, "go", that every
worker's background waits for. The arrival that completes what is needed sets it. Where one
candidate suffices and nobody is due, the arrival sets it at once: no counting, one message.

Where a round must hold a number of samples, a second counter has those that all workers have piled
up, and how many workers ask for no more.

Where a worker takes part only between two micro-batches, the last to come must know that it is, or
it would begin another one before it hears that the round has started. So whoever sees that one
arrival is missing tells all, by the key "one missing".

With a grace, the arrival that completes the quorum does not set "go" at once: its worker's
messenger does so later, unless the last candidate has come first.
"""

from __future__ import annotations

from collections.abc import Callable

from offbeat.rounds.header import AWAY, HERE
from offbeat.rounds.start import ABSENT, DUE, ON_TIME, WANTED, Rules, Start
from offbeat.worlds.base import World

# The field above the counter of samples: workers that ask for no more of them.
_CONTENT = 1 << 40


class Arrivals:
    """One worker's arrivals for the next round."""

    def __init__(self, world: World, place: str, rules: Rules, start: Start) -> None:
        self._control = world.control_in_epoch()
        self._now = world.now
        self._rank = world.rank
        self._members = len(world.members)
        self._place = place
        self._rules = rules
        self._kinds = ["go", "arrived", *(["samples"] if rules.bounded else [])]
        self._kinds += ["one missing"] if rules.hints else []
        self.begin(start)

    # --- what to say; under the engine's lock ----------------------------------------------

    def begin(self, start: Start) -> None:
        """What must be there for the next round is known."""
        self.start = start
        self.opens_at: float | None = None
        """When this worker's messenger has to start the round: its quorum is there."""
        self.announced = 0
        """What the counter of arrivals holds of this worker, or soon will."""
        self._reported = 0
        self._only_missing = False

    def standing(self, *, on_time: bool, waits: bool, given: bool, presence: int) -> int:
        """What the counter of arrivals should hold of this worker; less, if it is back."""
        now = self.announced % DUE
        if not now % ABSENT:  # who was on time stays so
            if self._rank not in self.start.candidates:
                now = max(now, WANTED * (waits and presence == HERE))
            elif presence == HERE:
                now = ON_TIME * on_time
            else:
                now = ABSENT if presence == AWAY else ABSENT + WANTED
        if self._rank in self.start.due and (given or presence != HERE):
            now += DUE
        else:
            now += self.announced // DUE * DUE
        return now

    def samples(self, piled: float, content: int) -> int:
        """What to add to the counter of samples."""
        if not self._rules.bounded:
            return 0
        new = int(piled) + content * _CONTENT - self._reported
        self._reported += new
        return new

    @property
    def on_time(self) -> bool:
        """Whether this worker has arrived on time; then it has no more to say for the round."""
        return self.announced % ABSENT == ON_TIME

    @property
    def completes(self) -> bool:
        """Whether the round starts as soon as this worker arrives, where there are hints.

        Then it need not wait to be called, which it would notice one micro-batch later.
        """
        start = self.start
        missing = self._rank in start.candidates and not self.announced
        last = start.needed == 1 or self._only_missing
        return missing and last and not start.due

    def only_missing(self) -> None:
        """Everyone else is there."""
        self._only_missing = True

    # --- saying and hearing it; these may block --------------------------------------------

    def announce(self, start: Start, arrived: int) -> None:
        """Count an arrival, if any, and start the round if it was the last that was needed."""
        if not arrived:
            return
        rules = self._rules
        if not (start.by_one_alone and arrived == ON_TIME) or rules.bounded or rules.grace_s:
            total = self._control.add(self._key("arrived", start.round), arrived)
            if rules.hints and start.one_missing(total):
                self._control.set(self._key("one missing", start.round), b"1")
            first = start.met(total) and not start.met(total - arrived)
            if rules.grace_s and not start.complete(total):
                if first and start is self.start:
                    self.opens_at = self._now() + rules.grace_s
                return
            last = rules.grace_s and start.met(total) and not start.complete(total - arrived)
            if not first and not last:
                return
        if not start.least_samples or self._enough(start, self._sum("samples", start)):
            self._go(start)

    def report(self, start: Start, samples: int) -> None:
        """Count samples, and start the round if they were what it waited for."""
        if not samples:
            return
        total = self._control.add(self._key("samples", start.round), samples)
        before, most = total - samples, self._rules.most_samples
        if total % _CONTENT >= most > before % _CONTENT or (
            self._enough(start, total)
            and not self._enough(start, before)
            and start.met(self._sum("arrived", start))
        ):
            self._go(start)

    def open(self, start: Start) -> None:
        """Start a round whose grace is over."""
        self._go(start)

    def await_start(self, told: Callable[[], None]) -> None:
        """Block until the round starts; `told` is called if this worker is the last to come."""
        start = self.start
        if self._rules.hints and start.needed > 1:
            self._control.wait(self._key("one missing", start.round))
            told()
        self._control.wait(self._key("go", start.round))

    def go(self) -> None:
        """Start the round: it had started before somebody was lost."""
        self._go(self.start)

    def forget(self, round: int) -> None:
        """Everyone has passed that round: its keys are of no more use."""
        for kind in self._kinds:
            self._control.delete(self._key(kind, round))

    def _enough(self, start: Start, reported: int) -> bool:
        content, samples = divmod(reported, _CONTENT)
        return samples >= start.least_samples or content >= self._members

    def _go(self, start: Start) -> None:
        if self._rules.hints and start.needed > 1:
            self._control.set(self._key("one missing", start.round), b"1")
        self._control.set(self._key("go", start.round), b"1")

    def _sum(self, what: str, start: Start) -> int:
        return self._control.add(self._key(what, start.round), 0)

    def _key(self, what: str, round: int) -> str:
        return f"{self._place}/{what}/{round}"
