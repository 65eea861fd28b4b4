"""One worker's replica: what an algorithm sees of it, and its gradients on their way to a round.

A micro-batch that was computed goes onto the *pile*; a round takes the pile and gives back a sum,
which the algorithm yields to have it applied.

    open                               start, exchange and merge of the rounds to come
    contribute, results                add to the pile; come to a round, or not; take what is there
    called, hand_over, await_call      rounds that take a pile between two micro-batches
    arrive, under_way                  rounds that take what was set aside for them
    own_step                           the worker's own gradient, as if it were a round
    serve                              leave: the others' rounds, until all have left
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import inf
from typing import Any

from offbeat.merges import Shift
from offbeat.replica.opening import Opening
from offbeat.rounds import Arrival, Pile, Round
from offbeat.worlds import Channel


class Replica(Opening):
    """A worker's gradients, as an algorithm sees them."""

    # --- what an algorithm calls -----------------------------------------------------------

    def contribute(
        self,
        *,
        arrive: bool = True,
        delay: int = 0,
        drop_late: bool = False,
        notes: tuple[float, ...] = (),
    ) -> Arrival:
        """Put the gradients of the micro-batch onto the pile and arrive, or not; does not wait."""
        self.arrival = self.engine.contribute(
            self._pile_up if self.shift is None else self._pile_up_moves,
            arrive=arrive,
            delay=delay,
            rates=() if self.shift is not None else tuple(self.step_merge.rates.values()),
            notes=notes,
            seconds=0.0 if self.choose is None else self.seconds + self._dropped_s,
            drop_late=drop_late,
        )
        if self.arrival == "dropped":
            self._dropped_s += self.seconds
            self.drop()
        else:
            self._dropped_s = 0.0
        return self.arrival

    @property
    def piled(self) -> int:
        """Micro-batches that no round has taken yet."""
        return self.engine.piles.micro_batches

    @property
    def piled_samples(self) -> float:
        """Their samples."""
        return self.engine.piles.samples

    @property
    def gave_rounds(self) -> int:
        """Rounds that have taken this worker's pile."""
        return self.engine.gave_rounds

    @property
    def gave_s(self) -> float:
        """When the latest of them did."""
        return self.engine.gave_s

    @property
    def called(self) -> bool:
        """Whether a round has started and waits for this worker's pile."""
        return self.engine.called

    def await_call(self) -> None:
        """Arrive, and wait for such a round: this worker has enough."""
        self.engine.await_call()

    def hand_over(self) -> None:
        """Give the pile to the round that waits for it, and go on."""
        self.engine.hand_over()
        self._computed_s.clear()

    @property
    def under_way(self) -> bool:
        """Whether it has given to a round that it does not know yet; `results` waits for that."""
        return self.engine.under_way

    def arrive(self) -> None:
        """Count as there for the next round, whatever will be on the pile.

        Where rules say `at_arrival`, give what is on it now, and go on with an empty one.
        """
        self.engine.arrive()

    def drop(self) -> None:
        """Count the micro-batch at hand as dropped."""
        self.arrival = "dropped"
        self.dropped_samples += self.samples

    def judged(self, arrival: Arrival, dropped_samples: float) -> None:
        """Hear what has become of a gradient that was given earlier."""
        self.arrival = arrival
        self.dropped_samples += dropped_samples

    def abandon(self) -> None:
        """Count the micro-batch at hand, which was stopped, as dropped, and what it belongs to."""
        self.drop()
        self.arrival = "abandoned"
        self.dropped_samples += self.engine.abandon()

    @property
    def behind(self) -> bool:
        """Whether a round has started whose result this worker does not know yet."""
        return self.engine.behind

    @property
    def next_round_s(self) -> float | None:
        """Seconds until the next round should have ended, as long as the latest ones took; below 0
        if it is late, None if it is not known yet."""
        lasts_s = self.rhythm.lasts_s
        return None if lasts_s is None else self.round_ended + lasts_s - self.world.now()

    def results(self, *, delay: int | None = None, at_most_s: float = inf) -> Iterator[Round]:
        """Wait, if this worker was on time; then every round that it does not know of, in order.

        With a `delay`, all but the latest so many that it has given to. Where nobody has to wait,
        it can be `at_most_s`.
        """
        return self.known(self.engine.results(delay=delay, at_most_s=at_most_s))

    def newest(self) -> Iterator[Round]:
        """Without waiting: every round that is complete and that it does not know of, in order."""
        if self.shift is not None and self.shift.shown:  # a worker's own parameters are put by
            return iter(())
        return self.known(self.engine.newest())

    def serve(self) -> Iterator[Round]:
        """Leave: every round of the others, until all have left."""
        if self.shift is not None:
            self.shift.check()
        yield from self.known(self.engine.leave())
        if self.shift is not None:
            self._settle_models(self.shift)
        if self.means is not None:
            self.means.end()

    def _settle_models(self, shift: Shift) -> None:
        """All have left: have what they agree on in the parameters; again, if one is lost then."""
        if shift.common:
            shift.settled()
        else:
            self.world.together(
                f"{self.name}/settled", lambda epoch: shift.settled(self.models_in(epoch))
            )

    def own_step(self) -> Round:
        """This worker's own gradient, as if it were a round: models drift until they are merged."""
        assert self.shift is not None, "open(moves=...) comes first"
        self.arrival = "on time"
        bad = self.gradients.first_bad()
        self._own_is_bad = bad is not None
        self.shift.moves()
        mine = [0.0] * self.world.size
        mine[self.world.rank] = self.samples
        return Round(
            round=self.round,
            sum=self.engine.piles.growing.flats,  # not looked at
            samples_by_rank=tuple(mine),
            divisor=1.0,
            used=tuple(parameter.grad is not None for parameter in self.parameters),
            micro_batches=1,
            bad=None if bad is None else (self.world.rank, bad),
            merge=self._own,
        )

    # --- what attach calls: rounds -----------------------------------------------------------

    def known(self, rounds: Iterator[Round]) -> Iterator[Round]:
        """Count rounds as the replica comes to know of them."""
        for each in rounds:
            self.round += 1
            self._computed_s.clear()
            self._note_end(each.ended_s)
            yield each

    def settle(self, where: str) -> Iterator[Round]:
        """Pause with everyone, between steps, at `where`: the rounds until all have paused."""
        if self.shift is not None:
            self.shift.check()
        return self.known(self.engine.settle(where))

    def resume(self, look: Callable[[Channel], None] | None = None) -> tuple[int, ...]:
        """Go on after `settle`; the members, of which all have come to that.

        Before, those who have paused `look` at something, over a channel.
        """

        def see(ranks: tuple[int, ...], epoch: int) -> None:
            with self.models_of(ranks, epoch) as channel:
                if look is not None:
                    look(channel)

        members = self.engine.resume(None if look is None else see)
        self.compute_began = self.round_began = self.round_ended = self.world.now()
        return members

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Have in the parameters what all rounds have made of them, and nothing of one's own.

        Or, where models are never all the same, the mean of them all.
        """
        shown = False
        if self.shift is not None:
            mean = None
            if self.means is not None and not self.shift.shown:
                mean = self.means.ask().views
            with self.engine.undisturbed():
                shown = self.shift.show(mean)
        try:
            yield
        finally:
            if self.shift is not None and shown:
                self.shift.hide()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of rounds, pending gradients and the algorithm."""
        return {
            "round": self.round,
            "step": self.step,
            "rounds": self.engine.state_dict(),
            "memory": deepcopy(self.memory),
            "own": deepcopy(self.own),
            "rhythm": self.rhythm.state_dict(),
            "choose": None if self.choose is None else deepcopy(vars(self.choose)),
            "shift": None if self.shift is None else self.shift.state_dict(),
            "overlap": self.overlap.on,
            "codec": None if self.coder is None else self.coder.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.loads += 1
        self.round, self.step = state["round"], state["step"]
        self.engine.load_state_dict(state["rounds"])
        self.memory, self.own = deepcopy(state["memory"]), deepcopy(state["own"])
        self.rhythm.load_state_dict(state["rhythm"])
        self.round_ended = self.world.now()
        if self.choose is not None:
            vars(self.choose).update(deepcopy(state["choose"]))
        if self.shift is not None:
            self.shift.load_state_dict(state["shift"])
        self.overlap.on = state["overlap"]
        if self.coder is not None and state["codec"] is not None:
            self.coder.load_state_dict(state["codec"])

    def go_on_after(self, other: Replica) -> None:
        """This worker had another replica before it was expelled: count on from there."""
        self.dropped_samples, self.step = other.dropped_samples, other.step
        if other.engine.asks_end:
            self.engine.ask_end()

    def stepped(self) -> None:
        """The step is over."""
        self.overlap.reset()
        super().stepped()

    # --- onto the pile ----------------------------------------------------------------------

    def _pile_up(self, pile: Pile) -> None:
        if self.overlap.launched:
            numbers: Sequence[int] = self.overlap.not_launched()
        else:
            numbers = self._everything
        # What overlaps may be restored from `.grad`.
        gives = self.engine.early is None
        self.gradients.gather(pile, numbers, look=False, gives=gives)
        self.overlap.counted()
        self._count(pile)

    def _pile_up_moves(self, pile: Pile) -> None:
        """Count them only: the round that takes them has them written."""
        assert self.shift is not None
        bad = self.shift.made()
        pile.bad_parameter = pile.bad_parameter if bad is None else bad
        self._count(pile)
        if self._own_is_bad:  # it has moved nothing, and weighs nothing
            pile.samples -= self.samples
        pile.used = [True] * len(pile.used)

    def _count(self, pile: Pile) -> None:
        pile.samples += self.gradients.samples
        pile.micro_batches += 1
