"""A worker's presence: here, away, paused with everyone for a checkpoint, or left.

Whoever is not here holds up nobody: its background gives what the pile holds, or, in a lockstep,
its program serves the others' rounds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from offbeat.errors import ClosedError, ExpelledError, StuckWarning
from offbeat.rounds.background import Background
from offbeat.rounds.header import AWAY, HERE, LEFT, PAUSED
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Round


class Presence(Background):
    """The part of an engine that goes away, pauses, resumes and leaves."""

    __slots__ = ()

    # --- presence --------------------------------------------------------------------------

    @contextmanager
    def away(self, *, elsewhere: bool = False) -> Iterator[None]:
        """Be away for the length of the block: hold up nobody, whatever it waits for.

        With `elsewhere` the program does nothing in it but wait for others; see followers.py.
        """
        with self._state:
            leaves = self._presence == HERE
            moves = elsewhere and not self._elsewhere
            if leaves:
                self._presence, self._stays = AWAY, False
                self._away_since = self._world.now()
                self._stir()
            self._elsewhere |= elsewhere
            self._state.notify_all()
        try:
            yield
        finally:
            if moves:
                self._come_to_itself()
            if leaves:
                self._come_back()

    def _come_to_itself(self) -> None:
        """The program goes on, and may use what the background has called followers with."""
        with self._state:
            self._elsewhere = False
            if self.followed:
                self._state.wait_for(lambda: not self._folding)

    def _come_back(self) -> None:
        with self._state:
            self._presence = HERE
            self._state.notify_all()
            self._away_since = None
            told, self._told_away = self._told_away, False
            self._steps = max(self._steps, self._started)
            said = self._arrivals, self._arrivals.start, self._arrives() if told else 0
        self._say(said)

    def leave(self) -> Generator[Round, None, None]:
        """Contribute nothing more; yield the rounds of the others until all have left."""
        yield from self._served(LEFT)
        self._join_backgrounds()

    def settle(self) -> Generator[Round, None, None]:
        """Pause together with everyone; yield the rounds until all have paused.

        Then every worker knows of the same rounds, and what is pending is on the piles. `resume`
        follows, on every worker.
        """
        warns_at = self._world.now() + self._world.stuck_s
        for each in self._served(PAUSED):
            if self._world.now() > warns_at:
                warns_at = math.inf
                warnings.warn(
                    f"worker {self._world.rank} has waited in dp.state_dict() for "
                    f"{self._world.stuck_s:g} s, and the others make rounds: every worker must "
                    "call it, at the same place. To be told later, set OFFBEAT_STUCK_S (seconds)",
                    StuckWarning,
                    stacklevel=2,
                )
            yield each

    def resume(self) -> tuple[int, ...]:
        """Go on after `settle`, once everyone has seen what it wanted to see; the members then.

        Nobody goes on before all have said that they are back: rounds of somebody who did, and
        paused once more, would find the others paused still, though their programs are through.
        """
        world, key = self._world, self._pause_key()
        try:
            members = self._meet(key)
        except ExpelledError:
            if not world.was_met(key):
                raise
            members = world.members
        with self._state:
            self._presence = HERE
            self._settled = self._overdue = False
            self._steps = max(self._steps, self._started)  # nobody is behind by the pause's rounds
            self.gave_s = self._world.now()
            self._stir()
        with suppress(ExpelledError):  # what this worker does next finds out
            self._meet(f"{key}/back")
        return members

    def _meet(self, key: str) -> tuple[int, ...]:
        """Meet those who have paused; return the members then."""
        world, epoch = self._world, self._world.epoch
        members = world.meet(key, self._paused, act=lambda _: world.members)
        self._resumed.append((key, epoch))
        if self._paused[0] == world.rank:  # to come here, all have passed those of the last pause
            for earlier in self._resumed[:-2]:
                world.forget_meeting(*earlier)
        del self._resumed[:-2]
        return members or ()

    def _pause_key(self) -> str:
        """What is the same on all who pause, and no other time."""
        return f"{self._place}/resume/{self.log.completed}"

    def stop(self) -> None:
        """Leave without looking at the rounds: everyone raises the same error, and does so."""
        for _ in self.leave():
            pass

    def _served(self, presence: int) -> Generator[Round, None, None]:
        with self._state:
            self._presence = presence
            self._state.wait_for(lambda: not self._folding)  # which touches what is written
            if presence == LEFT:
                self._prepare_flush()
            writes = presence == LEFT or not self._keeps_pile()
            if self.piles.micro_batches and writes and self.land is None:
                self._write(self.piles.growing)  # from here on the program changes parameters
            said = self._to_say()
            self._state.notify_all()
        self._say(said)
        done = False
        while not done:
            self._give_if_asked()
            if self._rules.lockstep:
                self._run_in_lockstep()
            with self._state:
                if not self._rules.lockstep:
                    # While it regroups, it can give its state to nobody.
                    self._state.wait_for(
                        lambda: bool(self.log) or self._is_asked() or self._is_over(presence)
                    )
                done = self._is_over(presence)
            yield from self._take(0.0)

    def _is_over(self, presence: int) -> bool:
        """Whoever has left for good serves on when the others pause."""
        return self._ended or (self._settled and presence == PAUSED)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Have nothing folded in this block."""
        with self._state:
            self._state.wait_for(lambda: not self._folding)
            before, self._taking = self._taking, True
        try:
            yield
        finally:
            with self._state:
                self._taking = before

    # --- asking all to end -----------------------------------------------------------------

    def ask_end(self) -> None:
        """Ask all workers to end their loops with the next round that this one takes part in."""
        with self._state:
            self._ends = True

    @property
    def asks_end(self) -> bool:
        """Whether this worker has done that."""
        return self._ends

    # --- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`."""
        pile = self.piles.growing.state_dict()
        if pile["oldest_round"] is not None:
            pile["oldest_round"] -= self.log.taken
            pile["known_samples"] -= self.log.taken * pile["samples"]
        return {
            "round": self._offset + self.log.taken,
            "behind": min(self._started - self._steps, 0),  # as `resume` will have it
            "made": self._made,
            "made_in_all": self.made,
            "weighed": self._weighed,
            "pile": pile,
            "rates": self._rates,
            "chosen": self._quorum.needed if self._choose else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rounds of a checkpoint; before the first contribution."""
        with self._state:
            if self._started or self.piles.micro_batches:
                raise ClosedError(f"{self._name!r} has begun: load its state before the first step")
            self._offset = state["round"]
            self._steps = -state["behind"]
            self._made = state["made"]
            self.made = state["made_in_all"]
            self._weighed = state["weighed"]
            self._rates = state["rates"]
            if state["chosen"] is not None:
                self._quorum = Quorum.of(state["chosen"], self._world.size)
            self._arrivals.begin(self._first_start())
            self.piles.growing.load_state_dict(state["pile"])
            self._computed = self.piles.samples
