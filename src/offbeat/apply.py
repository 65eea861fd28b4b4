"""Having rounds applied: the only place where parameters change.

An algorithm yields rounds. Each is begun (its merge puts it in place), stepped, if its merge says
so, by the optimizer, and ended. The first step is the one that the program has begun; the others
are ours. What the program does not come for is folded, by the background.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.errors import NonFiniteGradientError
from offbeat.followers import Followers
from offbeat.replica import Replica, Stats
from offbeat.rounds import Round
from offbeat.schedule import Schedule


class Applier:
    """One worker's rounds on their way into its parameters."""

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        algorithm: Algorithm,
        schedule: Schedule,
        followers: Followers,
        nonfinite: Literal["raise", "skip"],
        tell: Callable[..., None],
        stats: Stats,
    ) -> None:
        self.stats = stats
        self.stepping = False
        """Whether the optimizer makes a step of ours, not of the program's."""
        self._replica = replica
        self._optimizer = optimizer
        self._algorithm = algorithm
        self.schedule = schedule
        self._followers = followers
        self._dealt_before = -replica.world.dealt  # batches, in this block and as was saved
        self.samples = 0.0
        """Of all workers, in the rounds that this one has applied; or what its neighbours' come to,
        where it hears of nobody else."""
        self.asked_to_end = False
        """Whether somebody has asked that all end their loops."""
        self._nonfinite = nonfinite
        self._tell = tell
        self._rounds: Iterator[Round] = iter(())
        self._round: Round | None = None

    def begin(self, rounds: Iterator[Round]) -> bool:
        """Go through rounds up to one that needs a step, which is to follow; False for none."""
        if self.schedule.given:
            self._check_schedule()
        self._replica.engine.give_stripe()  # if the step before was left by an error
        self._rounds = rounds
        return self._next()

    def step_made(self) -> None:
        """The program's step is over: end its round, and apply what rounds are left."""
        if self._round is not None:
            self._end()
            self._apply_rest()
        with self._replica.engine.undisturbed() if self._replica.drifts else nullcontext():
            self.schedule.own_step()
            self.go_on()

    def go_on(self) -> None:
        """Own steps since the latest round count, too, where workers make some."""
        if self._replica.drifts:
            brings = self._replica.own.get("brings")
            dealt = self._dealt_before + self._replica.world.dealt
            self.schedule.go_on(self._replica.engine.made, brings, dealt)

    def apply(self, rounds: Iterator[Round]) -> None:
        """Apply rounds by steps of our own."""
        if self.schedule.given:
            self._check_schedule()
        self._rounds = rounds
        self._apply_rest()

    def fold(self, rounds: Iterator[Round]) -> None:
        """Apply rounds to something other than the parameters; in the background."""
        for each in self._algorithm.rounds(self._replica, self._replica.known(rounds)):
            assert each.merge is not None
            if each.bad is not None:
                self._not_finite(each, *each.bad, skip=each.merge.fold)
            elif each.samples or not each.merge.alike:
                each.merge.fold(each)
                self._note(each)
                self._followers.folded(each, each.merge.agreed())
            else:
                self._passed_by(each)

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
        now, rounds, engine = self._replica.world.now, self._rounds, self._replica.engine
        while True:
            if engine.more:  # it is applied at once
                engine.give_stripe()
            began = now()
            each = next(rounds, None)
            ended = now()
            if ended > began:
                self.stats.wait_s += ended - began
                number = None if each is None else each.round
                self._tell("wait", from_s=began, to_s=ended, round=number)
            if each is None:
                return False
            assert each.merge is not None
            if each.bad is not None:
                self._not_finite(each, *each.bad, skip=each.merge.skip)
            elif not each.samples and each.merge.alike:  # nobody had data: nothing to apply
                self._passed_by(each)
            else:
                self._round = each
                self._replica.changing()
                if each.merge.begin(each):
                    return True
                self._end()

    def _end(self) -> None:
        ended, self._round = self._round, None
        assert ended is not None
        merge = ended.merge
        assert merge is not None
        merge.end(ended)
        self._replica.changed()
        self._note(ended)
        if not merge.own:
            self._followers.applied(ended)

    def _note(self, applied: Round) -> None:
        assert applied.merge is not None
        world = self._replica.world
        now = world.now()
        self.stats.note(applied, now)
        if applied.merge.own:
            return
        if world.records is not None:
            self._tell_round(applied, now)
        self.samples += applied.samples / self._replica.engine.known_share
        self._passed_by(applied, applied=True)

    def _check_schedule(self) -> None:
        with self._replica.engine.undisturbed():
            self.schedule.check()

    def _passed_by(self, each: Round, applied: bool = False) -> None:
        """A round is over, whatever has become of it."""
        self._replica.round_began = self._replica.world.now()
        self.asked_to_end |= each.ends
        self.schedule.round(each, applied)

    def _not_finite(
        self, bad: Round, rank: int, number: int, skip: Callable[[Round], None]
    ) -> None:
        parameter, merge = self._replica.names[number], bad.merge
        assert merge is not None
        if self._nonfinite == "raise":
            what = "buffer" if parameter in self._replica.buffers else "gradient of"
            error = NonFiniteGradientError(
                f"the {what} {parameter!r} on worker {rank} is NaN or infinite in round "
                f"{bad.round}: lower the learning rate, or "
                'attach(..., nonfinite="skip") to leave out such rounds',
                rank=rank,
                round=bad.round,
                parameter=parameter,
            )
            error.everywhere = merge.alike
            raise error
        self.stats.skipped_rounds += 1
        me = self._replica.world.rank
        mine = 0.0 if merge.spares and rank != me else bad.samples_by_rank[me]
        self._replica.dropped_samples += mine
        if not merge.counts:  # own steps that are taken back
            self.stats.applied_samples -= mine
        self._replica.changing()
        skip(bad)
        self._replica.changed()
        self._passed_by(bad)

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
            **({"group": list(applied.group)} if applied.group else {}),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {
            "samples": self.samples,
            "dealt": self._dealt_before + self._replica.world.dealt,
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.samples = state["samples"]
        self._dealt_before = state["dealt"] - self._replica.world.dealt
        self.schedule.load_state_dict(state["schedule"])
