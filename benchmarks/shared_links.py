"""Whether transfers share a link as virtual time says (`sharing = "fair"`).

Two network namespaces, one worker in each, and between them a link that `tc` limits to 200 Mbit/s
in each direction. A short and a long message alone give latency and bandwidth. Then several
transfers are under way at once, on channels of their own; the same function runs in virtual time on
a cluster of that latency and bandwidth, with links that are shared, and that are not.

    python benchmarks/shared_links.py [--quick] [--json FILE]

Needs to be root, with `ip` and `tc` and the kernel's tbf; says so where it cannot. The namespaces
are removed at the end, whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import common
import torch

import offbeat
from offbeat.clusters import Cluster
from offbeat.worlds import Channel, World, enter_world, leave_world

MBIT_PER_S = 200
UNIT_BYTES = 8_000_000
NAMES = tuple(f"offbeat-{os.getpid()}-{end}" for end in "ab")
DEVICES = ("veth-a", "veth-b")
ADDRESSES = ("10.77.13.1", "10.77.13.2")
PORT = 29_571

Transfer = tuple[str, float, float]
"""Its kind (there, back or all-reduce), its units of bytes, and when it begins, over what one unit
takes alone."""
CASES: dict[str, tuple[Transfer, ...]] = {
    "one alone": (("there", 1, 0),),
    "a long one alone": (("there", 4, 0),),
    "two at once": (("there", 1, 0), ("there", 1, 0)),
    "three at once": (("there", 1, 0), ("there", 1, 0), ("there", 1, 0)),
    "a short one beside a long one": (("there", 1, 0), ("there", 3, 0)),
    "one begins in the middle of another": (("there", 2, 0), ("there", 2, 1)),
    "there and back": (("there", 1, 0), ("back", 1, 0)),
    "an all-reduce alone": (("all-reduce", 2, 0),),
    "two all-reduces at once": (("all-reduce", 2, 0), ("all-reduce", 2, 0)),
    "an all-reduce beside a message": (("all-reduce", 2, 0), ("there", 1, 0)),
}


# --- in either world -----------------------------------------------------------------------


def timed(case: str, unit_s: float) -> list[float]:
    """Have all transfers of a case made; return when each ended here, from its beginning."""
    world = enter_world()
    channels = [world.channel(f"{case} {number}") for number in range(len(CASES[case]))]
    for channel in channels:  # connect
        channel.all_reduce(torch.zeros(1)).wait()
    began, taken = world.now(), [0.0] * len(channels)
    joins = [
        world.spawn(
            f"{case} {n}", partial(_transfer, world, channels[n], each, n, began, unit_s, taken)
        )
        for n, each in enumerate(CASES[case])
    ]
    for each in joins:
        each.join()
    for channel in channels:
        channel.all_reduce(torch.zeros(1)).wait()
        channel.close()
    leave_world(world)
    return taken


def _transfer(
    world: World,
    channel: Channel,
    transfer: Transfer,
    number: int,
    began: float,
    unit_s: float,
    taken: list[float],
) -> None:
    kind, units, begins = transfer
    tensor = torch.zeros(int(units * UNIT_BYTES), dtype=torch.uint8)
    begin_s = began + begins * unit_s
    world.sleep_until(begin_s)
    source = 1 if kind == "back" else 0
    if kind == "all-reduce":
        channel.all_reduce(tensor).wait()
    elif world.rank == source:
        channel.send(tensor, 1 - source).wait()
    else:
        channel.recv(tensor, source).wait()
    taken[number] = world.now() - begin_s


# --- virtual -------------------------------------------------------------------------------


def predicted(case: str, latency_s: float, bytes_per_s: float, sharing: str) -> list[float]:
    cluster = Cluster.parse(
        f"workers = 2\n[compute]\nstep_s = 1.0\n[network]\nlatency_s = {latency_s}\n"
        f"bandwidth_bytes_per_s = {bytes_per_s}\nsharing = '{sharing}'\nall_reduce = 'ring'\n"
    )
    unit_s = UNIT_BYTES / bytes_per_s
    by_rank = offbeat.run(lambda: timed(case, unit_s), cluster).results
    return [max(each) for each in zip(*by_rank, strict=True)]


# --- real ----------------------------------------------------------------------------------


@contextmanager
def link() -> Iterator[None]:
    """Two namespaces and a limited link between them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and clean up
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", DEVICES[0], "netns", NAMES[0], "type", "veth", "peer", "name",
            DEVICES[1], "netns", NAMES[1])  # fmt: skip
        for name, device, address in zip(NAMES, DEVICES, ADDRESSES, strict=True):
            inside = ("netns", "exec", name)
            _ip(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "link", "set", device, "up")
            _ip(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf",
                "rate", f"{MBIT_PER_S}mbit", "burst", "64kb", "latency", "100ms")  # fmt: skip
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no namespaces can be made here: ip {' '.join(words)}: {done.stderr}")


