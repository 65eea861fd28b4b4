"""Latency of partial all-reduces under skew, beside full ones: eager-SGD's microbenchmark.

After Li et al., arXiv 1908.04207: of P workers, worker p arrives p * skew late; everyone brings
ones; a barrier comes before every round. The latency is the time inside the call, as a mean over
workers and rounds; a worker is active in a round if what it brought is in it. The skew is 20 ms for
8 workers, 10 ms for 16 and 5 ms for 32, so that the last one is always about 150 ms late. From the
skew alone follow, for what the calls take without any work,

    full      (P-1)/2 * skew
    majority  (P^2-1)/(6P) * skew, which is less than full by 3P/(P+1)
    solo      nothing

and with (P+1)/2 workers active in a majority's round, and 1 in a solo's.

`full` is torch.distributed.all_reduce on Gloo. It and the partial ones take turns, round by round,
in the same processes. `mpi` is MPI_Allreduce (pip install mpi4py mpich) in processes of its own,
which take turns with the others block by block; MPI waits by spinning, so its processes sleep while
it is not their turn.

With --late also: how long a worker waits for another that is busy in pure Python. Of two workers
one counts in a loop while the other calls a solo all-reduce; rounds with offbeat's thread switch
interval and rounds with Python's own take turns.

    python benchmarks/partial_all_reduce.py [--quick] [--late] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

import offbeat
from offbeat.rounds import Quorum

SKEW_S = {8: 0.02, 16: 0.01, 32: 0.005}
NAMES = ("full", "solo", "majority")
LEAD_S = 0.02  # from the barrier to the first arrival: until then everyone has heard the moment
WARM_UP_ROUNDS = 2
TIME_OUT_S = 300.0
LATE_AFTER_S, BUSY_S = 0.01, 0.1
PYTHONS_SWITCH_INTERVAL_S = 0.005


@dataclass(frozen=True)
class Plan:
    """What is measured with one number of workers."""

    sizes_bytes: tuple[int, ...]
    blocks: int
    block_rounds: int

    @property
    def rounds(self) -> int:
        return self.blocks * self.block_rounds


@dataclass(frozen=True)
class Turns:
    """Who may run: blocks of several groups of processes, in turns, by files in a folder."""

    folder: Path
    groups: int
    group: int

    def begin(self, block: int) -> None:
        """Wait, asleep, for this group's turn to run its block of this number."""
        until = time.monotonic() + TIME_OUT_S
        while not self._file(block * self.groups + self.group).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no turn for block {block} within {TIME_OUT_S:.0f} s")
            time.sleep(0.05)

    def end(self, block: int) -> None:
        self._file(block * self.groups + self.group + 1).touch()

    def _file(self, turn: int) -> Path:
        return self.folder / f"turn-{turn}"


QUICK = Plan((64, 2**20), blocks=2, block_rounds=6)
FULL = Plan((64, 2**10, 2**16, 2**20, 2**22), blocks=4, block_rounds=16)


# --- the contest, on every process ---------------------------------------------------------


