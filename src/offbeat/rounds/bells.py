"""Lockstep: everybody comes to every round, so nobody tells the others anything, and none waits.

Until a worker is away: then the others would wait for it in the exchange for ever. So it rings a
bell, which all hear, one after another and in one order. From then on, whoever comes to a round
while somebody is away rings, too; and the background of a worker that is away takes part in the
round for which it hears that, with what its pile holds.

    worker 0   step 7 ──┐ round 7 ─────────┐ step 8 ──┐ rings: 8 is wanted ──┐
    worker 1   step 7 ──┐ away, rings ───────────────────────────────────────────
               background                             └ takes part in 8 ─────┘
"""

from __future__ import annotations

from offbeat.worlds.base import World

_KEPT = 4096  # bells that somebody may not have heard yet


class Bells:
    """What workers in lockstep tell each other, when somebody is away."""

    def __init__(self, world: World, place: str) -> None:
        self._control = world.control
        self._rank = world.rank
        self._place = place
        self._heard = 0
        self._asked: int | None = None

    def ring(self, why: str, round: int = 0) -> None:
        """Tell everyone, this worker included."""
        number = self._control.add(f"{self._place}/bells", 1) - 1
        self._control.set(self._key(number), f"{why} {round} {self._rank}".encode())
        if number >= _KEPT:
            self._control.delete(self._key(number - _KEPT))

    def want(self, round: int) -> None:
        """Ring for that round, if nobody has done so yet."""
        if self._control.add(f"{self._place}/wanted/{round}", 1) == 1:
            self.ring("wanted", round)
            if self._asked is not None:
                self._control.delete(f"{self._place}/wanted/{self._asked}")
            self._asked = round

    def hear(self) -> tuple[str, int, int]:
        """Block until the next bell: why, for which round, and who rang."""
        why, number, rank = self._control.get(self._key(self._heard)).decode().split()
        self._heard += 1
        return why, int(number), int(rank)

    def _key(self, number: int) -> str:
        return f"{self._place}/bell/{number}"
