"""The next character of texts of very different length: imbalance that comes with the data.

The texts are docstrings of Python's standard library. A micro-batch is a few of them in full, its
samples are their characters, and a cluster with `sample_s` charges for each: the cost of a
micro-batch is its length, whoever computes it. `text-adamw` is the same by AdamW, with a warm-up
and a cosine that ends half-way through the budget.
"""

from __future__ import annotations

import ast
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offbeat.lab.goals import Target
from offbeat.lab.tasks.base import Batch, Task, classified, generator, sgd

_MODULES = """
argparse ast calendar collections concurrent.futures configparser contextlib csv datetime codecs
difflib doctest email.message enum fractions functools heapq inspect ipaddress json
logging multiprocessing os pathlib pickle random sched shutil socket statistics string subprocess
tempfile textwrap threading typing unittest uuid zipfile
"""
_CONTEXT = 6
_TEXTS = 2
_TESTS = 2000
_ADAMW_LR = 4e-3
_ADAMW_STEPS = 600
_WARM_UP = 30
_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))


def adamw() -> Task:
    """The same, as language models are trained: AdamW, a warm-up, and a cosine."""
    return replace(
        task(),
        name="text-adamw",
        optimizer=lambda model: AdamW(model.parameters(), lr=_ADAMW_LR, weight_decay=0.01),
        schedule=_warm_up_and_cosine,
        target=Target("loss", 2.15),
        budget_steps=2 * _ADAMW_STEPS,
    )


def _warm_up_and_cosine(optimizer: Optimizer) -> LambdaLR:
    def factor(tick: int) -> float:
        if tick < _WARM_UP:
            return (tick + 1) / _WARM_UP
        rest = min(1.0, (tick - _WARM_UP) / (_ADAMW_STEPS - _WARM_UP))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * rest))

    return LambdaLR(optimizer, factor)


def task() -> Task:
    """Predict characters of Python's documentation from the six before them."""
    train, (test_x, test_y) = _texts()

    def batches(rank: int, world_size: int, seed: int) -> Iterator[Batch]:
        mine = generator(seed, rank)
        while True:
            some = torch.randint(len(train), (_TEXTS,), generator=mine).tolist()
            parts = [train[number] for number in some]
            yield torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    return Task(
        "text",
        model=lambda: nn.Sequential(
            nn.Embedding(len(_CHARACTERS), 16),
            *(nn.Flatten(), nn.Linear(16 * _CONTEXT, 64), nn.ReLU()),
            nn.Linear(64, len(_CHARACTERS)),
        ),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        evaluate=lambda model: classified(model, test_x, test_y),
        optimizer=sgd(lr=0.5, momentum=0.5),
        target=Target("loss", 2.6),
        budget_steps=800,
        draws=False,
    )


@cache
def _texts() -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Windows and next characters of every text; and some of every tenth text, for tests."""
    texts = [_windows(text) for text in sorted(_docstrings()) if len(text) > 40]
    train = [text for number, text in enumerate(texts) if number % 10]
    test_x, test_y = (torch.cat(part) for part in zip(*texts[::10], strict=True))
    some = torch.arange(0, len(test_y), max(1, len(test_y) // _TESTS))
    return train, (test_x[some], test_y[some])


def _windows(text: str) -> tuple[Tensor, Tensor]:
    codes = [_CHARACTERS.find(each) for each in text]
    known = torch.tensor([0] * _CONTEXT + [code for code in codes if code >= 0])
    windows = known.unfold(0, _CONTEXT + 1, 1)
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


def _docstrings() -> set[str]:
    """Read them off the sources: nothing is imported."""
    found = set()
    for name in _MODULES.split():
        path = Path(sysconfig.get_paths()["stdlib"], *name.split("."))
        source = path.with_suffix(".py")
        source = source if source.exists() else path / "__init__.py"
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found.add(ast.get_docstring(node) or "")
    return found
