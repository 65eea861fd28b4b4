"""Where every gradient comes by itself, and nobody waits: what each of them is to do.

Workers take tickets, and gradients come in the order of these. A *judge* says of each one whether
it counts, whether the parameters change now, and who goes on from where. It knows what has come
before, and nothing else; so all workers, or a server, come to the same verdicts.

    worker 0   compute at x_0 ──┐ x_1 ── compute at x_1 ─────────┐ x_3
    worker 1   compute at x_0 ─────────────────┐ delay 1: x_2 ── compute at x_2 ──
    worker 2   compute at x_0 ──────────────────────────────────────────┐ delay 3: too late?

The *version* of parameters is how many updates are in them; a gradient's *delay*, how many were
made since it was begun.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Then = Literal["clear", "keep", "next"]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A gradient that has come, as its worker describes it."""

    worker: int
    version: int
    """Of the parameters that it was computed from."""
    samples: float = 1.0
    seconds: float = 0.0
    """Since this worker's gradient before, or the beginning."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a gradient, of the parameters, and of those who compute."""

    into: int | None = 0
    """The sum that it is added to; None: it is dropped."""
    update: bool = False
    """Whether the optimizer now makes a step on the first sum over the divisor."""
    divisor: float = 1.0
    scale: float = 1.0
    """Of that step's learning rate."""
    then: Then = "clear"
    """What becomes of the first sum after the update: it is emptied, stays, or is the second one,
    which is emptied."""
    fresh: bool = True
    """Whether its worker goes on from the newest parameters, and not from those that it has."""
    stopped: Collection[int] = ()
    """Who else is to leave what it computes, and begin anew from the newest parameters."""
    idle: bool = False
    """Whether its worker does nothing until a later verdict has it begin anew."""


DROPPED = Verdict(into=None)


class Judge(ABC):
    """What becomes of each gradient, in order."""

    sums: ClassVar[int] = 1
    """How many it has added up."""
    averages: ClassVar[bool] = False
    """Whether it is the mean of a worker's gradients that counts in a sum, once for each worker;
    else all of them, weighed by their samples."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.version = 0
        """Updates so far."""
        self.left: set[int] = set()
        """Who is not there: it has left, or is lost, and none has joined in its place. Whoever
        asks the judge keeps this."""

    @abstractmethod
    def judge(self, ticket: Ticket) -> Verdict:
        """Say what becomes of the next gradient."""

    def delay(self, ticket: Ticket) -> int:
        """Updates since it was begun."""
        return self.version - ticket.version

    def leaves(self, worker: int) -> Sequence[Verdict]:
        """Hear that a worker is among those who have `left`; what follows, of no gradient.

        Nobody may be waited for who does not come; and when all have left, what was added up must
        have been applied.
        """
        return ()

    def learn(self, scale: float) -> None:  # noqa: B027 - most have nothing to choose
        """Hear of the noise scale of a gradient: how many are worth being averaged."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {name: deepcopy(_plain(value)) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        mine_by_name = vars(self)
        for name, value in deepcopy(state).items():
            if name not in mine_by_name:  # of an earlier version of offbeat
                continue
            if isinstance(mine := mine_by_name[name], Expiry):
                vars(mine).update(value)
            else:
                setattr(self, name, value)


class Expiry:
    """Who computes since which version; who has done so for too many updates.

    Finding those costs time for them alone, not for all workers.
    """

    def __init__(self, size: int) -> None:
        self._since = [0] * size
        self._computing: dict[int, set[int]] = {0: set(range(size))}
        self._oldest = 0

    def restarts(self, worker: int, version: int) -> None:
        """It begins at that version, whatever it was doing."""
        before = self._since[worker]
        self._computing[before].discard(worker)
        if not self._computing[before]:
            del self._computing[before]  # where nothing expires, this would grow without end
        self._since[worker] = version
        self._computing.setdefault(version, set()).add(worker)

    def expired(self, version: int, limit: float) -> list[int]:
        """Who has missed `limit` updates and more; they all begin anew at this version."""
        found: list[int] = []
        while self._oldest <= version - limit:
            found += self._computing.pop(self._oldest, ())
            self._oldest += 1
        for worker in found:
            self._since[worker] = version
        if found:
            self._computing.setdefault(version, set()).update(found)
        return sorted(found)


def _plain(value: Any) -> Any:
    """What can be saved: no objects of ours."""
    return vars(value) if isinstance(value, Expiry) else value


class Enough(Judge):
    """Gradients of the newest parameters are added up until there are enough; late ones dropped.

    Enough: so many `gradients`, and of so many `workers`. `once`: a worker that has given one
    waits for the next version; otherwise it gives another of this one.
    """

    def __init__(
        self,
        size: int,
        *,
        gradients: int = 1,
        workers: int = 1,
        stops: bool = True,
        once: bool = False,
    ) -> None:
        super().__init__(size)
        self.gradients = gradients
        self.workers = workers
        self._stops = stops
        self._once = once
        self._samples = 0.0
        self._count = 0
        self._whose: set[int] = set()

    def learn(self, scale: float) -> None:
        """So many gradients are enough."""
        self.gradients = int(scale)

    def judge(self, ticket: Ticket) -> Verdict:
        if self.delay(ticket):
            return DROPPED
        self._samples += ticket.samples
        self._count += 1
        self._whose.add(ticket.worker)
        return self._updated(ticket.worker) if self._is_enough() else Verdict(idle=self._once)

    def leaves(self, worker: int) -> Sequence[Verdict]:
        return (self._updated(worker),) if self._is_enough() else ()

    def _is_enough(self) -> bool:
        """Whether there is as much as is wanted, or as those who have not left can bring."""
        if len(self.left) == self.size:
            return self._count > 0
        most = len(self._whose) + self.size - len(self._whose | self.left)
        return self._count >= self.gradients and len(self._whose) >= min(self.workers, most)

    def _updated(self, worker: int) -> Verdict:
        others = self._others(worker)
        divisor, self._samples, self._count = self._samples, 0.0, 0
        self._whose.clear()
        self.version += 1
        return Verdict(update=True, divisor=divisor, stopped=others)

    def _others(self, worker: int) -> list[int]:
        """Who begins anew with an update, but for the worker that has brought it."""
        if self._stops:
            return [each for each in range(self.size) if each != worker]
        return sorted(self._whose - {worker}) if self._once else []
