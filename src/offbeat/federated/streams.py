"""Class-incremental task streams: new classes come task by task, and the old samples are gone.

    stream = Stream.of(x, y, tasks=5, clients=5, split=lambda labels, seed: dirichlet(...))
    x, y = stream.share(task, client)

A stream is made from a seed alone, so every client makes the same one and takes its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.federated.partitions import dirichlet, kinds_of

Split = Callable[[Tensor, int], list[Tensor]]
"""Of the labels of a task and a seed: for every client, which of its samples are its own."""


def class_groups(
    labels: Tensor, tasks: int, *, seed: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of each task: as many in each, the last ones one more if need be.

    In the order of their numbers; shuffled, with a seed. Ten classes in three tasks are 3, 3 and 4.
    """
    kinds = kinds_of(labels)
    if not 1 <= tasks <= len(kinds):
        raise ValueError(
            f"tasks must be between 1 and the {len(kinds)} classes of the labels, got {tasks}: "
            "a task without a class has no data"
        )
    if seed is not None:
        order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed))
        kinds = [kinds[place] for place in order.tolist()]
    ends = [len(kinds) * task // tasks for task in range(tasks + 1)]
    return tuple(tuple(kinds[a:b]) for a, b in pairwise(ends))


@dataclass(frozen=True)
class Stream:
    """Samples, the classes of every task, and who has which."""

    x: Tensor
    y: Tensor
    classes: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[Tensor, ...], ...]
    """By task and client: which samples."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        *,
        tasks: int,
        clients: int,
        seed: int = 0,
        split: Split | None = None,
        classes: tuple[tuple[int, ...], ...] | None = None,
    ) -> Stream:
        """Cut a data set into tasks, and each task among clients: by Dirichlet(0.5) if not told.

        `classes` names those of each task; without it they are shuffled by the seed.
        """
        if len(x) != len(y):
            raise ValueError(f"{len(x)} samples do not go with {len(y)} labels")
        groups = class_groups(y, tasks, seed=seed) if classes is None else classes
        _check_groups(groups, y)
        split = split or partial(_by_dirichlet, clients=clients)
        parts = []
        for number, group in enumerate(groups):
            its = torch.isin(y, torch.tensor(group)).nonzero().flatten()
            shares = split(y[its], 1_000_003 * (seed + 1) + number)
            if len(shares) != clients:
                raise ValueError(f"the split makes {len(shares)} parts for {clients} clients")
            parts.append(tuple(its[each] for each in shares))
        return cls(x, y, groups, tuple(parts))

    @property
    def clients(self) -> int:
        """How many clients it was made for."""
        return len(self.parts[0])

    def share(self, task: int, client: int) -> tuple[Tensor, Tensor]:
        """What one client has of a task; it may be nothing."""
        mine = self.parts[task][client]
        return self.x[mine], self.y[mine]

    def seen(self, task: int) -> tuple[int, ...]:
        """The classes of this task and of those before, in the order in which they came."""
        return tuple(kind for group in self.classes[: task + 1] for kind in group)


def _by_dirichlet(labels: Tensor, seed: int, clients: int) -> list[Tensor]:
    return dirichlet(labels, clients, 0.5, seed=seed)


def _check_groups(groups: tuple[tuple[int, ...], ...], labels: Tensor) -> None:
    present, seen = set(kinds_of(labels)), set[int]()
    for number, group in enumerate(groups):
        if missing := [kind for kind in group if kind not in present]:
            raise ValueError(
                f"task {number} has classes {list(group)}, but no sample has the label "
                f"{missing[0]}: leave that class out"
            )
        if not group:
            raise ValueError(f"task {number} has no data: name a class of it, or leave it out")
        if twice := seen & set(group):
            raise ValueError(f"class {min(twice)} belongs to two tasks: tasks share no class")
        seen |= set(group)
