"""Having rounds applied: the only place where parameters change.

An algorithm yields rounds. Each is begun (its merge puts it in place), stepped, if its merge says
so, by the optimizer, and ended. The first step is the one that the program has begun; the others
are ours. What the program does not come for is folded, by the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.algorithm import Algorithm
from offbeat.errors import NonFiniteGradientError
from offbeat.replica import Replica, Stats
from offbeat.rounds import Round


class Applier:
    """One worker's rounds on their way into its parameters."""

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        algorithm: Algorithm,
        scheduler: LRScheduler | None,
        nonfinite: Literal["raise", "skip"],
        tell: Callable[..., None],
    ) -> None:
        self.stats = Stats(replica.world.rank)
        self.stepping = False
        """Whether the optimizer makes a step of ours, not of the program's."""
        self._replica = replica
        self._optimizer = optimizer
        self._algorithm = algorithm
        self._scheduler = scheduler
        self._stepped: tuple[int, ...] | None = None  # how often, as its counters have it
        self._nonfinite = nonfinite
        self._tell = tell
        self._rounds: Iterator[Round] = iter(())
        self._round: Round | None = None

    def begin(self, rounds: Iterator[Round]) -> bool:
        """Go through rounds up to one that needs a step, which is to follow; False for none."""
        if self._scheduler is not None:
            self._check_scheduler(self._scheduler)
        self._rounds = rounds
        return self._next()

    def step_made(self) -> None:
        """The program's own step is over: end its round, and apply what rounds are left."""
        if self._round is not None:
            self._end()
            self._apply_rest()

    def apply(self, rounds: Iterator[Round]) -> None:
        """Apply rounds by steps of our own."""
        if self._scheduler is not None:
            self._check_scheduler(self._scheduler)
        self._rounds = rounds
        self._apply_rest()

    def fold(self, rounds: Iterator[Round]) -> None:
        """Apply rounds to something other than the parameters; in the background."""
        for each in self._algorithm.rounds(self._replica, self._replica.known(rounds)):
            assert each.merge is not None
            if each.bad is not None:
                self._not_finite(each, *each.bad, skip=each.merge.fold)
            elif each.samples:
                each.merge.fold(each)
                self._note(each)
            else:
                self._passed_by()

    def may_fold(self, round: Round) -> bool:
        """Say whether the program need not hear of a round: it would not raise."""
        return round.bad is None or self._nonfinite == "skip"

    def _apply_rest(self) -> None:
        while self._next():
            self.stepping = True
            try:
                self._optimizer.step()
            finally:
                self.stepping = False
            self._end()

    def _next(self) -> bool:
        """Let the algorithm run to its next round that needs a step; False at the end."""
        world, stats = self._replica.world, self.stats
        while True:
            began = world.now()
            each = next(self._rounds, None)
            ended = world.now()
            stats.wait_s += ended - began
            if ended > began:
                number = None if each is None else each.round
                self._tell("wait", from_s=began, to_s=ended, round=number)
            if each is None:
                return False
            assert each.merge is not None
            if each.bad is not None:
                self._not_finite(each, *each.bad, skip=each.merge.skip)
            elif not each.samples:  # nobody had data: nothing to apply
                self._passed_by()
            else:
                self._round = each
                if each.merge.begin(each):
                    return True
                self._end()

    def _end(self) -> None:
        ended, self._round = self._round, None
        assert ended is not None
        assert ended.merge is not None
        ended.merge.end(ended)
        self._note(ended)

    def _note(self, applied: Round) -> None:
        assert applied.merge is not None
        now = self._replica.world.now()
        self.stats.note(applied, now)
        if not applied.merge.own:
            self._tell_round(applied, now)
            self._replica.round_began = now
        if self._scheduler is not None:
            for _ in range(applied.schedule_steps):
                self._scheduler.step()
            self._stepped = _counts(self._scheduler)

    def _check_scheduler(self, scheduler: LRScheduler) -> None:
        """Raise if the program steps the scheduler, too: at other moments on every worker."""
        with self._replica.engine.undisturbed():
            counts = _counts(scheduler)
            if self._stepped not in (None, counts):
                raise RuntimeError(
                    "scheduler.step() was called by hand, though attach(..., scheduler=scheduler) "
                    "has it stepped once per applied round: remove that call; or do not hand the "
                    "scheduler to attach(), and each round takes the rate that its workers hold"
                )
            self._stepped = counts

    def _passed_by(self) -> None:
        self._replica.round_began = self._replica.world.now()

    def _not_finite(
        self, bad: Round, rank: int, number: int, skip: Callable[[Round], None]
    ) -> None:
        parameter, merge = self._replica.names[number], bad.merge
        assert merge is not None
        if self._nonfinite == "raise":
            error = NonFiniteGradientError(
                f"the gradient of {parameter!r} on worker {rank} is NaN or infinite in round "
                f"{bad.round}: lower the learning rate, or "
                'attach(..., nonfinite="skip") to leave out such rounds',
                rank=rank,
                round=bad.round,
                parameter=parameter,
            )
            error.everywhere = not merge.own
            raise error
        self.stats.skipped_rounds += 1
        mine = bad.samples_by_rank[self._replica.world.rank]
        self._replica.dropped_samples += mine
        if not merge.counts:  # own steps that are taken back
            self.stats.applied_samples -= mine
        skip(bad)
        self._passed_by()

    def _tell_round(self, applied: Round, at_s: float) -> None:
        self._tell(
            "round",
            round=applied.round,
            from_s=applied.began_s,
            to_s=applied.ended_s,
            at_s=at_s,
            samples=applied.samples,
            workers=len(applied.ranks),
            staleness_rounds=applied.staleness_rounds,
            mean_staleness_rounds=applied.mean_staleness_rounds,
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The scheduler's."""
        return None if self._scheduler is None else self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Become what was saved."""
        if self._scheduler is not None and state is not None:
            self._scheduler.load_state_dict(state)
            self._stepped = None


def _counts(scheduler: LRScheduler) -> tuple[int, ...]:
    """How often a scheduler was stepped; those that a ChainedScheduler holds, one by one."""
    if (parts := getattr(scheduler, "_schedulers", None)) is not None:
        return tuple(count for part in parts for count in _counts(part))
    return (scheduler.last_epoch,)
