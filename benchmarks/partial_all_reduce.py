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
from offbeat.collectives import Quorum

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


QUICK = Plan((64, 2**20), blocks=2, block_rounds=6)
FULL = Plan((64, 2**10, 2**16, 2**20, 2**22), blocks=4, block_rounds=16)


# --- the contest, on every process ---------------------------------------------------------


def contest(plan: Plan, folder: Path) -> None:
    """Let Gloo's and offbeat's all-reduces take turns; worker 0 writes latencies and actives."""
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    results = {}
    for size in plan.sizes_bytes:
        ones = torch.ones(size // 4)
        full = ones.clone()
        with (
            offbeat.partial_all_reduce(
                f"solo {size}", torch.zeros(size // 4), quorum="solo", drop_late=True
            ) as solo,
            offbeat.partial_all_reduce(
                f"majority {size}", torch.zeros(size // 4), quorum="majority", drop_late=True
            ) as majority,
        ):
            calls: dict[str, Callable[[], Any]] = {
                "full": lambda full=full: dist.all_reduce(full),
                "solo": lambda solo=solo, ones=ones: solo.reduce(ones),
                "majority": lambda majority=majority, ones=ones: majority.reduce(ones),
            }
            for name in NAMES * WARM_UP_ROUNDS:
                dist.barrier()
                calls[name]()
            latencies = torch.zeros(len(NAMES), plan.rounds, dtype=torch.float64)
            active = torch.zeros(len(NAMES), plan.rounds, dtype=torch.float64)
            for round in range(plan.rounds):
                if round % plan.block_rounds == 0:
                    _take_turns("torch", f"{size}-{round}", folder, rank)
                for turn in range(len(NAMES)):
                    number = (round + turn) % len(NAMES)
                    full.fill_(1.0)
                    _arrive(rank, workers)
                    began = time.perf_counter()
                    record = calls[NAMES[number]]()
                    latencies[number, round] = time.perf_counter() - began
                    if record is not None:
                        _check(record, round + WARM_UP_ROUNDS)
                        active[number, round] = len(record.ranks)
            _end_turn("torch", folder, rank)
        dist.all_reduce(latencies)
        results[size] = {
            "latency_s": dict(zip(NAMES, (latencies / workers).tolist(), strict=True)),
            "active": dict(zip(NAMES, active.tolist(), strict=True)),
        }
    if rank == 0:
        (folder / "torch.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _arrive(rank: int, workers: int) -> None:
    """Meet the others, agree on a moment, and return this worker's share of the skew after it."""
    dist.barrier()
    moment = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
    dist.broadcast(moment, 0)
    _sleep_until(moment.item() + rank * SKEW_S[workers])


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _check(record: offbeat.Record, round: int) -> None:
    """Everyone brings ones, so the sum says how many are in it."""
    found = (record.round, record.sum.views[0][0].item())
    if found != (round, len(record.ranks)):
        raise AssertionError(
            f"round and sum are {found}, not {(round, len(record.ranks))}, for {record.ranks}"
        )


def contest_mpi(plan: Plan, folder: Path) -> None:
    """Do the same with MPI_Allreduce."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    rank, workers = everyone.rank, everyone.size
    results = {}
    for size in plan.sizes_bytes:
        ones, total = array("f", [1.0]) * (size // 4), array("f", [0.0]) * (size // 4)
        latencies = []
        for round in range(-WARM_UP_ROUNDS, plan.rounds):
            if round % plan.block_rounds == 0:
                _take_turns("mpi", f"{size}-{round}", folder, rank)
            everyone.Barrier()
            moment = everyone.bcast(time.monotonic() + LEAD_S if rank == 0 else None)
            _sleep_until(moment + rank * SKEW_S[workers])
            began = time.perf_counter()
            everyone.Allreduce([ones, MPI.FLOAT], [total, MPI.FLOAT])
            if round >= 0:
                latencies.append(everyone.allreduce(time.perf_counter() - began) / workers)
        _end_turn("mpi", folder, rank)
        results[size] = latencies
    if rank == 0:
        (folder / "mpi.json").write_text(json.dumps(results))
