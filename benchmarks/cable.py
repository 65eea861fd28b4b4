"""A link that is really slow: two network namespaces, and one virtual cable between them.

Or several namespaces, and a switch that joins them.

`tbf` limits its rate in both directions, and ranks may have it changed while they run. The
namespaces are made here, and removed at the end; that takes root, `ip` and `tc`, and it is said
where it cannot be had. Nothing leaves the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch.distributed as dist


class Cable:
    """What joins two namespaces: of each, its name, interface and address."""

    def __init__(self, ends: int = 2) -> None:
        self._mark = os.getpid() % 100_000
        self.ends = [
            (f"offbeat-{self._mark}-{end}", f"ob{self._mark}{end}", f"10.231.7.{end}")
            for end in range(1, ends + 1)
        ]
        self._limited = False

    def lay(self) -> None:
        for name, _, _ in self.ends:
            _run("ip", "netns", "add", name)
        self._join()
        for name, interface, address in self.ends:
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            for each in (interface, "lo"):
                _run("ip", "-n", name, "link", "set", each, "up")

    def _join(self) -> None:
        (one, cable, _), (other, end, _) = self.ends
        both = ("ip", "link", "add", cable, "netns", one, "type", "veth")
        _run(*both, "peer", "name", end, "netns", other)

    def limit(self, link: str) -> None:
        """Let so much pass from now on, in each direction."""
        for name, interface, _ in self.ends:
            qdisc = ("tc", "-n", name, "qdisc")
            if link != "unlimited":
                rate = ("tbf", "rate", link, "burst", "512kb", "limit", "8mb")
                _run(*qdisc, "replace", "dev", interface, "root", *rate)
            elif self._limited:
                _run(*qdisc, "del", "dev", interface, "root")
        self._limited = link != "unlimited"

    def cut(self) -> None:
        """Let nothing pass any more, and tell nobody."""
        name, interface, _ = self.ends[1]
        _run("ip", "-n", name, "link", "set", interface, "down")

    def remove(self) -> None:
        for name, _, _ in self.ends:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Switch(Cable):
    """The same for several namespaces: each has a cable to a switch in one more."""

    def _join(self) -> None:
        inside = ("ip", "-n", self._name)
        _run("ip", "netns", "add", self._name)
        _run(*inside, "link", "add", "switch", "type", "bridge")
        _run(*inside, "link", "set", "switch", "up")
        for number, (name, interface, _) in enumerate(self.ends):
            cable = ("ip", "-n", name, "link", "add", interface, "type", "veth")
            _run(*cable, "peer", "name", f"port{number}", "netns", self._name)
            _run(*inside, "link", "set", f"port{number}", "master", "switch", "up")

    def remove(self) -> None:
        super().remove()
        subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)

    @property
    def _name(self) -> str:
        return f"offbeat-{self._mark}-switch"


@contextmanager
def cable(ends: int = 2) -> Iterator[Cable]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("cannot make a slow link here: it takes root, ip and tc")
    made = Cable() if ends == 2 else Switch(ends)
    try:
        made.lay()
        yield made
    finally:
        made.remove()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise SystemExit(
            f"cannot make a slow link here: {' '.join(command)}: {str(why).strip()}. "
            "It takes root, and network namespaces"
        ) from None


def run_ranks(count: int, *command: str) -> Iterator[Any]:
    """Run so many ranks, half of them at each end, and limit the link whenever rank 0 asks for it.

    Each gets the command, and a folder. Yields what rank 0 tells, when it does.
    """
    with cable() as joins, tempfile.TemporaryDirectory() as folder:
        ranks = [_started(joins, rank, count, [*command, folder]) for rank in range(count)]
        try:
            while any(each.poll() is None for each in ranks):
                yield from _told(Path(folder))
                if ended := [each.returncode for each in ranks if each.poll()]:
                    raise SystemExit(f"a rank ended with {ended[0]}")
                for asked in Path(folder).glob("limit-*"):
                    joins.limit(asked.name.removeprefix("limit-"))
                    asked.unlink()
                time.sleep(0.02)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        yield from _told(Path(folder))


def tell(row: Any, folder: Path) -> None:
    """Tell whoever has started the ranks; one row after the other."""
    (part := folder / "row.part").write_text(json.dumps(row))
    part.rename(folder / "row.json")


def _told(folder: Path) -> Iterator[Any]:
    if (row := folder / "row.json").exists():
        yield json.loads(row.read_text())
        row.unlink()


def _started(joins: Cable, rank: int, count: int, command: list[str]) -> subprocess.Popen[bytes]:
    name, interface, _ = joins.ends[rank * 2 // count]
    variables = {
        **os.environ,
        **common.STEADY,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": joins.ends[0][2],
        "MASTER_PORT": "29511",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(["ip", "netns", "exec", name, *command], env=variables)


def limit_to(link: str, folder: Path) -> None:
    """Rank 0 asks for another limit, and all ranks wait for it."""
    dist.barrier()
    if dist.get_rank() == 0:
        (request := folder / f"limit-{link}").touch()
        while request.exists():
            time.sleep(0.02)
    dist.barrier()
