"""When a scheduler that was handed to attach() is stepped.

Under a method that does not wait, a worker's steps, its rounds and its data no longer go together:
a fast worker makes more steps, and a round may hold a single gradient or fifty. A schedule that was
written for DistributedDataParallel counts *ticks*: synchronous rounds, to which every worker brings
one step (or several, with gradient accumulation: `micro_batches`). So a tick passes here whenever
as many steps have gone into rounds as a synchronous one holds, whoever made them:

    ticks = steps in all rounds so far // (workers * micro_batches)

and a schedule of 60 ticks ends with the same data under every method. It is a function of rounds,
which all workers know alike, so replicas stay identical.

Where models are averaged, a worker steps by itself between rounds, with rates of its own, which
need not be anybody else's. There ticks go on with its own steps (ahead.py), or a warm-up would be
one long stair.
"""

from __future__ import annotations

from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from offbeat.ahead import Ahead
from offbeat.errors import ScheduleError
from offbeat.rounds import Round

By = Literal["samples", "rounds", "steps"]
KINDS = get_args(By)


class Schedule:
    """One worker's ticks, and the scheduler that is stepped by them, if there is one."""

    def __init__(self, scheduler: LRScheduler | None, by: By, steps: int) -> None:
        """`steps` are those that all workers together bring to a synchronous round."""
        self._scheduler = scheduler
        self._by = by
        self._steps = steps
        self.made = 0
        """Steps in all rounds so far."""
        self.ticks = 0
        """Rounds that synchronous SGD would have made of the steps in all rounds so far; and of
        this worker's own since, and as many as the others are likely to have made meanwhile."""
        self._ahead = Ahead(steps)
        self._followed = 0  # ticks that the scheduler was stepped for
        if scheduler is not None:
            self._followed = _further.pop(scheduler, 0)
        self._stepped: tuple[int, ...] | None = None  # how often, as its counters have it

    @property
    def given(self) -> bool:
        """Whether there is a scheduler."""
        return self._scheduler is not None

    @property
    def alike(self) -> bool:
        """Whether the scheduler has set the same values on all workers, at every round."""
        return self.given and self._by != "steps"

    def round(self, each: Round, applied: bool) -> None:
        """A round has passed, and was applied or left out."""
        self.made += each.made
        self._ahead.round(each)
        self.ticks = max(self.ticks, self.made // self._steps)
        if self._by == "samples":
            self._follow(self.made // self._steps)
        elif self._by == "rounds" and applied:
            self._step(1)

    def own_step(self) -> None:
        """The program has made a step."""
        if self._by == "steps":
            self._step(1)

    def go_on(self, made: int, brings: float | None, dealt: int) -> None:
        """Workers step by themselves between rounds, and this one has made so many in all.

        For each of them a round `brings` so many of all workers, if that is known. There are
        `dealt` batches for all together, if they are dealt.
        """
        to_come = dealt - self.made if dealt else None
        ahead = self._ahead.steps(made, brings, to_come)
        self.ticks = max(self.ticks, (self.made + ahead) // self._steps)
        while self._by == "samples" and self._followed < self.ticks:
            if _is_at_end(self._scheduler):
                break
            self._follow(self._followed + 1)

    def begin_own_steps(self) -> None:
        """This worker has made none: what was loaded is another one's, whose place it takes."""
        self._ahead.begin()

    def end(self) -> None:
        """All have left, and every step is in a round: ticks are what they say, on all alike."""
        self.ticks = self.made // self._steps
        if self._scheduler is not None and self._followed > self.ticks:
            _further[self._scheduler] = self._followed - self.ticks

    def _follow(self, ticks: int) -> None:
        ahead, self._followed = ticks - self._followed, max(ticks, self._followed)
        self._step(ahead)

    def check(self) -> None:
        """Raise if the program steps the scheduler, too: at other moments on every worker."""
        if self._scheduler is None:
            return
        counts = _counts(self._scheduler)
        if self._stepped not in (None, counts):
            raise RuntimeError(
                "scheduler.step() was called by hand, though attach(..., scheduler=scheduler) "
                f"has it stepped by {self._by}: remove that call; or do not hand the "
                "scheduler to attach(), and each round takes the rate that its workers hold"
            )
        self._stepped = counts

    def _step(self, times: int) -> None:
        if self._scheduler is None:
            return
        for _ in range(times):
            try:
                self._scheduler.step()
            except ValueError as error:  # OneCycleLR's
                raise ScheduleError(
                    f"the scheduler has come to its end, and training goes on ({error}): "
                    f"{_WHY[self._by]}"
                ) from error
        self._stepped = _counts(self._scheduler)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        scheduler = self._scheduler
        return {
            "made": self.made,
            "followed": self._followed,
            "ahead": dict(vars(self._ahead)),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.made = state["made"]
        self.ticks = self.made // self._steps
        self._followed = state["followed"]
        vars(self._ahead).update(state["ahead"])
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
            self._stepped = None


# How far blocks have left schedulers ahead of their rounds: the next block makes up for that.
_further: WeakKeyDictionary[LRScheduler, int] = WeakKeyDictionary()

_WHY = {
    "samples": "with schedule_by='samples' it is stepped once for as many steps of all workers as "
    "a synchronous round would have held, as with DistributedDataParallel; make it as long as the "
    "job, or end the loop with `for step in dp.until(...)`",
    "rounds": "with schedule_by='rounds' it is stepped once per applied round, and a method that "
    "does not wait makes more of them than synchronous SGD; schedule_by='samples' (the default) "
    "ends where DistributedDataParallel does",
    "steps": "with schedule_by='steps' it is stepped once for each step of this worker, and a fast "
    "worker makes more of them than its share; schedule_by='samples' (the default) ends where "
    "DistributedDataParallel does",
}


def _is_at_end(scheduler: LRScheduler | None) -> bool:
    """Whether it would raise, were it stepped once more: only what is certain is worth that."""
    parts: list[Any] = [scheduler, *getattr(scheduler, "_schedulers", ())]
    return any(each.last_epoch >= each.total_steps for each in parts if _has_end(each))


def _has_end(scheduler: Any) -> bool:
    return getattr(scheduler, "total_steps", None) is not None  # OneCycleLR's


def _counts(scheduler: LRScheduler) -> tuple[int, ...]:
    """How often a scheduler was stepped; those that a ChainedScheduler holds, one by one."""
    if (parts := getattr(scheduler, "_schedulers", None)) is not None:
        return tuple(count for part in parts for count in _counts(part))
    return (scheduler.last_epoch,)
