"""The guard: a small process that ends the workers if the launcher is killed.

It reads from a pipe which process groups there are. When the pipe ends and some are left, the
launcher has ended without ending them.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

_PROGRAM = """
import os, sys
groups = set()
for line in sys.stdin:
    known, group = line.split()
    (groups.add if known == "+" else groups.discard)(int(group))
for group in groups:
    try:
        os.killpg(group, 9)
    except OSError:
        pass
"""


class Guard:
    """Knows the process groups that must not outlive this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    def protects(self, group: int) -> None:
        """From now on this group ends with this process."""
        self._tell(f"+ {group}")

    def forgets(self, group: int) -> None:
        """This group has been dealt with."""
        self._tell(f"- {group}")

    def close(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has ended it: training does not depend on it
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
