"""Two network namespaces and one virtual cable between them: two hosts on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """One namespace, and its end of the cable."""

    name: str
    interface: str
    address: str

    def cut(self) -> None:
        """Take this end of the cable down."""
        _run("ip", "-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def joined(rate: str = "") -> Iterator[tuple[Side, Side]]:
    """Make both, and remove them at the end; with a `rate`, as of `tc`, in both directions."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("cannot make a network of one's own here: it takes root, ip and tc")
    mark = os.getpid() % 100_000
    one, other = (
        Side(f"offbeat-{mark}-{side}", f"ob{mark}{side}", f"10.231.7.{side}") for side in (1, 2)
    )
    try:
        for side in (one, other):
            _run("ip", "netns", "add", side.name)
        ends = ("ip", "link", "add", one.interface, "netns", one.name, "type", "veth")
        _run(*ends, "peer", "name", other.interface, "netns", other.name)
        for side in (one, other):
            address = ("addr", "add", f"{side.address}/24", "dev", side.interface)
            _run("ip", "-n", side.name, *address)
            for each in (side.interface, "lo"):
                _run("ip", "-n", side.name, "link", "set", each, "up")
            if rate:
                limit = ("tbf", "rate", rate, "burst", "512kb", "limit", "8mb")
                _run("tc", "-n", side.name, "qdisc", "add", "dev", side.interface, "root", *limit)
        yield one, other
    finally:
        for side in (one, other):
            subprocess.run(["ip", "netns", "del", side.name], capture_output=True, check=False)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise SystemExit(
            f"cannot make a network of one's own here: {' '.join(command)}: {str(why).strip()}. "
            "It takes root, and network namespaces"
        ) from None
