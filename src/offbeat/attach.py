"""attach(): a user's model and optimizer over an algorithm, by hooks.

Nothing is wrapped. A pre-hook of the optimizer turns `optimizer.step()` into "one micro-batch is
done": it asks the algorithm, which may answer with a round to apply. The first such round is put
into `.grad` and applied by the very step that is under way; further ones (a late worker catches
up) by steps of our own in the post-hook; and if there is none, `.grad` is None everywhere and the
step has nothing to do.

This file is longer than others: it is all that a user meets, in one place.

Between backward and step, `.grad` is this worker's own gradient; after a step that applied a round
it is that round's mean.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from offbeat import checkpoint
from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD
from offbeat.alike import alike, average_buffers, broadcast, named_parameters
from offbeat.apply import Applier
from offbeat.arguments import check_arguments
from offbeat.clusters import Cluster
from offbeat.ending import Goal, note_join, steps
from offbeat.errors import DetachedError, ReplicasDifferError, WorkerLeft
from offbeat.followers import Follower, Followers
from offbeat.porting import Porting
from offbeat.replica import Replica, Stats
from offbeat.rounds import agree
from offbeat.rounds.layout import BUCKET_BYTES
from offbeat.schedule import By, Schedule
from offbeat.worlds import World, enter_world, leave_world

_NOBODY = nullcontext()
# By reference: what is attached keeps its optimizer, which would else keep itself for ever.
_attachments: WeakKeyDictionary[Optimizer, ref[Attachment]] = WeakKeyDictionary()


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
    pace: Cluster | str | None = None,
    seed: int | None = None,
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
        pace: on real processes, the cluster (name or file) whose speeds to replay by sleeping;
            $OFFBEAT_PACE if None.
        seed: of the noise of `pace`; $OFFBEAT_SEED, or 0, if None.
    """
    algorithm = SyncSGD() if algorithm is None else algorithm
    check_arguments(
        model, optimizer, algorithm, scheduler, schedule_by, clip_norm, nonfinite, bucket_bytes
    )
    if (old := _attached(optimizer)) is not None and not old._closed:
        raise DetachedError("this optimizer is attached already: close() that attachment first")
    world = enter_world(pace, seed)
    try:
        algorithm.check(world.size)
        schedule = Schedule(scheduler, schedule_by, world.size * algorithm.round_steps)
        return Attachment(
            world, model, optimizer, algorithm, schedule, clip_norm, nonfinite, bucket_bytes
        )
    except BaseException as error:
        leave_world(world, error)
        raise


