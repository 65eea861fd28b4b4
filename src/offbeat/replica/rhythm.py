"""How long rounds last, from the end of one to the end of the next, as one worker has seen it."""

from __future__ import annotations

from statistics import median

_LATEST = 8


class Rhythm:
    """How long the next round should last.

    The first round does not count: what happens at the start happens once.

    >>> rhythm = Rhythm()
    >>> for seconds in (9.0, 1.0, 1.5, 20.0):
    ...     rhythm.add(seconds)
    >>> rhythm.lasts_s
    1.5
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._latest_s: list[float] = []

    def add(self, seconds: float) -> None:
        """Take what one has lasted."""
        self._rounds += 1
        if self._rounds > 1:
            self._latest_s = [*self._latest_s[1 - _LATEST :], seconds]

    @property
    def lasts_s(self) -> float | None:
        """The median of the latest few; None before the second round has ended."""
        return median(self._latest_s) if self._latest_s else None

    def state_dict(self) -> list[float]:
        """What a checkpoint must hold."""
        return [self._rounds, *self._latest_s]

    def load_state_dict(self, state: list[float]) -> None:
        """Become what was saved."""
        self._rounds, self._latest_s = int(state[0]), list(state[1:])
