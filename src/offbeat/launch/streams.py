"""What workers print: passed on by whole lines, to console or files, and the last remembered.

As with torchrun, nothing is put before a line unless it is teed, and a worker's stream is a
terminal where the launcher's own is, so that colours and progress bars stay what they are.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import termios
import threading
import time
import tty
from collections import deque
from contextlib import suppress
from pathlib import Path

_PARTIAL_S, _PARTIAL_TERMINAL_S = 2.0, 0.1
"""After so long, a line without an end is shown as it is: a prompt, or a progress bar."""
_MOST = 65536
_LAST_LINES = 3
_LAST_CHARACTERS = 300
_NOISE = re.compile(r"^(\[rank\d+\]: ?)?\s*([~^]+)?\s*$")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+\Z")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")


class Console:
    """This process's own standard output or error, where lines of several threads go.

    Without a buffer: a thread that is stuck in one would be in the way of this process's end.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lock = threading.Lock()

    def is_terminal(self) -> bool:
        """Say whether a person may be looking at it."""
        return os.isatty(self._number)

    def write(self, words: bytes, patience_s: float = -1) -> None:
        """Write all of it; with little patience, also into the midst of what is stuck there."""
        has_it = self._lock.acquire(timeout=patience_s)
        try:
            while words:
                try:
                    words = words[os.write(self._number, words) :]
                except BlockingIOError:
                    select.select([], [self._number], [])
        finally:
            if has_it:
                self._lock.release()


OUT, ERR = Console(1), Console(2)


class Stream:
    """One of a worker's two streams, on its way to the console, a file, or both."""

    def __init__(self, console: Console | None, file: Path | None, prefix: str = "") -> None:
        self._console = console
        self._file = None if file is None else file.open("ab", buffering=0)
        self._prefix = prefix.encode()
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._rest = b""
        is_terminal = console is not None and console.is_terminal()
        self._partial_s = _PARTIAL_TERMINAL_S if is_terminal else _PARTIAL_S
        self._read_end, self.write_end = _terminal() if is_terminal else os.pipe()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def started(self) -> None:
        """The worker has its end now; begin to read."""
        os.close(self.write_end)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until all is passed on; not for long, for a child of the worker may hold the end."""
        self._thread.join(timeout_s)

    def last_lines(self) -> str:
        """The last lines that said something, as one."""
        lines = [line.decode(errors="replace").strip().split("\r")[-1] for line in self._last]
        said = " | ".join(_PREFIX.sub("", line).strip() for line in lines)
        return said if len(said) <= _LAST_CHARACTERS else f"...{said[-_LAST_CHARACTERS:]}"

    def _pass_on(self) -> None:
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        try:
            while True:
                if self._rest and not self._prefix and not poll.poll(self._partial_s * 1000):
                    self._show(self._rest)
                    self._rest = b""
                chunk = self._read()
                if not chunk:
                    break
                self._take(chunk)
            if self._rest:
                self._line(self._rest + (b"\n" if self._prefix else b""))
        except OSError:
            pass  # nobody reads any more: the worker is told so by its own next write
        finally:
            os.close(self._read_end)
            if self._file is not None:
                self._file.close()

    def _read(self) -> bytes:
        with suppress(OSError):  # a terminal whose other end is closed
            return os.read(self._read_end, _MOST)
        return b""

    def _take(self, chunk: bytes) -> None:
        self._keep(chunk)
        words = self._rest + chunk
        end = words.rfind(b"\n")
        if not self._prefix:
            end = max(end, words.rfind(b"\r"))  # a progress bar
        if len(words) - end > _MOST:
            end = len(words)
        whole, self._rest = words[: end + 1], words[end + 1 :]
        lines = _LINE.findall(whole)
        self._remember(lines)
        if whole:
            self._show(b"".join(self._prefix + line for line in lines))

    def _keep(self, chunk: bytes) -> None:
        """Write it to the file, if there is one; a full disk does not end the training."""
        if self._file is None:
            return
        try:
            self._file.write(chunk)
        except OSError as error:
            say(f"{self._file.name} is written no further: {error.strerror}")
            self._file = None

    def _line(self, line: bytes) -> None:
        self._remember([line])
        self._show(self._prefix + line)

    def _remember(self, lines: list[bytes]) -> None:
        for line in lines[-4 * _LAST_LINES :]:
            if not _NOISE.match(line.decode(errors="replace")):
                self._last.append(line[-_LAST_CHARACTERS:])

    def _show(self, words: bytes) -> None:
        if self._console is not None:
            self._console.write(words)


class Streams:
    """Both streams of one worker."""

    def __init__(self, out: Stream, err: Stream) -> None:
        self.out = out
        self.err = err

    def started(self) -> None:
        """The worker has been started, or could not be."""
        self.out.started()
        self.err.started()

    def join(self, timeout_s: float = 0.5) -> None:
        """Wait until all is passed on, or for so long."""
        deadline = time.monotonic() + timeout_s
        for stream in (self.out, self.err):
            stream.join(max(0.0, deadline - time.monotonic()))


def say(words: str) -> None:
    """Print a line of the launcher's own, between those of workers."""
    with suppress(OSError):
        ERR.write(f"offbeat launch: {words}\n".encode(), patience_s=0.2)


def _terminal() -> tuple[int, int]:
    """A terminal of the size of this one, which changes nothing of what is written."""
    read_end, write_end = os.openpty()
    tty.setraw(write_end)
    for number in (1, 2):
        with suppress(OSError):
            size = fcntl.ioctl(number, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(write_end, termios.TIOCSWINSZ, size)
            break
    return read_end, write_end
