"""Every gradient comes by itself, and nobody waits: a queue of them, the same for all workers.

A worker that has a gradient says so to all, by an entry (entries.py). All hear the entries in one
order, and ask their judges (judge.py), which come to the same verdicts: does it count, do the
parameters change now? If it counts, the gradient travels, from its worker to all (one_to_all.py).
An update is a round, and goes into the log.

    worker 0   compute ──┐ says so, hears its own entry ─┐ applies 3, 4 ── compute ──
    worker 1   compute ──────────────────────────────────────────────┐ says so ──
               background: hears 3, 4, and receives, and logs them

A program waits until its own gradient has had its turn, which is no longer than the gradients
before it need to travel; for no other worker. So being away costs nobody anything, either: the
background goes on receiving.

The *version* of a worker's parameters is how many updates they have. It stands in the entry, and so
all know the delay of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import inf
from sys import maxsize
from typing import Any

from offbeat.errors import ClosedError
from offbeat.rounds import entries, header
from offbeat.rounds.catching_up import CatchingUp
from offbeat.rounds.engine import Arrival
from offbeat.rounds.entries import Entry
from offbeat.rounds.pile import Pile
from offbeat.rounds.round import Round


class Queue(CatchingUp):
    """The gradients of one layout, in the order of their entries, as a worker's program sees them.

    turns.py is what its background does, catching_up.py what happens when a worker is lost.
    """

    __slots__ = ()

    # --- the program ---------------------------------------------------------------------------

    def contribute(
        self,
        add: Callable[[Pile], None],
        *,
        arrive: bool = True,
        delay: int = 0,
        rates: tuple[float, ...] = (),
        notes: tuple[float, ...] = (),
        seconds: float = 0.0,
        drop_late: bool = False,
    ) -> Arrival:
        """Have `add` put a gradient on the pile, and say to all that the pile is there, or not.

        `results` waits until it has had its turn, and tells what has become of it.
        """
        with self._state:
            if self._presence in (header.PAUSED, header.LEFT):
                raise ClosedError(f"a contribution to {self._name!r} after leaving it")
            pile = self.piles.growing
            before = pile.samples
            add(pile)
            self._rates = rates
            self._steps += 1
            self._made += pile.samples > before
            self._computed += pile.samples - before
            pile.known_samples += (pile.samples - before) * self._version(self.log.taken)
            if pile.oldest_round is None:
                pile.oldest_round = self.log.taken
            if self._world.survives:
                self.tell_step()
        if arrive:
            self._send()
        return "on time"

    def _send(self) -> None:
        """Say to all that the pile is there, if anything is on it."""
        with self._state:
            if not self.piles.samples:
                self.piles.growing.clear()
                return
            self._await_turn()  # of the one before, if nobody has asked for it
            pile = self.piles.take()
            assert pile.oldest_round is not None
            version = self._version(pile.oldest_round)
            made, self._made = self._made, 0
            self._sent = pile
            now = self._world.now()
            # To the microsecond: a run that is resumed at another moment has the same bits.
            seconds, self.gave_s = round(now - self.gave_s, 6), now
        pile.look_for_bad()
        entry = Entry(
            why=entries.GRADIENT,
            worker=self._world.rank,
            version=version,
            samples=pile.samples,
            known=pile.known_samples,
            seconds=seconds,
            micro_batches=pile.micro_batches,
            made=made,
            ends=self._ends,
            bad=pile.bad_parameter,
            useful=self._useful,
            mark=self._mark,
            rates=self._rates,
            unused=tuple(number for number, used in enumerate(pile.used) if not used),
        )
        self._tell(entry)

    def results(
        self, *, delay: int | None = None, at_most_s: float = inf
    ) -> Generator[Round, None, None]:
        """Wait until this worker's gradient has had its turn; yield every round not taken.

        Or none, if it is to go on from the parameters that it has.
        """
        began = self._world.now()
        with self._state:
            self._await_turn()
            fresh, waited_s = self._fresh, self._world.now() - began
        self.tell_outcomes()
        if fresh:
            yield from self._take(waited_s)

    @property
    def held_back(self) -> tuple[int, float]:
        """Those since, while it is to go on from the parameters that it has."""
        with self._state:
            return (0, 0.0) if self._fresh else (len(self.log), self.log.samples)

    def _await_turn(self) -> None:
        """Under lock."""
        if self._sent is not None:
            self._awaits = maxsize  # so the background does not wait for this program
            self._state.notify_all()
            self._state.wait_for(lambda: self._sent is None)
            self._awaits = 0

    # --- stopping ------------------------------------------------------------------------------

    @property
    def _stop_asked(self) -> bool:
        """Whether what the program computes would come too late, as the judge has said."""
        return self._stopped_at > self.log.taken

    def compute_until(self, began_s: float, ends_s: float) -> bool:
        """Let a modelled device compute until then, or until it is told to stop; say which."""
        now = self._world.now
        with self._state:
            if self._state.wait_for(lambda: self._stop_asked, until=ends_s):
                if self._gives_up(now() - began_s, max(ends_s - now(), 0.0), self._usual_s):
                    return True
                self._state.wait_for(lambda: False, until=ends_s)
            self._recent_s.append(now() - began_s)
        return False

    def stops(self, began_s: float) -> bool:
        """Say whether a program is to leave a micro-batch that it is in the middle of."""
        if not self._stop_asked:
            return False
        return self._gives_up(self._world.now() - began_s, None, self._usual_s)

    @property
    def _usual_s(self) -> float:
        """What a micro-batch has taken lately; for ever, if none has ended yet."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else inf

    def tell_outcomes(self) -> None:
        """Have the program hear what has become of what it gave, as far as this worker knows."""
        outcomes, self._outcomes = self._outcomes, []
        for each in outcomes:
            if self.judged is not None:
                self.judged(*each)

    # --- pausing and leaving -------------------------------------------------------------------

    def _served(self, presence: int) -> Generator[Round, None, None]:
        leaves = presence == header.LEFT
        with self._state:
            self._presence, pauses = presence, self._roll.pauses
        self._send()  # what is left on the pile: it would be of parameters of two ages
        why = entries.LEFT if leaves else entries.PAUSED
        made, self._made = self._made, 0  # of steps that were stopped: nothing is on the pile
        self._tell(Entry(why, self._world.rank, made=made))

        def over() -> bool:
            return self._ended or (not leaves and self._roll.pauses > pauses)

        done = False
        while not done:
            self._give_if_asked()
            with self._state:
                self._state.wait_for(lambda: bool(self.log) or self._is_asked() or over())
                done = over()
            yield from self._take(0.0)
        self.tell_outcomes()

    def _pause_key(self) -> str:
        return f"{self._place}/resume/{self._roll.pauses}"

    def _come_back(self) -> None:
        with self._state:
            self._presence = header.HERE
            if self._away_since is not None:  # it has not computed meanwhile
                self.gave_s += self._world.now() - self._away_since
            self._away_since = None
            self._state.notify_all()

    def _join_backgrounds(self) -> None:
        for activity in self._activities:
            activity.join()
        with self._state:
            self._state.wait_for(lambda: not self._over)

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`."""
        return {
            **super().state_dict(),
            "judge": self._judge.state_dict(),
            "sums": [each.state_dict() for each in self._sums],
            "means": [each.state_dict() for each in self._means],
            "made_by_all": self._made_by_all,
            "recent_s": list(self._recent_s),
            "watches": None if self.watches is None else self.watches.state_dict(),
            "useful": self._useful,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rounds of a checkpoint; before the first contribution."""
        super().load_state_dict(state)
        with self._state:
            self._judge.load_state_dict(state["judge"])
            self._judge.left = {  # now, not then
                rank for rank, why in self._roll.absent.items() if why == entries.LEFT
            }
            self._base = self._judge.version
            for each, saved in zip(self._sums, state["sums"], strict=True):
                each.load_state_dict(saved, self.piles)
            for mean, saved in zip(self._means, state["means"], strict=True):
                mean.load_state_dict(saved)
            self._made_by_all = state["made_by_all"]
            self._recent_s.extend(state["recent_s"])
            self._useful = state["useful"]
            if self.watches is not None:
                self.watches.load_state_dict(state["watches"])
        self._await_others()

    def _await_others(self) -> None:
        """Nobody's gradient may come before all have loaded: their judges would not know of it."""
        self._world.meet(f"{self._place}/loaded/{self._loads}")
        self._loads += 1
