"""Signals to the launcher, as something that can be waited for beside everything else."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ToldToEndError(Exception):
    """A signal came while the launcher was waiting for something at the start."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Bell:
    """Readable when a signal has come, or when a thread has rung."""

    def __init__(self) -> None:
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)

    def fileno(self) -> int:
        """What can be waited for."""
        return self._hears.fileno()

    def ring(self) -> None:
        """Wake the launcher; from any thread."""
        with suppress(BlockingIOError):
            self._rings.send(b"\0")

    def signals(self) -> list[int]:
        """Signals that have come since."""
        with suppress(BlockingIOError):
            return [number for number in self._hears.recv(4096) if number in HEARD]
        return []

    def pause(self, seconds: float) -> None:
        """Sleep; ToldToEndError if a signal comes meanwhile."""
        deadline = time.monotonic() + seconds
        while (rest_s := deadline - time.monotonic()) > 0:
            if wait([self._hears], rest_s):
                for number in self.signals():
                    raise ToldToEndError(number)

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Hear signals here instead of dying of them; those that are ignored stay so."""
        was_waking = signal.set_wakeup_fd(self._rings.fileno(), warn_on_full_buffer=False)
        before = {}
        for number in HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, lambda *_: None)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(was_waking)
            self._hears.close()
            self._rings.close()
