"""What the asynchronous methods have in common: a judge, and a step.

    replica.contribute()            the gradient takes a ticket, and travels to all
    yield from replica.results()    what it and the others' have changed

They differ in their judge, which says what becomes of each gradient: see rounds/judge.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Judge, Queue, Round, Rules


@dataclass(frozen=True)
class Asynchronous(Algorithm):
    """Every gradient comes by itself, and a judge says what becomes of it."""

    @abstractmethod
    def judge(self, size: int) -> Judge:
        """What becomes of each gradient, with so many workers."""

    def start(self, replica: Replica) -> None:
        replica.open(Rules("solo"), engine=partial(Queue, self.judge(replica.world.size)))
        cast(Queue, replica.engine).judged = replica.judged

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute()
        yield from self.rounds(replica, replica.results())