def contest(plan: Plan, turns: Turns) -> None:
    """Let Gloo's and offbeat's all-reduces take turns; worker 0 writes latencies and actives."""
    dist.init_process_group("gloo")
    results = {}
    for number, size in enumerate(plan.sizes_bytes):
        first = number * plan.blocks
        if dist.get_rank() == 0:
            turns.begin(first)
        dist.barrier()
        like = torch.zeros(size // 4)
        with (
            offbeat.partial_all_reduce(f"solo {size}", like, quorum="solo", drop_late=True) as solo,
            offbeat.partial_all_reduce(
                f"majority {size}", like, quorum="majority", drop_late=True
            ) as majority,
        ):
            results[size] = _contest_of_size(size, first, plan, turns, solo, majority)
    if dist.get_rank() == 0:
        (turns.folder / "torch.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _contest_of_size(
    size: int,
    first_block: int,
    plan: Plan,
    turns: Turns,
    solo: offbeat.Partial,
    majority: offbeat.Partial,
) -> dict[str, dict[str, list[float]]]:
    rank, workers = dist.get_rank(), dist.get_world_size()
    ones, full = torch.ones(size // 4), torch.ones(size // 4)
    calls: dict[str, Callable[[], offbeat.Round | None]] = {
        "full": lambda: _unseen(dist.all_reduce(full, async_op=True)),
        "solo": lambda: solo.reduce(ones),
        "majority": lambda: majority.reduce(ones),
    }
    for name in NAMES * WARM_UP_ROUNDS:
        _meet()
        calls[name]()
    latencies = torch.zeros(len(NAMES), plan.rounds, dtype=torch.float64)
    active = torch.full_like(latencies, workers)
    for index in range(plan.rounds):
        block = first_block + index // plan.block_rounds
        if rank == 0:
            turns.begin(block)  # the others wait in the next barrier
        for turn in range(len(NAMES)):
            number = (index + turn) % len(NAMES)
            full.fill_(1.0)
            _arrive(rank, workers)
            began = time.perf_counter()
            record = calls[NAMES[number]]()
            latencies[number, index] = time.perf_counter() - began
            if record is not None:
                _check(record, index + WARM_UP_ROUNDS)
                active[number, index] = len(record.ranks)
        if (index + 1) % plan.block_rounds == 0:
            _meet()
            if rank == 0:
                turns.end(block)
    dist.all_reduce(latencies)
    return {
        "latency_s": dict(zip(NAMES, (latencies / workers).tolist(), strict=True)),
        "active": dict(zip(NAMES, active.tolist(), strict=True)),
    }


def _arrive(rank: int, workers: int) -> None:
    """Meet the others, agree on a moment, and return this worker's share of the skew after it."""
    _sleep_until(_moment() + rank * SKEW_S[workers])


def _moment() -> float:
    _meet()
    moment = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    _unseen(dist.broadcast(moment, 0, async_op=True))
    return moment.item()


def _meet() -> None:
    _unseen(dist.barrier(async_op=True))


def _unseen(work: dist.Work | None) -> None:
    """Wait for a collective so that offbeat does not see it: else this worker counts as away."""
    assert work is not None
    work.get_future().wait()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _check(record: offbeat.Round, round: int) -> None:
    """Everyone brings ones, so the sum says how many are in it."""
    found, expected = (record.round, record.sum.views[0][0].item()), (round, len(record.ranks))
    if found != expected:
        raise AssertionError(f"round and sum are {found}, not {expected}, of {record.ranks}")


def contest_mpi(plan: Plan, turns: Turns) -> None:
    """Do the same with MPI_Allreduce."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    rank, workers = everyone.rank, everyone.size
    results = {}
    for number, size in enumerate(plan.sizes_bytes):
        ones, total = array("f", [1.0]) * (size // 4), array("f", [0.0]) * (size // 4)
        latencies = []
        for index in range(plan.rounds):
            block = number * plan.blocks + index // plan.block_rounds
            turns.begin(block)
            for _ in range(WARM_UP_ROUNDS if index == 0 else 0):
                everyone.Allreduce([ones, MPI.FLOAT], [total, MPI.FLOAT])
            everyone.Barrier()
            moment = everyone.bcast(time.monotonic() + LEAD_S if rank == 0 else None)
            _sleep_until(moment + rank * SKEW_S[workers])
            began = time.perf_counter()
            everyone.Allreduce([ones, MPI.FLOAT], [total, MPI.FLOAT])
            latencies.append(everyone.allreduce(time.perf_counter() - began) / workers)
            if rank == 0 and (index + 1) % plan.block_rounds == 0:
                turns.end(block)
        results[size] = latencies
    if rank == 0:
        (turns.folder / "mpi.json").write_text(json.dumps(results))


def late_join(rounds: int, folder: Path) -> None:
    """Have worker 0 call a solo all-reduce while worker 1 counts; write worker 0's latencies."""
    dist.init_process_group("gloo")
    took: dict[str, list[float]] = {"offbeat": [], "python": []}
    with offbeat.partial_all_reduce(
        "late", torch.zeros(256), quorum="solo", drop_late=True
    ) as solo:
        intervals_s = {
            "offbeat": sys.getswitchinterval(),
            "python": PYTHONS_SWITCH_INTERVAL_S,
        }
        for index in range(2 * rounds):
            name = ("offbeat", "python")[index % 2]
            sys.setswitchinterval(intervals_s[name])
            moment = _moment()
            if dist.get_rank() == 0:
                _sleep_until(moment + LATE_AFTER_S)
            else:
                _sleep_until(moment)
                _count_until(moment + BUSY_S)
            began = time.perf_counter()
            solo.reduce(torch.ones(256))
            took[name].append(time.perf_counter() - began)
        sys.setswitchinterval(intervals_s["offbeat"])
    if dist.get_rank() == 0:
        written = {"took_s": took, "intervals_s": intervals_s}
        (folder / "late.json").write_text(json.dumps(written))
    dist.destroy_process_group()


def _count_until(moment: float) -> int:
    count = 0
    while time.monotonic() < moment:
        for _ in range(1000):
            count += 1
    return count


# --- the process that was started ----------------------------------------------------------


def measure(ranks: int, plan: Plan, quick: bool) -> list[dict[str, Any]]:
    """Run one contest, and return its rows."""
    launcher = _mpiexec()
    groups = 1 if launcher is None else 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OFFBEAT_BENCHMARK_OUT"] = folder
        (Path(folder) / "turn-0").touch()
        arguments = [f"--groups={groups}", *(["--quick"] if quick else [])]
        mpi = None
        if launcher is not None:
            command = [launcher, "-n", str(ranks), sys.executable, __file__, "--role=mpi"]
            mpi = subprocess.Popen([*command, *arguments])
        try:
            common.torchrun(__file__, ranks, "--role=contest", *arguments)
            if mpi is not None and mpi.wait(TIME_OUT_S):
                raise RuntimeError(f"mpiexec ended with exit status {mpi.returncode}")
        finally:
            if mpi is not None and mpi.poll() is None:
                mpi.terminate()
                mpi.wait()
        ours = json.loads((Path(folder) / "torch.json").read_text())
        theirs = {} if mpi is None else json.loads((Path(folder) / "mpi.json").read_text())
    return [_row(ranks, size, ours[str(size)], theirs.get(str(size))) for size in plan.sizes_bytes]


def _row(
    ranks: int, size: int, ours: dict[str, dict[str, list[float]]], mpi: list[float] | None
) -> dict[str, Any]:
    took, active = ours["latency_s"], ours["active"]
    above = {"full": took["full"]} | ({} if mpi is None else {"mpi": mpi})
    # Which workers were drawn to start the majority's rounds: a sample of a few dozen has luck.
    quorum, everyone, rounds = Quorum.of("majority", ranks), tuple(range(ranks)), len(took["full"])
    drawn = [
        1 + min(quorum.for_round(index + WARM_UP_ROUNDS, everyone)[0]) for index in range(rounds)
    ]
    return {
        "ranks": ranks,
        "bytes": size,
        "skew_s": SKEW_S[ranks],
        "full_s": statistics.fmean(took["full"]),
        "mpi_s": None if mpi is None else statistics.fmean(mpi),
        "solo_s": statistics.fmean(took["solo"]),
        "majority_s": statistics.fmean(took["majority"]),
        "solo_active": statistics.fmean(active["solo"]),
        "majority_active": statistics.fmean(active["majority"]),
        "majority_active_drawn": statistics.fmean(drawn),
        "rounds": rounds,
        "ratios_with_5_and_95_percent": {
            f"{name}/{partial}": common.ratio_of_means(values, took[partial])
            for name, values in above.items()
            for partial in ("solo", "majority")
        },
    }


def _mpiexec() -> str | None:
    """MPI's launcher: that beside this Python, if it has mpi4py."""
    if find_spec("mpi4py") is None:
        return None
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")


def measure_late(rounds: int) -> dict[str, Any]:
    """Run the late join, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OFFBEAT_BENCHMARK_OUT"] = folder
        common.torchrun(__file__, 2, "--role=late", f"--rounds={rounds}")
        found = json.loads((Path(folder) / "late.json").read_text())
    quartiles = {name: statistics.quantiles(took, n=4) for name, took in found["took_s"].items()}
    for name, interval_s in found["intervals_s"].items():
        shown = common.spread([1e3 * took for took in found["took_s"][name]])
        print(f"late join, switch interval {1e3 * interval_s:.1f} ms ({name}'s): {shown} ms")
    return {
        "late_join_s": quartiles["offbeat"][1],
        "late_join_quartiles_s": quartiles["offbeat"],
        "late_join_with_pythons_interval_s": quartiles["python"][1],
        "late_join_with_pythons_interval_quartiles_s": quartiles["python"],
        "late_join_intervals_s": found["intervals_s"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print latencies, then ratios, each beside what follows from the skew alone."""
    print("\nmilliseconds in the call, mean over workers and rounds; [from the skew alone]")
    print("ranks     bytes         full   mpi    solo      majority   active: solo  majority")
    for row in rows:
        p, skew_ms = row["ranks"], 1e3 * row["skew_s"]
        mpi = "     -" if row["mpi_s"] is None else f"{1e3 * row['mpi_s']:6.1f}"
        print(
            f"{p:5d} {row['bytes']:9,d} {1e3 * row['full_s']:6.1f} [{(p - 1) / 2 * skew_ms:4.1f}]"
            f" {mpi} {1e3 * row['solo_s']:6.2f} {1e3 * row['majority_s']:6.1f} "
            f"[{(p * p - 1) / (6 * p) * skew_ms:4.1f}]  {row['solo_active']:8.2f} [1]"
            f" {row['majority_active']:6.2f} [{(p + 1) / 2}; "
            f"{row['majority_active_drawn']:.2f} as drawn]"
        )
    print("\nratios of means (5 % .. 95 % of resampled rounds)")
    for row in rows:
        p = row["ranks"]
        for name, (ratio, low, high) in row["ratios_with_5_and_95_percent"].items():
            limit = f", skew alone {3 * p / (p + 1):.2f}" if name.endswith("majority") else ""
            print(
                f"{p:5d} {row['bytes']:9,d} {name:14} {ratio:6.2f} ({low:.2f}..{high:.2f}){limit}"
            )


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--late", action="store_true", help="also: a worker busy in pure Python")
    parser.add_argument(
        "--ranks", type=int, nargs="*", help="only with so many workers; none: --late alone"
    )
    parser.add_argument("--role", choices=("contest", "mpi", "late"), help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=100, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else FULL
    if arguments.role is not None:
        folder = Path(os.environ["OFFBEAT_BENCHMARK_OUT"])
        if arguments.role == "late":
            late_join(arguments.rounds, folder)
        elif arguments.role == "mpi":
            contest_mpi(plan, Turns(folder, arguments.groups, group=1))
        else:
            contest(plan, Turns(folder, arguments.groups, group=0))
        return
    if _mpiexec() is None:
        print("no MPI here (pip install mpi4py mpich): without MPI_Allreduce")
    figures: dict[str, Any] = {"rows": []}
    if arguments.late:
        figures |= measure_late(20 if arguments.quick else 100)
    by_default = (8,) if arguments.quick else tuple(SKEW_S)
    for ranks in by_default if arguments.ranks is None else arguments.ranks:
        figures["rows"] += measure(ranks, plan, arguments.quick)
    show(figures["rows"])
    common.write(arguments.json, figures)


if __name__ == "__main__":
    main()
