"""The end of an attached block: with all others, or with an error."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Self

from offbeat.alike import alike, average_buffers
from offbeat.attached import Attached
from offbeat.doctor import Doctor
from offbeat.ending import note_join
from offbeat.errors import ExpelledError, ReplicasDifferError, WorkerLeft
from offbeat.worlds import Channel, leave_world

logger = logging.getLogger("offbeat")


class Leaving(Attached):
    """The part of an attachment that ends it."""

    doctor: Doctor | None = None
    _says_waits = True
    """Whether the end says for whom this worker has waited: not where no script can do better."""

    def close(self) -> None:
        """Serve the others until all have left: the join. Then every replica is the same."""
        if self._closed:
            return
        try:
            while not self._or_rejoin(self._has_left, False):
                pass
        except BaseException as error:
            self.abandon(error)
            raise
        self._end()
        leave_world(self._world)
        if not self._stats.replicas_identical:
            differ = (
                "replicas differ at the end of the block, though they have applied the same "
                "rounds: something other than optimizer.step() has changed parameters somewhere"
            )
            if self.algorithm.identical:
                raise ReplicasDifferError(differ)
            warnings.warn(differ, stacklevel=2)

    def _has_left(self) -> bool:
        """Come to the end with all others."""
        self._stats.replicas_identical = None
        try:
            with self._others_away():
                note = self._serve_others()
                self._together("end", lambda channel: self._compare(note, channel), lets_in=True)
        except ExpelledError:
            if self._stats.replicas_identical is None:  # else nothing is left to be done
                raise
        return True

    def _serve_others(self) -> Callable[[Channel], str]:
        """Apply rounds until all have left; return what then finds out what it cost, in words."""
        self._say_attached()
        stats, schedule = self._stats, self._apply.schedule
        waited_s, made = stats.wait_s, schedule.made
        self._apply.apply(self.algorithm.leave(self._replica))
        schedule.end()
        self._replica.gradients.clear()
        stats.join_wait_s = stats.wait_s - waited_s
        took_s, served = self.seconds - self._began_s, schedule.made - made
        return lambda channel: note_join(self._world, channel, stats, took_s, served)

    def _compare(self, note: Callable[[Channel], str], channel: Channel) -> None:
        """All have left: see what that has cost, and whether they are alike."""
        if (words := note(channel)) and self._says_waits:
            logger.warning(words)
        if self.doctor is not None:
            self.doctor.tell(self._world, self._replica.name, self.algorithm, self._stats.rounds)
        average_buffers(channel, self._model)
        self._stats.replicas_identical = alike(channel, self._model)

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on, and leave without them."""
        if self._closed:
            return
        if self.doctor is not None:
            self.doctor.close()
        self._end()
        if getattr(error, "everywhere", False):
            self._replica.engine.stop()
        leave_world(self._world, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        leaves = isinstance(error, WorkerLeft)
        if error is None or leaves or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abandon(error)
        return leaves
