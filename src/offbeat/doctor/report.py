"""From what every worker has seen to sentences: what is amiss, what to write, what that brings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.doctor.known import Known
from offbeat.worlds.places import Place

_ADAPTIVE = ("ABSSGD", "LBBSP", "NonblockingSGD", "DropCompute")
_FEW_STEPS = 4
_LEAST_S = 1e-3
"""A step: to wait less in a collective is not worth a line."""
_PAGE = "docs/frameworks.md"


@dataclass(frozen=True)
class Diagnosis:
    """What was found, in sentences; the last says what would be gained."""

    sentences: tuple[str, ...]
    gained: str

    def __str__(self) -> str:
        lines = [f"{number}. {each}" for number, each in enumerate(self.sentences, 1)]
        return "\n".join([*lines, self.gained])


def diagnose(notes: Sequence[str]) -> Diagnosis:
    """Compare the notes of all workers, in the order of their ranks."""
    workers: list[dict[str, Any]] = [json.loads(each) for each in notes]
    rank = max(range(len(workers)), key=lambda each: _waited(workers[each]))
    fast = workers[rank]
    found = [_on_wait(wait, rank, fast) for wait in _worth_it(fast)]
    if any(each["wrapped"] for each in workers):
        found.append(
            "a model is wrapped in DistributedDataParallel, whose backward waits for the slowest "
            "worker in every step (that wait is not counted here): do not wrap it, and attach it "
            "by offbeat.attach"
        )
    found += _on_threads(workers) + _on_data(workers) + _on_batches(workers)
    return Diagnosis(tuple(found), _gained(rank, fast))


def _waited(worker: dict[str, Any]) -> float:
    return float(sum(each["seconds"] for each in worker["waits"]))


def _worth_it(worker: dict[str, Any]) -> list[dict[str, Any]]:
    least = _LEAST_S * max(worker["steps"], 1)
    return [each for each in worker["waits"] if each["known"] or each["seconds"] > least]


def _on_wait(wait: dict[str, Any], rank: int, worker: dict[str, Any]) -> str:
    place = Place(*wait["place"])
    known = None if wait["known"] is None else Known(*wait["known"])
    what = "the program issues a collective" if known is None else known.what
    where = f"{place.file}:{place.line} in {place.function} ({place.verb})"
    program = None if wait["program"] is None else Place(*wait["program"])
    from_ = "" if program is None or program == place else f", from {program.file}:{program.line}"
    times = f"{wait['count']} times in {worker['steps']} steps"
    advice = "issue it less often, or outside of the loop" if known is None else known.advice
    return (
        f"{what}: worker {rank} waited {wait['seconds']:.2f} s there, {times}, at {where}{from_}. "
        f"Instead: {advice}"
    )


def _on_threads(workers: list[dict[str, Any]]) -> list[str]:
    for worker in workers:
        wanted, cores = worker["threads"] * worker["local"], worker["cores"]
        if worker["local"] > 1 and wanted > cores:
            each = max(cores // worker["local"], 1)
            return [
                f"{worker['local']} processes with {worker['threads']} threads each share {cores} "
                f"cores, and slow each other down: set OMP_NUM_THREADS={each}"
            ]
    return []


def _on_data(workers: list[dict[str, Any]]) -> list[str]:
    marks = [each["same_data"] for each in workers]
    if len(workers) > 1 and all(marks) and len(set(marks)) == 1:
        return [
            "every worker goes through the same data set, by a sampler that does not know of "
            "ranks: deal the data, DataLoader(data, batch_sampler=offbeat.Deal(data, batch_size))"
        ]
    return []


def _on_batches(workers: list[dict[str, Any]]) -> list[str]:
    for worker in workers:
        method, rounds = worker.get("method", ""), worker.get("rounds", 0)
        if method in _ADAPTIVE and rounds and worker["steps"] < _FEW_STEPS * rounds:
            return [
                f"a round of {method} holds {worker['steps'] / rounds:.1f} steps of a worker, and "
                "a slow one can only do whole steps less: take a batch of a quarter of the size, "
                "and four times as many micro_batches where the method has them"
            ]
    return []


def _gained(rank: int, worker: dict[str, Any]) -> str:
    steps = worker["steps"]
    waited, took = _waited(worker), worker["seconds"]
    if steps < 2 or took <= 0:
        return f"Too few steps to say what would be gained; see {_PAGE}"
    step_ms, waited_ms = 1e3 * took / steps, 1e3 * min(waited, took) / steps
    rest_ms = max(step_ms - waited_ms, 1e-3)
    if waited_ms < 0.05 * step_ms:
        return (
            f"Worker {rank} takes {step_ms:.1f} ms a step, and hardly waits in the collectives "
            "that are counted here. What it waits for in rounds, or in DDP's backward pass, is not "
            f"among them: dp.stats().wait_s, or a race on a profile of this job, says that; {_PAGE}"
        )
    return (
        f"Worker {rank} takes {step_ms:.1f} ms a step, and waits {waited_ms:.1f} ms of that in "
        "collectives that the script calls itself; what it waits for in DDP's backward pass is not "
        f"counted. Without them, and with a method that does not wait, it would take "
        f"about {rest_ms:.1f} ms: {step_ms / rest_ms:.1f} times as fast; see {_PAGE}"
    )
