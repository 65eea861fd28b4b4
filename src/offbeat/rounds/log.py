"""The log: rounds that have completed, until the program takes them, each once and in order.

It must not grow with the time that a program is away. When it holds more than a few rounds, the
background *folds* the oldest: applies them to something other than the parameters, which the
program may be using (see merges/). What was folded the program adopts at its next step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from offbeat.rounds.pile import Pile, Piles
from offbeat.rounds.round import Merge, Round

MOST = 3
"""Rounds that the log keeps before it is folded."""


MOST_TAKEN_FROM = 8
"""Rounds that it keeps while the program applies some, and nothing is folded."""


class Log:
    """Completed rounds of one engine; all of it under the engine's lock."""

    def __init__(self, piles: Piles) -> None:
        self._piles = piles
        self._rounds: deque[tuple[Round, Pile | None, dict[str, Any]]] = deque()
        self._lent: Pile | None = None
        self.completed = 0
        self.taken = 0
        """Rounds that the program knows of: they are in its parameters."""
        self.folded = 0
        """Rounds after those that have been folded, and that the program has not adopted."""

    def __len__(self) -> int:
        return len(self._rounds)

    def append(self, told: Round, pile: Pile | None, **facts: Any) -> None:
        """A round has completed: what it says to all, its sum, if any, and this worker's facts."""
        self._rounds.append((told, pile, facts))
        self.completed += 1

    def pass_by(self) -> None:
        """A round has completed that nobody needs to know of."""
        self.completed += 1
        self.taken += 1

    def begin_at(self, number: int) -> None:
        """Forget all rounds: those up to this one are somebody else's to know."""
        while self._rounds:
            self._give_back(self._rounds.popleft()[1])
        self.completed = self.taken = number
        self.folded = 0

    def know(self, number: int) -> None:
        """The program knows of all rounds up to this one: it has got what they have made."""
        while self.taken < number:
            self._give_back(self._rounds.popleft()[1])
            self.taken += 1

    @property
    def ends(self) -> bool:
        """Whether a round in it has all workers end their loops."""
        return any(told.ends for told, _, _ in self._rounds)

    @property
    def samples(self) -> float:
        """What the rounds in it hold."""
        return sum(told.samples for told, _, _ in self._rounds)

    def samples_of(self, rank: int) -> float:
        """What the rounds in it hold of a worker."""
        return sum(told.samples_by_rank[rank] for told, _, _ in self._rounds)

    def _give_back(self, pile: Pile | None) -> None:
        if pile is not None:
            self._piles.give_back(pile)

    def next(self, merge: Merge | None = None, waited_s: float = 0.0, spare: bool = False) -> Round:
        """Lend the oldest round, for this merge; `returned` follows.

        `spare` says that nobody else will look at its sum.
        """
        told, pile, facts = self._rounds.popleft()
        self._lent = pile
        lent = {} if pile is None else {"sum": pile.flats}
        return told.but(**lent, **facts, merge=merge, waited_s=waited_s, spare=spare)

    def returned(self) -> None:
        """The round that was lent has been read."""
        if self._lent is not None:
            self._piles.give_back(self._lent)
            self._lent = None

    @property
    def too_long(self) -> bool:
        """Whether the oldest round must be folded."""
        return len(self._rounds) > MOST

    @property
    def full(self) -> bool:
        """Whether the program must apply a round before there is room for another."""
        return len(self._rounds) >= MOST_TAKEN_FROM

    @property
    def oldest(self) -> Round:
        """The next round to be lent: what it says."""
        return self._rounds[0][0]

    def adopt(self) -> int:
        """The program takes over what was folded; how many rounds."""
        folded, self.folded = self.folded, 0
        self.taken += folded
        return folded
