"""attach(): a user's model and optimizer over an algorithm, by one line.

Nothing is wrapped: hooks of the optimizer do it (attached.py). Here are the verbs that a user has.

Between backward and step, `.grad` is this worker's own gradient; after a step that applied a round
it is that round's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD
from offbeat.arguments import check_arguments, survives
from offbeat.attached import attached_to
from offbeat.clusters import Cluster
from offbeat.codecs import Codec, chosen
from offbeat.doctor import Doctor
from offbeat.ending import Goal, steps
from offbeat.errors import DetachedError, WorkerLostError
from offbeat.followers import Follower
from offbeat.pausing import Pausing
from offbeat.rounds.layout import BUCKET_BYTES
from offbeat.schedule import By, Schedule
from offbeat.worlds import enter_world, has_process_group, leave_world
from offbeat.worlds.current import present_world


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    algorithm: Algorithm | None = None,
    *,
    scheduler: LRScheduler | None = None,
    schedule_by: By = "samples",
    clip_norm: float | None = None,
    nonfinite: Literal["raise", "skip"] = "raise",
    bucket_bytes: int = BUCKET_BYTES,
    codec: Codec | Literal["auto"] | None = None,
    survive: bool | None = None,
    min_workers: int = 1,
    freeze_s: float | Literal["auto"] | None = "auto",
    pace: Cluster | str | None = None,
    seed: int | None = None,
    warn: bool = False,
) -> Attachment:
    """Train `model` with the other workers from here to the end of the block, or to `close()`.

    Args:
        algorithm: `SyncSGD()` if None.
        scheduler: stepped by offbeat; do not step it yourself.
        schedule_by: when. "samples": once for as many steps of all workers as a synchronous round
            would have held, so that a schedule ends with the same data as with
            DistributedDataParallel; "rounds": after every applied round; "steps": after every step
            of this worker's own, as if you did.
        clip_norm: clip the norm of the averaged gradient. To clip this worker's own gradient,
            call `torch.nn.utils.clip_grad_norm_` between backward and step, as ever.
        nonfinite: what to do with a round that holds NaN or infinity: raise on every worker, or
            skip it on every worker, and count it.
        bucket_bytes: how much is reduced at a time while backward runs.
        codec: what makes fewer bytes of what rounds sum up, such as `offbeat.Int8()`; "auto"
            measures whether that pays, on this job's network, and again when that changes.
        survive: go on without a worker that is lost, see docs/survival.md. If None, as
            $OFFBEAT_SURVIVE says, 0 or 1; without it, no: then everybody raises WorkerLostError.
        min_workers: with fewer than these left, everybody raises TooFewWorkersError after a step.
        freeze_s: with `survive`, the others go on without a worker that is silent for so long: it
            is frozen, or its interpreter is. None: it is waited for. "auto": 1 second from the
            first step on, unless all wait for all in this method, or for their neighbours, or it
            could not come back.
        pace: on real processes, the cluster (name or file) whose speeds to replay by sleeping;
            $OFFBEAT_PACE if None.
        seed: of the noise of `pace`; $OFFBEAT_SEED, or 0, if None.
        warn: time the collectives that others issue in the block, and have worker 0 say at its
            end, by a `HiddenWaitWarning`, where workers have waited and what to write instead.
    """
    algorithm = SyncSGD() if algorithm is None else algorithm
    check_arguments(
        model, optimizer, algorithm, scheduler, schedule_by, clip_norm, nonfinite, bucket_bytes
    )
    codec = chosen(codec)
    if (old := attached_to(optimizer)) is not None and not old._closed:
        raise DetachedError("this optimizer is attached already: close() that attachment first")
    survive = survives(survive, min_workers, freeze_s, algorithm)
    world = enter_world(pace, seed, min_workers if survive else None, freeze_s)
    try:
        algorithm.check(world.size)
        if codec is not None:
            codec.check(world.size)
        schedule = Schedule(scheduler, schedule_by, world.size * algorithm.round_steps)
        dp = Attachment(
            world, model, optimizer, algorithm, schedule, clip_norm, nonfinite, bucket_bytes, codec
        )
    except BaseException as error:
        leave_world(present_world() or world, error)  # another one, if it was to join again
        raise
    dp.doctor = Doctor() if warn and has_process_group() else None
    return dp


class Attachment(Pausing):
    """What `attach` returns, usually called `dp`: a few verbs, and the end of the block."""

    # --- the verbs -------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds that this worker has completed."""
        self._porting.counts_together()
        return self._replica.round

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._world.size

    @property
    def ticks(self) -> int:
        """Rounds that synchronous SGD would have made of all that was applied so far.

        Where workers step by themselves between rounds, of their own steps since, too: ticks go on
        with this worker's steps, at the pace that all had in rounds, and rather behind than ahead.

        Set learning rates by this, not by a count of this worker's own steps.
        """
        self._porting.counts_together()
        return self._apply.schedule.ticks

    @property
    def lockstep(self) -> bool:
        """Whether everybody waits for everybody in every round."""
        return self._replica.engine.lockstep

    @property
    def ending(self) -> bool:
        """Whether a worker has called `stop()`: from the same round on for all."""
        return self._apply.asked_to_end

    @property
    def drifts(self) -> bool:
        """Whether workers make steps of their own, and have models of their own between rounds."""
        return self._replica.shift is not None

    @property
    def closed(self) -> bool:
        """Whether the block has ended."""
        return self._closed

    def rounds(self, n: int) -> Iterator[int]:
        """Count this worker's steps until `n` rounds are made, those before a checkpoint included.

        All workers end their loops with the same round.
        """
        return self.until(rounds=n)

    def until(
        self,
        *,
        samples: float | None = None,
        rounds: int | None = None,
        seconds: float | None = None,
    ) -> Iterator[int]:
        """Count this worker's steps until one of these is reached: `for step in dp.until(...)`.

        Args:
            samples: that all workers together have applied, those before a checkpoint included.
            rounds: that were made, those before a checkpoint included.
            seconds: from here; virtual ones in virtual time.

        All workers end their loops with the same round, also if one of them calls `stop()`.
        """
        return steps(Goal(samples, rounds, seconds), self)

    def stop(self) -> None:
        """Have all workers end their `until` and `rounds` loops with the same round, soon.

        For early stopping, by whichever worker decides it.
        """
        self._replica.engine.ask_end()

    def on_round(self, follower: Follower) -> Callable[[], None]:
        """Have `follower(model, round)` called after every applied round; return how to end that.

        Once per round, in order, on every worker, while leaving too: for moving averages of the
        model, loggers, schedulers. Use the model that it is given. It holds what all workers agree
        on after that round, and is another than your own where a round is applied in the
        background, while your program waits in a collective of its own. Where models are averaged
        in groups (`WAGMASGD`) or mixed among neighbours (`DPSGD` and its like), nobody knows what
        all are together: it is this worker's own, as it is now, and differs from the others'.
        """
        return self._followers.add(follower)

    def samples(self, n: float) -> None:
        """Say, before backward, that this micro-batch's gradient is a mean over `n` samples.

        Rounds then average over samples, not over micro-batches. Calls add up until the step.
        """
        if not (isinstance(n, int | float) and math.isfinite(n) and n > 0):
            raise ValueError(f"samples must be a number above 0, got {n!r}")
        self._replica.declare_samples(n)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up `.grad` in this block: gradient accumulation. The step is one micro-batch."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False
        began = self._compute()
        self._tell("compute", from_s=began, to_s=self.seconds, samples=0.0, arrival="on time")

    def stoppable(self) -> AbstractContextManager[None]:
        """Leave a forward and backward pass in this block where it is, if it would come too late.

        For asynchronous methods that stop workers (`RingmasterASGD`, `RennalaSGD`): without it, a
        gradient is computed to its end, and dropped then. Call `optimizer.step()` after the block,
        as ever: it drops what was begun, and takes the newest parameters. What the block assigns
        may be missing then.
        """
        return self._stoppable.block()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Evaluate or save in this block: the model is as of the newest round, and stays so.

        It has all rounds that were made so far, and none of this worker's own steps since. The
        others go on meanwhile: this worker is away. Not with a method in which everybody waits for
        everybody: there they wait, as with DistributedDataParallel. `away()` is for both. Only
        `replicas_identical()` in the block brings the model to a newer round: to that of all.
        """
        self._check_between("agreed")
        self._take_newest()
        goes = not self._replica.engine.lockstep
        shown = self._shown is not None
        with self._away("agreed", goes=goes), self._showing():
            if not shown:
                self._show()
            yield

    @contextmanager
    def away(self, where: str = "") -> Iterator[None]:
        """Do something else in this block, for as long as it takes: evaluate, save, wait.

        The others' rounds count this worker as there, with nothing new, and it holds up nobody. It
        catches up at its next step. Around collectives of `torch.distributed` that the program
        calls itself, offbeat does this on its own.
        """
        if not where:
            self._check_between("away")
        with self._away("away", elsewhere=bool(where)):
            yield

    @contextmanager
    def _away(
        self, verb: str, *, elsewhere: bool = False, goes: bool = True, returns: bool = True
    ) -> Iterator[None]:
        if self._closed or self._in_step or (self._away_by and not elsewhere):
            yield
            return
        before, self._away_by = self._away_by, self._away_by or verb
        replica = self._replica
        away = replica.engine.away(elsewhere=elsewhere) if goes else nullcontext()
        try:
            with ExitStack() as stay:
                stay.enter_context(away)
                yield
                if self._replica is not replica:  # it has joined again meanwhile, in another world
                    with suppress(WorkerLostError):
                        stay.close()
                elif returns:
                    self._or_rejoin(stay.close, None)
        finally:
            self._away_by = before