class Attachment:
    """What `attach` returns, usually called `dp`: a few verbs, and the end of the block."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm,
        schedule: Schedule,
        clip_norm: float | None,
        nonfinite: Literal["raise", "skip"],
        bucket_bytes: int,
    ) -> None:
        self.algorithm = algorithm
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._closed = False
        self._in_no_sync = False
        self._in_step = False
        self._away_by = ""  # the verb that this worker is away by

        names, parameters = named_parameters(model, optimizer)
        number = next(world.numbers)
        agree(
            world,
            f"attach-{number}",
            {
                "the algorithm": repr(algorithm),
                "the optimizer": type(optimizer).__name__,
                "clip_norm": clip_norm,
                "nonfinite": nonfinite,
                "bucket_bytes": bucket_bytes,
                "parameters": [
                    f"{name} of shape {tuple(parameter.shape)} and {parameter.dtype}"
                    for name, parameter in zip(names, parameters, strict=True)
                ],
            },
        )
        self._replica = Replica(
            world,
            f"attach-{number}",
            optimizer,
            names,
            parameters,
            bucket_bytes,
            clip_norm,
            scheduled=schedule.alike,
        )
        self._followers = Followers(model, self._replica)
        self._apply = Applier(
            self._replica, optimizer, algorithm, schedule, self._followers, nonfinite, self._tell
        )
        self._stats = self._apply.stats
        self._replica.overlap.reduces_next = self._reduces_next
        self._channel = self._replica.models
        broadcast(self._channel, [*model.parameters(), *parameters, *model.buffers()])
        algorithm.start(self._replica)
        self._replica.engine.fold = self._apply.fold
        self._replica.engine.may_fold = self._apply.may_fold
        self._replica.engine.begin()

        if (old := _attached(optimizer)) is not None:
            old.detach()
        _attachments[optimizer] = ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._porting = Porting(optimizer, self._replica, schedule.given)
        world.open.append(self)
        self._began_s = world.now()
        self._replica.stepped()

    # --- the verbs -------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds that this worker has completed."""
        self._porting.counts_together()
        return self._replica.round

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._world.size

    @property
    def seconds(self) -> float:
        """Seconds since the run began; virtual ones in virtual time."""
        return self._world.now()

    @property
    def ticks(self) -> int:
        """Rounds that synchronous SGD would have made of all that was applied so far.

        Set learning rates by this, not by a count of this worker's own steps.
        """
        self._porting.counts_together()
        return self._apply.schedule.ticks

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
        return steps(Goal(samples, rounds, seconds), self._replica, self._apply)

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
        background, while your program waits in a collective of its own.
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
        """Only add up `.grad` in this block: gradient accumulation, one micro-batch a block."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False
        began = self._compute()
        self._tell("compute", from_s=began, to_s=self.seconds, samples=0.0, arrival="on time")

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Evaluate or save in this block: the model is as of the newest round, and stays so.

        It has all rounds that were made so far, and none of this worker's own steps since. The
        others go on meanwhile: this worker is away.
        """
        self._check_between("agreed")
        self._catch_up()
        with self._away("agreed"), self._replica.agreed():
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
    def _away(self, verb: str, *, elsewhere: bool = False) -> Iterator[None]:
        if self._closed or self._in_step or (self._away_by and not elsewhere):
            yield
            return
        before, self._away_by = self._away_by, self._away_by or verb
        try:
            with self._replica.engine.away(elsewhere=elsewhere):
                yield
        finally:
            self._away_by = before

    def stats(self) -> Stats:
        """Return what this worker has computed, waited for and applied, as of now."""
        share = self._replica.memory.get("dropped_share", 0.0)
        return self._stats.copy(self._replica.dropped_samples, share)

    def replicas_identical(self) -> bool:
        """Say whether all workers hold the same bits; every worker must call this."""
        with self._world.elsewhere("dp.replicas_identical()"):
            return alike(self._channel, self._model)

    def state_dict(self) -> dict[str, Any]:
        """Return what, with the model's and the optimizer's own, resumes this worker bit by bit.

        Each worker saves its own, at the same place in the loop, between a step and the next
        backward: all first come to the same round, and what they missed while they were away is
        applied. So call it before the model's and the optimizer's `state_dict`.
        """
        if self._replica.overlap.launched:
            raise RuntimeError(
                "state_dict() between backward and step, while gradients are being reduced: "
                "call it after optimizer.step()"
            )
        if self._away_by:
            raise RuntimeError(
                f"state_dict() inside dp.{self._away_by}(): move it out, all workers wait in it"
            )
        with self._others_away():
            return checkpoint.saved(self.algorithm, self._replica, self._apply)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()` of the worker with this rank; before the first step."""
        checkpoint.load(state, self.algorithm, self._replica, self._apply)

    def close(self) -> None:
        """Serve the others until all have left: the join. Then every replica is the same."""
        if self._closed:
            return
        try:
            with self._others_away():
                self._serve_others()
                average_buffers(self._channel, self._model)
                self._stats.replicas_identical = alike(self._channel, self._model)
        except BaseException as error:
            self.abandon(error)
            raise
        self._end()
        leave_world(self._world)
        if not self._stats.replicas_identical:
            differ = (
                "replicas differ at the end of the block, though they have applied the same "
                "rounds: something other than optimizer.step() has changed parameters somewhere"
            )
            if self.algorithm.identical:
                raise ReplicasDifferError(differ)
            warnings.warn(differ, stacklevel=2)

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on, and leave without them."""
        if self._closed:
            return
        self._end()
        if getattr(error, "everywhere", False):
            self._replica.engine.stop()
        leave_world(self._world, error)

    def detach(self) -> None:
        """Make a closed attachment's optimizer an ordinary one again."""
        if not self._closed:
            raise DetachedError("detach() inside the block: close() first")
        for hook in self._hooks:
            hook.remove()
        _attachments.pop(self._optimizer, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        leaves = isinstance(error, WorkerLeft)
        if error is None or leaves or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abandon(error)
        return leaves

    # --- one step --------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._apply.stepping:
            return None
        if self._closed:
            raise DetachedError(
                "optimizer.step() after the attached block has ended: move it into the block, "
                "attach again, or call dp.detach() to go on without the other workers"
            )
        if verb := "no_sync" if self._in_no_sync else self._away_by:
            raise RuntimeError(f"optimizer.step() inside dp.{verb}(): move it out of that block")
        self._porting.before_step()
        closed = self._run_closure(args, kwargs)
        self._check_parameters()
        replica, stats = self._replica, self._stats
        began, ended = self._compute(), replica.compute_began
        samples = replica.samples
        stats.steps += 1
        stats.computed_samples += samples
        applies = False
        if self._unscaled():
            self._in_step = True
            try:
                with self._others_away():
                    applies = self._apply.begin(self.algorithm.step(replica))
            finally:
                self._in_step = False
        else:
            replica.drop()
        self._tell("compute", from_s=began, to_s=ended, samples=samples, arrival=replica.arrival)
        if not applies:
            replica.gradients.clear()
        return closed

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._apply.stepping:
            return
        self._in_step = True
        try:
            with self._others_away():
                self._apply.step_made()
            self._apply.schedule.own_step()
        finally:
            self._in_step = False
        self._replica.stepped()
        self._porting.after_step()

    def _run_closure(self, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:
        """Compute loss and gradients now; the optimizer gets a closure that has them already."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        if len(args) > 1:
            return (args[0], lambda: loss, *args[2:]), kwargs
        return args, {**kwargs, "closure": lambda: loss}

    def _others_away(self) -> AbstractContextManager[object]:
        """While this attachment may wait, this worker is away from all others."""
        if self._world.open == [self]:
            return _NOBODY
        with ExitStack() as stack:
            for thing in self._world.open:
                if thing is not self and hasattr(thing, "away"):
                    stack.enter_context(thing.away("a step of another attachment"))
            return stack.pop_all()

    def _compute(self) -> float:
        """Charge the micro-batch that was just computed; return when it began."""
        began = self._replica.compute_began
        self._stats.compute_s += self._replica.computed()
        return began

    def _unscaled(self) -> bool:
        """Undo a GradScaler's scale where it left that to a fused optimizer; False on overflow.

        Scales differ between workers, so contributions must not carry them.
        """
        found_inf = getattr(self._optimizer, "found_inf", None)
        if found_inf is None:
            return True
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for parameter in self._replica.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._optimizer.found_inf = torch.zeros_like(found_inf)  # type: ignore[attr-defined]
        return not found_inf.item()

    # --- the rest --------------------------------------------------------------------------

    def _check_between(self, verb: str) -> None:
        if self._in_step or torch._C._current_graph_task_id() != -1:
            inside = "optimizer.step()" if self._in_step else "backward()"
            raise RuntimeError(f"dp.{verb}() inside {inside}: move it out, between two steps")

    def _catch_up(self) -> None:
        """Apply the rounds that were made while this worker computed, or was away."""
        if self._closed:
            return
        parameters = self._replica.parameters
        gradients = [parameter.grad for parameter in parameters]
        self._in_step = True
        try:
            for parameter in parameters:  # a backward's that no step has taken, or the user's
                parameter.grad = None
            self._apply.apply(self.algorithm.rounds(self._replica, self._replica.newest()))
        finally:
            self._in_step = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _serve_others(self) -> None:
        """Apply rounds until all have left, and note what that has cost."""
        stats, schedule = self._stats, self._apply.schedule
        waited_s, made = stats.wait_s, schedule.made
        self._apply.apply(self.algorithm.leave(self._replica))
        self._replica.gradients.clear()
        stats.join_wait_s = stats.wait_s - waited_s
        took_s, served = self.seconds - self._began_s, schedule.made - made
        note_join(self._world, self._channel, stats, took_s, served)

    def _reduces_next(self) -> bool:
        return not self._in_no_sync and self.algorithm.reduces_next(self._replica)

    def _check_parameters(self) -> None:
        now = 0
        for group in self._optimizer.param_groups:
            now += len(group["params"])
        if now != len(self._replica.parameters):
            raise DetachedError(
                f"the optimizer has {now} parameters, but had {len(self._replica.parameters)} when "
                "it was attached: add param groups before attach()"
            )

    def _tell(self, kind: str, **facts: Any) -> None:
        """Hand a line to whoever records this run; see records.py."""
        if self._world.records is not None:
            self._world.records({"kind": kind, "rank": self._world.rank, **facts})

    def _end(self) -> None:
        stats = self.stats()
        self._tell(
            "end",
            at_s=self.seconds,
            steps=stats.steps,
            compute_s=stats.compute_s,
            wait_s=stats.wait_s,
            samples=stats.computed_samples,
            dropped_samples=stats.dropped_samples,
        )
        self._closed = True
        self._replica.overlap.remove()
        self._porting.close()
        self._world.open.remove(self)


def _attached(optimizer: Optimizer) -> Attachment | None:
    found = _attachments.get(optimizer)
    return None if found is None else found()
