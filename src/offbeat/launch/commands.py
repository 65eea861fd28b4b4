"""A worker that runs a command, in a session of its own.

A worker that has ended stays in the process table until the supervisor lets go of it: so its
process group cannot become another one's meanwhile, and what it has left behind can be ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from offbeat.launch.guard import Guard
from offbeat.launch.job import LaunchError, Slot
from offbeat.launch.streams import Streams
from offbeat.launch.supervisor import Worker


class Command(Worker):
    """A command that is running, and what becomes of its output."""

    def __init__(
        self,
        command: list[str],
        variables: dict[str, str],
        slot: Slot,
        attempt: int,
        streams: Streams,
        guard: Guard,
    ) -> None:
        self.slot = slot
        self.attempt = attempt
        self.streams = streams
        self._guard = guard
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=streams.out.write_end,
                stderr=streams.err.write_end,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error.strerror}") from None
        finally:
            streams.started()
        super().__init__(slot.rank, self._process.pid)
        guard.protects(self.pid)
        self._sentinel = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def sentinel(self) -> int | None:
        return self._sentinel

    def exit_code(self) -> int | None:
        if not hasattr(os, "waitid") or self._process.returncode is not None:
            return self._process.poll()
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, self.pid, flags)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def close(self) -> None:
        if self._sentinel is not None:
            os.close(self._sentinel)
            self._sentinel = None
        self._guard.forgets(self.pid)
        self._process.wait()

    def send(self, number: int) -> None:
        if self._process.returncode is None:  # else its number may be another's by now
            super().send(number)

    def sweep(self) -> None:
        """It has failed: end what it has left behind."""
        with suppress(PermissionError):
            self.send(signal.SIGKILL)
