"""What takes turns in virtual time: the tasks of virtual workers, and their waits."""

from __future__ import annotations

from abc import ABC, abstractmethod

from greenlet import greenlet

from offbeat.errors import EpochOver
from offbeat.worlds.generators import Generators


class Worker:
    """What the tasks of one virtual worker have in common."""

    __slots__ = (
        *("alive", "epoch", "expelled", "failure", "generators", "loss", "rank", "tasks"),
        *("__weakref__", "thaws_s"),
    )

    def __init__(self, rank: int, seed: int | None = None) -> None:
        self.rank = rank
        self.alive = True
        self.expelled = False  # the others go on without it, and it does not know
        self.thaws_s = 0.0  # until then it is frozen
        self.failure: BaseException | None = None
        self.epoch = 0
        self.loss: tuple[str, int | None] = ("", None)  # what ended the epoch before, and who
        self.tasks: list[Task] = []
        self.generators = None if seed is None else Generators.seeded(seed)

    def over(self) -> EpochOver:
        """What is raised by whatever belongs to an epoch that has ended."""
        return EpochOver(*self.loss)


class Task:
    """A greenlet of a worker: its main program or a background activity."""

    __slots__ = (
        "broken",
        "done",
        "draws",
        "ending",
        "greenlet",
        "joining",
        "main",
        "name",
        "parked",
        "worker",
    )

    greenlet: greenlet

    def __init__(self, worker: Worker, name: str, main: bool) -> None:
        self.worker = worker
        self.name = name
        self.main = main
        self.draws = main and worker.generators is not None
        self.parked: Parked | None = None
        self.joining: list[Parked] = []
        self.ending = self.done = False
        self.broken: BaseException | None = None  # what its wait, which was broken off, raises


class Parked:
    """One wait of one task: whoever wakes it first wins, later wake-ups find it spent."""

    __slots__ = ("reason", "task")

    def __init__(self, task: Task, reason: object) -> None:
        self.task = task
        self.reason = reason

    @property
    def waits(self) -> bool:
        """Whether nobody has woken it yet."""
        return self.task.parked is self


class Visit(Parked, ABC):
    """A wait that has something done elsewhere first: the clock calls it at the moment of that.

    `str()` says in a deadlock what it waits for.
    """

    __slots__ = ()
    breaks = True
    """Whether the wait is for something that ends with an epoch."""

    def is_over(self) -> bool:
        """Whether its epoch ended while it was on its way."""
        return False

    @property
    def reason(self) -> object:  # type: ignore[override]
        """Itself; a slot that holds it would be a cycle."""
        return self

    @abstractmethod
    def there(self) -> None:
        """Do it, and wake the task or have it wait."""
