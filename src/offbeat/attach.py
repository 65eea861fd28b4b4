"""attach(): a user's model and optimizer over an algorithm, by hooks.

Nothing is wrapped. A pre-hook of the optimizer turns `optimizer.step()` into "one micro-batch is
done": it asks the algorithm, which may answer with a round to apply. The first such round is put
into `.grad` and applied by the very step that is under way; further ones (a late worker catches
up) by steps of our own in the post-hook; and if there is none, `.grad` is None everywhere and the
step has nothing to do.

Between backward and step, `.grad` is this worker's own gradient; after a step that applied a round
it is that round's mean.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import c_ubyte
from hashlib import blake2b
from typing import Any, Literal, Self, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD
from offbeat.clusters import Cluster
from offbeat.errors import DetachedError, NonFiniteGradientError, WorkerLeft
from offbeat.replica import Replica, broadcast
from offbeat.rounds import Round, agree
from offbeat.rounds.layout import BUCKET_BYTES
from offbeat.stats import Stats
from offbeat.worlds import World, enter_world, leave_world

# By reference: what is attached keeps its optimizer, which would else keep itself for ever.
_attachments: WeakKeyDictionary[Optimizer, ref[Attachment]] = WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    algorithm: Algorithm | None = None,
    *,
    scheduler: LRScheduler | None = None,
    clip_norm: float | None = None,
    nonfinite: Literal["raise", "skip"] = "raise",
    bucket_bytes: int = BUCKET_BYTES,
    pace: Cluster | str | None = None,
    seed: int | None = None,
) -> Attachment:
    """Train `model` with the other workers from here to the end of the block, or to `close()`.

    Args:
        algorithm: `SyncSGD()` if None.
        scheduler: stepped by offbeat, once per applied round; do not step it yourself.
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
    _check_arguments(model, optimizer, algorithm, scheduler, clip_norm, nonfinite, bucket_bytes)
    world = enter_world(pace, seed)
    try:
        algorithm.check(world.size)
        return Attachment(
            world, model, optimizer, algorithm, scheduler, clip_norm, nonfinite, bucket_bytes
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
        scheduler: LRScheduler | None,
        clip_norm: float | None,
        nonfinite: Literal["raise", "skip"],
        bucket_bytes: int,
    ) -> None:
        self.algorithm = algorithm
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._clip_norm = clip_norm
        self._nonfinite = nonfinite
        self._closed = False
        self._in_no_sync = False
        self._rounds: Iterator[Round] = iter(())
        self._record: Round | None = None
        self._rates: list[Any] = []  # as they were before a round that scales them
        self._own_step = False
        self._stats = Stats(world.rank)

        names, parameters = _named_parameters(model, optimizer)
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
            world, f"attach-{number}", optimizer, names, parameters, bucket_bytes
        )
        self._replica.overlap.reduces_next = self._reduces_next
        self._channel = self._replica.models
        broadcast(self._channel, [*model.parameters(), *parameters, *model.buffers()])
        algorithm.start(self._replica)

        if (old := _attached(optimizer)) is not None:
            old.detach()
        _attachments[optimizer] = ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        world.open.append(self)
        self._replica.stepped()

    # --- the verbs -------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds that this worker has completed."""
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

    def agreed(self) -> AbstractContextManager[None]:
        """Have in the model what all workers agree on, without this worker's own steps since.

        For evaluating and saving between rounds, where an algorithm has steps of one's own.
        """
        return self._replica.agreed()

    def stats(self) -> Stats:
        """Return what this worker has computed, waited for and applied, as of now."""
        return self._stats.copy(dropped_samples=self._replica.dropped_samples)

    def replicas_identical(self) -> bool:
        """Say whether all workers hold the same bits; every worker must call this."""
        mark = _fingerprint(self._model)
        marks = [torch.tensor([mark]), torch.tensor([mark])]
        for tensor, op in zip(marks, ("min", "max"), strict=True):
            self._channel.all_reduce(tensor, op=cast(Literal["min", "max"], op)).wait()
        return bool(marks[0] == marks[1])

    def state_dict(self) -> dict[str, Any]:
        """Return what, with the model's and the optimizer's own, resumes this worker bit by bit.

        Each worker saves its own. Call it between a step and the next backward; with rounds that
        start by a quorum, on all workers: they first come to the same round.
        """
        if self._replica.overlap.launched:
            raise RuntimeError(
                "state_dict() between backward and step, while gradients are being reduced: "
                "call it after optimizer.step()"
            )
        self._rounds = self.algorithm.rounds(self._replica, self._replica.settle())
        self._apply_rounds()
        cuda = torch.cuda.is_available()
        state = {
            "algorithm": repr(self.algorithm),
            "world_size": self._world.size,
            "rank": self._world.rank,
            "replica": self._replica.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "generators": {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if cuda else [],
                "python": random.getstate(),
            },
        }
        self._replica.resume()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()` of the worker with this rank; before the first step."""
        for what, mine in (
            ("algorithm", repr(self.algorithm)),
            ("world_size", self._world.size),
            ("rank", self._world.rank),
        ):
            if state[what] != mine:
                raise ValueError(
                    f"this state was saved with {what} {state[what]}, but here it is {mine}: "
                    "resume with the same set-up, each worker from its own state"
                )
        self._replica.load_state_dict(state["replica"])
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["generators"]["torch"])
        if state["generators"]["cuda"]:
            torch.cuda.set_rng_state_all(state["generators"]["cuda"])
        random.setstate(state["generators"]["python"])

    def close(self) -> None:
        """Serve the others until all have left: the join. Then every replica is the same."""
        if self._closed:
            return
        try:
            self._rounds = self.algorithm.leave(self._replica)
            self._apply_rounds()
            self._replica.clear_gradients()
            self._average_buffers()
            self._stats.replicas_identical = self.replicas_identical()
        except BaseException as error:
            self.abandon(error)
            raise
        self._end()
        leave_world(self._world)

    def abandon(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on, and leave without them."""
        if self._closed:
            return
        self._end()
        if getattr(error, "everywhere", False):
            self._replica.stop()
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

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._own_step:
            return
        if self._closed:
            raise DetachedError(
                "optimizer.step() after the attached block has ended: move it into the block, "
                "attach again, or call dp.detach() to go on without the other workers"
            )
        if self._in_no_sync:
            raise RuntimeError("optimizer.step() inside dp.no_sync(): move it out of that block")
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise TypeError("optimizer.step(closure) is not supported: run backward before step()")
        self._check_parameters()
        replica, stats = self._replica, self._stats
        began, ended = self._compute(), self.seconds
        stats.steps += 1
        stats.computed_samples += replica.samples
        if self._unscaled():
            self._rounds = self.algorithm.step(replica)
            applies = self._next_round()
        else:
            replica.drop()
            applies = False
        self._tell(
            "compute", from_s=began, to_s=ended, samples=replica.samples, arrival=replica.arrival
        )
        if not applies:
            replica.clear_gradients()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._own_step:
            return
        if self._record is not None:
            self._applied()
            self._apply_rounds()
        self._replica.stepped()

    def _compute(self) -> float:
        """Charge the micro-batch that was just computed; return when it began."""
        began = self._replica.compute_began
        self._stats.compute_s += self._replica.computed()
        return began

    def _next_round(self) -> bool:
        """Let the algorithm run to its next round, and put that into `.grad`; False at the end."""
        while True:
            began = self._world.now()
            record = next(self._rounds, None)
            ended = self._world.now()
            self._stats.wait_s += ended - began
            if ended > began:
                number = None if record is None else record.round
                self._tell("wait", from_s=began, to_s=ended, round=number)
            if record is None:
                return False
            if record.bad is not None:
                self._not_finite(record, *record.bad)
            elif not record.samples:  # nobody had data: nothing to apply
                self._passed_by(record)
            elif record.moved:
                self._record = record
                self._applied()
            else:
                self._replica.install(record)
                if self._clip_norm is not None:
                    nn.utils.clip_grad_norm_(self._replica.parameters, self._clip_norm)
                self._record = record
                self._scale_rates(record.rate)
                return True

    def _apply_rounds(self) -> None:
        """Apply what rounds are left, by steps of our own."""
        while self._next_round():
            self._own_step = True
            try:
                self._optimizer.step()
            finally:
                self._own_step = False
            self._applied()

    def _applied(self) -> None:
        record, self._record = self._record, None
        assert record is not None
        self._restore_rates()
        self._stats.note(record, self._world.now())
        if record.ends_round:
            self._tell_round(record)
        self._replica.applied()
        self._step_scheduler(record)

    def _step_scheduler(self, record: Round) -> None:
        if self._scheduler is not None:
            for _ in range(record.schedule_steps):
                self._scheduler.step()

    def _scale_rates(self, factor: float) -> None:
        """Change the learning rates for one update."""
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                self._rates.append(group["lr"])
                group["lr"] = group["lr"] * factor

    def _restore_rates(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates.clear()

    def _tell_round(self, record: Round) -> None:
        self._tell(
            "round",
            round=record.round,
            from_s=record.began_s,
            to_s=record.ended_s,
            at_s=self.seconds,
            samples=record.samples,
            workers=len(record.ranks),
            staleness_rounds=record.staleness_rounds,
            mean_staleness_rounds=record.mean_staleness_rounds,
        )

    def _not_finite(self, record: Round, rank: int, number: int) -> None:
        parameter = self._replica.names[number]
        if self._nonfinite == "raise":
            error = NonFiniteGradientError(
                f"the gradient of {parameter!r} on worker {rank} is NaN or infinite in round "
                f"{record.round}: lower the learning rate, or "
                'attach(..., nonfinite="skip") to leave out such rounds',
                rank=rank,
                round=record.round,
                parameter=parameter,
            )
            error.everywhere = not record.own
            raise error
        self._stats.skipped_rounds += 1
        mine = record.samples_by_rank[self.rank]
        self._replica.dropped_samples += mine
        if record.moved:  # own steps that are taken back
            self._stats.applied_samples -= mine
        self._passed_by(record)

    def _passed_by(self, record: Round) -> None:
        """A round is not applied. One's own step counts as a step: the others have made theirs."""
        self._replica.applied()
        if record.own:
            self._step_scheduler(record)

    def _unscaled(self) -> bool:
        """Undo a GradScaler's scale where it left that to a fused optimizer; False on overflow.

        Scales differ between workers, so contributions must not carry them.
        """
        found_inf = getattr(self._optimizer, "found_inf", None)
        scale = getattr(self._optimizer, "grad_scale", None)
        if found_inf is None:
            return True
        if scale is not None:
            for parameter in self._replica.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        self._optimizer.found_inf = torch.zeros_like(found_inf)  # type: ignore[attr-defined]
        return not found_inf.item()

    # --- the rest --------------------------------------------------------------------------

    def _reduces_next(self) -> bool:
        return not self._in_no_sync and self.algorithm.reduces_next(self._replica)

    def _check_parameters(self) -> None:
        now = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if now != len(self._replica.parameters):
            raise DetachedError(
                f"the optimizer has {now} parameters, but had {len(self._replica.parameters)} when "
                "it was attached: add param groups before attach()"
            )

    def _average_buffers(self) -> None:
        """Running statistics see only their own worker's data: take the mean over workers."""
        for buffer in self._model.buffers():
            if buffer.is_floating_point():
                mean = buffer.detach().contiguous().clone()
                self._channel.all_reduce(mean).wait()
                buffer.copy_(mean.div_(self._world.size))
        counts = [buffer for buffer in self._model.buffers() if not buffer.is_floating_point()]
        broadcast(self._channel, counts)

    def _tell(self, kind: str, **facts: Any) -> None:
        """Hand a line to whoever records this run; see records.py."""
        if self._world.records is not None:
            self._world.records({"kind": kind, "rank": self.rank, **facts})

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
        self._world.open.remove(self)


def _check_arguments(
    model: object,
    optimizer: object,
    algorithm: object,
    scheduler: object,
    clip_norm: float | None,
    nonfinite: str,
    bucket_bytes: int,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError("model is wrapped in DistributedDataParallel: attach model.module instead")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__}.step() needs a closure, which it calls several times: "
            "that cannot be averaged over workers; use a first-order optimizer such as SGD or AdamW"
        )
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be an offbeat algorithm such as offbeat.SyncSGD(), got {algorithm!r}"
        )
    if isinstance(scheduler, ReduceLROnPlateau) or (
        scheduler is not None and not isinstance(scheduler, LRScheduler)
    ):
        raise TypeError(
            f"scheduler must be an LRScheduler whose step() needs no metric, "
            f"got {type(scheduler).__name__}"
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ValueError("scheduler belongs to another optimizer than the one to attach")
    if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm must be a number above 0, got {clip_norm}")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f'nonfinite must be "raise" or "skip", got {nonfinite!r}')
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    if (old := _attached(optimizer)) is not None and not old._closed:
        raise DetachedError("this optimizer is attached already: close() that attachment first")


def _attached(optimizer: Optimizer) -> Attachment | None:
    found = _attachments.get(optimizer)
    return None if found is None else found()


def _named_parameters(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], list[Tensor]]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    names, parameters = [], []
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            names.append(known.get(id(parameter), f"group {i}, parameter {j}"))
            parameters.append(parameter)
    if not parameters:
        raise ValueError("the optimizer has no parameters")
    return names, parameters


def _fingerprint(model: nn.Module) -> int:
    """A number that differs, almost surely, between models that differ in any bit."""
    seen = blake2b(digest_size=7)  # it fits into an int64
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        if values.numel():
            seen.update((c_ubyte * values.nbytes).from_address(values.data_ptr()))
    return int.from_bytes(seen.digest(), "little")
