"""What an attachment does by itself: setting up, and every step of the optimizer.

A pre-hook of the optimizer turns `optimizer.step()` into "one micro-batch is done": it asks the
algorithm, which may answer with a round to apply. The first such round is put into `.grad` and
applied by the very step that is under way; further ones (a late worker catches up) by steps of our
own in the post-hook; and if there is none, `.grad` is None everywhere and the step has nothing to
do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.alike import FirstModel, averaged_buffers, named_parameters
from offbeat.apply import Applier
from offbeat.codecs import Codec
from offbeat.data.again import deal_again
from offbeat.donation import SoFar
from offbeat.errors import DetachedError, ExpelledError
from offbeat.followers import Followers
from offbeat.joinable import Joinable
from offbeat.porting import Porting
from offbeat.replica import Replica, Stats, Stoppable
from offbeat.rounds import agree
from offbeat.schedule import Schedule
from offbeat.worlds import Channel, World

T = TypeVar("T")
# By reference: what is attached keeps its optimizer, which would else keep itself for ever.
_attachments: WeakKeyDictionary[Optimizer, ref[Attached]] = WeakKeyDictionary()


def attached_to(optimizer: Optimizer) -> Attached | None:
    """Return what an optimizer is attached to, or was."""
    found = _attachments.get(optimizer)
    return None if found is None else found()


class Attached(Joinable):
    """A model and an optimizer over an algorithm, by hooks."""

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
        codec: Codec | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.codec = codec
        self._model = model
        self._optimizer = optimizer
        self._settings = schedule, clip_norm, nonfinite, bucket_bytes
        self._followers = Followers(model)
        self._stats = Stats(world.rank)
        self._closed = self._in_no_sync = self._in_step = False
        self._away_by = ""  # the verb that this worker is away by
        self._undo = ExitStack()
        self._begin_or_join(world)
        self._began_s = self._world.now()

    def _begin(self, world: World, before: Replica | None) -> None:
        model, optimizer, algorithm = self._model, self._optimizer, self.algorithm
        schedule, clip_norm, nonfinite, bucket_bytes = self._settings
        self._world = world
        deal_again(world, None if before is None else before.world)
        names, parameters = named_parameters(model, optimizer)
        number = next(world.numbers)
        told = {
            "the algorithm": repr(algorithm),
            "the optimizer": type(optimizer).__name__,
            "clip_norm": clip_norm,
            "nonfinite": nonfinite,
            "bucket_bytes": bucket_bytes,
            "the codec": repr(self.codec),
            "survive": world.survives,
            "min_workers": world.min_workers,
            "freeze_s": world.freeze,
            "parameters": [
                f"{name} of shape {tuple(parameter.shape)} and {parameter.dtype}"
                for name, parameter in zip(names, parameters, strict=True)
            ],
        }
        first = agree(world, f"attach-{number}", told)
        self._replica = Replica(
            world,
            f"attach-{number}",
            optimizer,
            names,
            parameters,
            bucket_bytes,
            clip_norm,
            scheduled=schedule.alike,
            buffers=averaged_buffers(model),
            codec=self.codec,
        )
        self._undo.callback(self._replica.overlap.remove)
        self._stoppable = Stoppable(model, self._replica)
        self._undo.callback(self._stoppable.remove)
        self._apply = Applier(
            *(self._replica, optimizer, algorithm, schedule),
            *(self._followers, nonfinite, self._tell, self._stats),
        )
        self._replica.overlap.reduces_next = self._reduces_next
        self._so_far = SoFar()
        begun = FirstModel(first, world, [*model.parameters(), *parameters, *model.buffers()])
        self._together("begun", begun.hand_round)
        algorithm.start(self._replica)
        self._followers.follow(self._replica)
        if before is not None:
            self._replica.go_on_after(before)
        self._replica.engine.fold = self._apply.fold
        self._replica.engine.may_fold = self._apply.may_fold
        self._replica.begin()

        if (old := attached_to(optimizer)) is not self:
            if old is not None:
                old.detach()
            _attachments[optimizer] = ref(self)
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        self._porting = Porting(optimizer, self._replica, schedule.given)
        self._undo.callback(self._porting.close)
        if world.survives or world.joins:
            self._let_others_join(told)
        world.open.append(self)
        self._replica.stepped()

    # --- what steps need, and users too -----------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._world.rank

    @property
    def seconds(self) -> float:
        """Seconds since the run began; virtual ones in virtual time."""
        return self._world.now()

    def stats(self) -> Stats:
        """Return what this worker has computed, waited for and applied, as of now."""
        share = self._replica.memory.get("dropped_share", 0.0)
        replica = self._replica
        return self._stats.copy(replica.dropped_samples, share, replica.engine.lost_samples)

    def detach(self) -> None:
        """Make a closed attachment's optimizer an ordinary one again."""
        if not self._closed:
            raise DetachedError("detach() inside the block: close() first")
        for hook in self._hooks:
            hook.remove()
        _attachments.pop(self._optimizer, None)

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
        self._check_joined()
        self._porting.before_step()
        closed = self._run_closure(args, kwargs)
        self._check_parameters()
        world = self._world
        if not self._or_rejoin(self._comes_to_round, False):
            self._replica.gradients.clear()
        if self._world is not world and (dealing := self._world.dealing) is not None:
            dealing.takes_stale()  # if it is: it has been thrown away
        return closed

    def _count_step(self) -> float:
        """A micro-batch was computed: of so many samples."""
        self._stats.steps += 1
        self._stats.computed_samples += self._replica.samples
        return self._replica.samples

    def _comes_to_round(self) -> bool:
        """A micro-batch is done: ask the algorithm; say whether the step has a round to apply."""
        replica, stats = self._replica, self._stats
        try:
            began, ended = self._compute(), replica.compute_began
        except ExpelledError:  # of parameters from before that: it is no use to anybody
            self._count_step()
            replica.drop()
            raise
        samples = self._count_step()
        applies = False
        dealing = self._world.dealing
        if dealing is not None and dealing.takes_stale():
            replica.drop()
        elif self._unscaled():
            self._in_step = True
            try:
                rounds = self.algorithm.step(replica)
                applies = self._with_others_away(lambda: self._apply.begin(rounds))
            finally:
                self._in_step = False
        else:
            replica.drop()
        if replica.arrival == "abandoned":
            stats.abandoned_samples += samples
            stats.abandoned_s += ended - began
        if self._world.records is not None:
            arrival = replica.arrival
            self._tell("compute", from_s=began, to_s=ended, samples=samples, arrival=arrival)
        return applies

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._apply.stepping:
            return
        self._in_step = True
        try:
            self._or_rejoin(lambda: self._with_others_away(self._apply.step_made), None)
        finally:
            self._in_step = False
        self._say_attached()
        if self._replica.engine.is_asked_for_state:
            self._or_rejoin(self._give_state, None)
        self._replica.stepped()
        self._porting.after_step()
        if self._world.too_few is not None:  # nothing is half done here: one may save
            raise self._world.too_few

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

    def _with_others_away(self, act: Callable[[], T]) -> T:
        """Do something that may wait."""
        if len(self._world.open) == 1:  # this one
            return act()
        with self._others_away():
            return act()

    def _others_away(self) -> AbstractContextManager[object]:
        """While this attachment may wait, this worker is away from all others."""
        with ExitStack() as stack:
            for thing in self._world.open:
                if isinstance(thing, Joinable):
                    if thing is not self:
                        stack.enter_context(thing._away("away", elsewhere=True, returns=False))
                elif hasattr(thing, "away"):
                    stack.enter_context(thing.away("a step of an attachment"))
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

    def _together(self, name: str, act: Callable[[Channel], T], lets_in: bool = False) -> T:
        """Have all workers do something between rounds; again, if one is lost meanwhile."""
        replica = self._replica

        def do(epoch: int) -> T:
            if lets_in:
                self._world.let_in_others(epoch)
            return act(replica.models_in(epoch))

        return self._world.together(f"{replica.name}/{name}", do)

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
        self._undo.close()
        self._world.open.remove(self)
