"""Quantising by plain operations of torch, in smaller pieces, and by `torch.compile`.

Of one chunk of 2 million numbers, on one thread: making codes, and reading them. "pieces" are the
same operations on a few blocks at a time, so that what one writes is in the cache when the next one
reads it. "compiled" is what inductor makes of them: C++, which it hands to the system's compiler.
It leaves Global-QSGD's draws to torch: its own generator takes no state.

What counts is the median over turns, in which each makes a call, in changing order. Compiling is
timed in a process of its own for each: with an empty cache, and again with the cache of the first.

    python benchmarks/codec_compile.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor

import offbeat
from offbeat.codecs.cuts import CHUNK, cuts
from offbeat.codecs.global_qsgd import SharedScale
from offbeat.codecs.integers import Integers

WORKERS = 4
TURNS = 30
PIECES = (2**14, 2**16, 2**18)
"""Numbers in each."""
STEP_MILLIONS = 10
"""Parameters of the model that compiling has to pay for."""

Call = Callable[[], Any]


class Chunk:
    """Numbers, the bytes that they become, and where they are read again."""

    def __init__(self) -> None:
        (self.cut,) = cuts(CHUNK, WORKERS, 256)
        self.numbers = torch.randn(self.cut.shape, generator=torch.Generator().manual_seed(0))
        self.read = torch.empty_like(self.numbers)

    def rows(self, coder: Any) -> Tensor:
        shape = self.cut.slices, coder.row_bytes(self.cut, torch.float32)
        return torch.empty(shape, dtype=torch.uint8)


def int8(chunk: Chunk) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """What `Int8` does with a chunk: functions, and what they are given."""
    coder = offbeat.Int8().coder(WORKERS, 0)
    assert isinstance(coder, Integers)
    rows = chunk.rows(coder)
    coder.encode(chunk.numbers, rows)
    return {
        "int8 encode": (coder.encode, (chunk.numbers, rows)),
        "int8 decode": (coder.decode, (rows, chunk.read)),
    }


def global_qsgd(chunk: Chunk) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Likewise, of Global-QSGD: what is drawn is drawn by torch."""
    standard = offbeat.GlobalQSGD().coder(WORKERS, 0)
    exponential = offbeat.GlobalQSGD("exponential").coder(WORKERS, 0)
    assert isinstance(standard, SharedScale)
    assert isinstance(exponential, SharedScale)
    generator, peak = torch.Generator().manual_seed(0), chunk.numbers.abs().max().view(1)
    codes = exponential.codes(chunk.numbers, peak, generator)
    return {
        "standard encode": (standard.codes, (chunk.numbers, peak, generator)),
        "exponential encode": (exponential.codes, (chunk.numbers, peak, generator)),
        "exponential add": (exponential.added, (codes, generator)),
    }


def in_pieces(call: Callable[..., Any], arguments: tuple[Any, ...], size: int) -> Call | None:
    """The same on so many numbers at a time; None where a call is not of rows and numbers."""
    if not all(isinstance(each, Tensor) for each in arguments):
        return None
    first, second = arguments
    encodes = first.dim() == 3
    numbers, rows = (first, second) if encodes else (second, first)
    slices, blocks, block = numbers.shape
    at_once = max(1, size // (slices * block))
    parts = []
    for begin in range(0, blocks, at_once):
        part = numbers[:, begin : begin + at_once]
        of_part = rows.new_empty(slices, part.shape[1] * (block + 4))  # laid out by the piece
        parts.append((part, of_part) if encodes else (of_part, part))

    def every() -> None:
        for pair in parts:
            call(*pair)

    return every


def seconds(calls: dict[str, Call], turns: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, turns):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            began = time.perf_counter()
            calls[name]()
            if turn >= 0:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in taken.items()}


def all_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    chunk = Chunk()
    return {**int8(chunk), **global_qsgd(chunk)}


def measured(name: str, turns: int) -> dict[str, Any]:
    """In a process of its own: milliseconds of a call, and seconds of the first compiled one."""
    call, arguments = all_calls()[name]
    began = time.perf_counter()
    compiled = torch.compile(call)
    compiled(*arguments)
    compile_s = time.perf_counter() - began
    calls = {"plain": partial(call, *arguments), "compiled": partial(compiled, *arguments)}
    for size in PIECES:
        if (pieces := in_pieces(call, arguments, size)) is not None:
            calls[f"pieces of {size}"] = pieces
    took = seconds(calls, turns)
    return {
        "call": name,
        "compile_s": round(compile_s, 2),
        "ms": {each: round(1000 * it, 3) for each, it in took.items()},
        "same_bits": _same_bits(call, compiled, arguments),
    }


def _same_bits(one: Callable[..., Any], other: Callable[..., Any], arguments: Any) -> bool:
    found = []
    for call in (one, other):
        for each in arguments:
            if isinstance(each, torch.Generator):
                each.manual_seed(1)
        got = call(*arguments)
        found.append((arguments[1] if got is None else got).clone())
    return torch.equal(*found)


def main() -> None:
    parser = common.options("Quantising by plain operations, and compiled.")
    parser.add_argument("--only", help="one call, in this process; prints its figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = 8 if options.quick else TURNS
    if options.only:
        print(json.dumps(measured(options.only, turns)))
        return
    if shutil.which("c++") is None:
        raise SystemExit("torch.compile needs a C++ compiler, and there is none here")
    rows = []
    for name in all_calls():
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (_alone(name, cache, options.quick) for _ in range(2))
        row = {**cold, "compile_again_s": warm["compile_s"]}
        saved_ms = (row["ms"]["plain"] - row["ms"]["compiled"]) * STEP_MILLIONS * 1e6 / CHUNK
        steps = 1000 * row["compile_s"] / saved_ms if saved_ms > 0 else None
        rows.append(row | {"pays_after_steps": None if steps is None else round(steps)})
        print(json.dumps(rows[-1]), flush=True)
        common.write(options.json, {"numbers": CHUNK, "rows": rows})


def _alone(name: str, cache: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", name, *(["--quick"] if quick else [])]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    ran = subprocess.run(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
