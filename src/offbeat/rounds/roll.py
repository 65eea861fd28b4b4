"""Among neighbours: who is absent, how many rounds are wanted, and whether it is over.

No worker hears all the others in a round, so whoever is not here rings (bells.py). All hear the
bells in one order, so all draw the same from them, each at its own time:

    away, back         the worker's background takes part in wanted rounds, meanwhile
    paused r, left r   so does its program; it knows of r rounds, so all must make as many
    wanted r           somebody is in a round that makes them r, and somebody is absent

When the last one pauses, or leaves, all know how many rounds there are: the most that any has made.
"""

from __future__ import annotations

from collections.abc import Mapping

AWAY, BACK, PAUSED, LEFT, WANTED = "away", "back", "paused", "left", "wanted"


class Roll:
    """What one worker has heard."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.absent: dict[int, str] = {}
        self.rounds = 0
        """That somebody wants, or has made."""
        self.pauses = 0
        """How often all have paused, but for those who had left."""
        self.paused: tuple[int, ...] = ()
        """Who did, the last time."""

    def hear(self, why: str, rounds: int, rank: int) -> None:
        """Take note of a bell."""
        if why == BACK:
            self.absent.pop(rank, None)
        elif why != WANTED:
            self.absent[rank] = why
        if why in (PAUSED, LEFT, WANTED):
            self.rounds = max(self.rounds, rounds)
        self._see_whether_all_pause()

    def _see_whether_all_pause(self) -> None:
        """They go on from there: what is heard next is of the time after."""
        paused = [rank for rank, why in self.absent.items() if why == PAUSED]
        if paused and len(self.absent) == self._size and AWAY not in self.absent.values():
            self.pauses += 1
            self.paused = tuple(sorted(paused))
            for rank in paused:
                del self.absent[rank]

    def call(self, absent: Mapping[int, str], rounds: int, pauses: int) -> None:
        """All have told what they are, at the beginning of an epoch."""
        self.absent, self.rounds, self.pauses = dict(absent), rounds, pauses
        self._see_whether_all_pause()

    @property
    def over(self) -> bool:
        """Whether all have left."""
        return len(self.absent) == self._size and set(self.absent.values()) == {LEFT}
