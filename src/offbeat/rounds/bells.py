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

_BLOCK = 32  # bells that are forgotten together, once all have heard them


class Bells:
    """What workers in lockstep tell each other, when somebody is away."""

    def __init__(self, world: World, place: str) -> None:
        self._world = world
        self._control = world.control_in_epoch()
        self.epoch = world.epoch
        self._rank = world.rank
        self._size = len(world.members)
        self._place = place
        self._heard = 0
        self._asked: int | None = None

    def ring(self, why: str, round: int = 0) -> None:
        """Tell everyone, this worker included."""
        self.tell(f"{why} {round} {self._rank}")

    def tell(self, words: str) -> None:
        """Say this to everyone, this worker included: all hear all that is said in one order."""
        number = self._control.add(f"{self._place}/bells", 1) - 1
        self._control.set(self._key(number), words.encode())

    def want(self, round: int) -> None:
        """Ring for that round, if nobody has done so yet."""
        if self._control.add(f"{self._place}/wanted/{round}", 1) == 1:
            self.ring("wanted", round)
            self.want_nothing()
            self._asked = round

    def want_nothing(self) -> None:
        """Forget the last round that this worker was the first to ring for: it is over."""
        if self._asked is not None:
            self._control.delete(f"{self._place}/wanted/{self._asked}")
            self._asked = None

    def hear(self) -> tuple[str, int, int]:
        """Block until the next bell: why, for which round, and who rang."""
        why, number, rank = self.told().split()
        return why, int(number), int(rank)

    def told(self) -> str:
        """Block until something more is said; what."""
        words = self._control.get(self._key(self._heard)).decode()
        self._heard += 1
        if self._heard % _BLOCK == 0:
            self._forget(self._heard - _BLOCK)
        return words

    def told_before(self) -> str:
        """What was said next, in an epoch that is over; somebody has heard it."""
        words = self._world.control.get(self._key(self._heard)).decode()
        self._heard += 1
        return words

    def _forget(self, first: int) -> None:
        """This worker has heard a block of bells; the last to do so deletes it."""
        counter = f"{self._place}/heard/{first}"
        if self._control.add(counter, 1) == self._size:
            for key in (counter, *map(self._key, range(first, first + _BLOCK))):
                self._control.delete(key)

    def _key(self, number: int) -> str:
        return f"{self._place}/bell/{number}"