def real(turns: int) -> dict[str, Any]:
    """Run this file's workers in the namespaces; return what they measured."""
    with tempfile.TemporaryDirectory() as folder, link():
        workers = []
        for rank in range(2):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": DEVICES[rank],
                "TP_SOCKET_IFNAME": DEVICES[rank],
                **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT)},
            }
            command = ["ip", "netns", "exec", NAMES[rank], sys.executable, __file__]
            command += ["--worker", str(Path(folder) / f"{rank}.json"), "--turns", str(turns)]
            workers.append(subprocess.Popen(command, env=environment))
        try:
            codes = [worker.wait(timeout=200) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"the workers in the namespaces ended with {codes}")
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    return {
        case: [
            [max(each) for each in zip(*turn, strict=True)]
            for turn in zip(*(measured[case] for measured in by_rank), strict=True)
        ]
        for case in by_rank[0]
    }


def worker(target: Path, turns: int) -> None:
    """In a namespace: make the transfers of every case."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    timed("one alone", 0.0)  # to warm up
    alone = [timed("one alone", 0.0)[0] for _ in range(3)]
    told = torch.tensor([statistics.median(alone)])
    torch.distributed.broadcast(told, 0)
    unit_s = told.item()
    found = {case: [timed(case, unit_s) for _ in range(turns)] for case in CASES}
    target.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# --- showing -------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Print the seconds of every transfer; return them as rows."""
    middle: Callable[[str], list[float]] = lambda case: [  # noqa: E731
        statistics.median(each) for each in zip(*found[case], strict=True)
    ]
    short_s, long_s = middle("one alone")[0], middle("a long one alone")[0]
    bytes_per_s = 3 * UNIT_BYTES / (long_s - short_s)
    latency_s = max(0.0, short_s - UNIT_BYTES / bytes_per_s)
    print(f"alone: {bytes_per_s / 1e6:.1f} MB/s of {MBIT_PER_S / 8:g}, {1e3 * latency_s:.1f} ms")
    rows = []
    for case in CASES:
        columns = [middle(case)] + [
            predicted(case, latency_s, bytes_per_s, sharing) for sharing in ("fair", "none")
        ]
        for number, (measured, fair, none) in enumerate(zip(*columns, strict=True)):
            rows.append(
                {"case": case, "transfer": number, "real_s": measured, "fair_s": fair}
                | {"not_shared_s": none, "turns": [turn[number] for turn in found[case]]}
            )
            print(
                f"{case:37} {number}: real {measured:.3f} s, fair {fair:.3f} "
                f"({fair / measured:.3f}), not shared {none:.3f} ({none / measured:.3f})"
            )
    errors = [abs(row["fair_s"] / row["real_s"] - 1) for row in rows]
    print(
        f"fair over real: off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (most)"
    )
    return rows


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.turns)
        return
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        why = f"{' and '.join(missing)} not found" if missing else "this needs root"
        raise SystemExit(f"no namespaces can be made here: {why}")
    rows = show(real(2 if arguments.quick else 5))
    common.write(arguments.json, {"mbit_per_s": MBIT_PER_S, "rows": rows})


if __name__ == "__main__":
    main()
