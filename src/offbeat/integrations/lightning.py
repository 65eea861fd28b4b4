"""OffbeatStrategy: Lightning's Trainer over an algorithm of offbeat, instead of over DDP.

    Trainer(strategy=OffbeatStrategy(offbeat.EagerSGD()), devices=2)
    Trainer(strategy="offbeat", devices=2)      # SyncSGD; "offbeat_eager", "offbeat_waitfree"

It is Lightning's own DDPStrategy without the wrapper: the optimizer is attached instead.

    gradient_clip_val           clips the mean, as with DDP: attach(clip_norm=...)
    accumulate_grad_batches     dp.no_sync()
    a scheduler by step         stepped by offbeat, so that it ends with the same data as with DDP
    validation, a checkpoint    inside dp.agreed()
    a checkpoint                resumes to the bit, where replicas are the same; else from the model
                                that all agree on
    SIGTERM                     dp.stop(), with the rounds, instead of a broadcast for every batch
    log(sync_dist=True)         of a step: this worker's own value, unless all are in lockstep;
                                of an epoch: over all workers, as ever
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch.distributed as dist

try:
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.lightning needs Lightning: pip install 'offbeat[lightning]'"
    ) from error

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden

from offbeat.algorithm import Algorithm
from offbeat.algorithms import EagerSGD, SyncSGD, WaitFreeLocalSGD
from offbeat.attach import Attachment, attach
from offbeat.data import Deal
from offbeat.integrations.common import (
    Dealt,
    check_holds,
    check_plugin,
    check_version,
    chosen,
    copied,
    leave,
)

check_version(
    "lightning",
    [
        (DDPStrategy, "configure_ddp"),
        (DDPStrategy, "block_backward_sync"),
        (DDPStrategy, "process_dataloader"),
        (_TrainingEpochLoop, "_broadcast_sigterm_tensor"),
    ],
)

_ATTACH = tuple(
    name
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("clip_norm", "scheduler")
)
_LIGHTNING = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"),
    *("precision_plugin", "process_group_backend", "timeout", "start_method"),
)
_KEY = "offbeat"
_NO_DDP = "DistributedDataParallel, FSDP and DeepSpeed are not used beneath it; leave that out"
_SAY = {
    "clip_norm": "clip_norm is Lightning's to say: Trainer(gradient_clip_val=...)",
    "scheduler": "scheduler is Lightning's to say: return it from configure_optimizers()",
    "survive": "survive is not for Lightning, which itself needs every worker: leave it out",
}


class OffbeatStrategy(DDPStrategy):
    """A strategy of Lightning that trains by an algorithm of offbeat."""

    def __init__(self, algorithm: Algorithm | None = None, **settings: Any) -> None:
        """`settings` are those of `offbeat.attach`, and Lightning's on processes and devices.

        `algorithm` is `SyncSGD()` if None, as in `offbeat.attach`.
        """
        for name in settings:
            if name in _SAY:
                raise TypeError(_SAY[name])
            if name not in (*_ATTACH, *_LIGHTNING):
                raise TypeError(f"OffbeatStrategy has no {name}: {_NO_DDP}")
        super().__init__(**{name: settings.pop(name) for name in _LIGHTNING if name in settings})
        self.algorithm = chosen(algorithm)
        self.dp: Attachment | None = None
        """What `offbeat.attach` has returned; None outside of `fit`."""
        self._settings = settings
        self._trainer: Any = None
        self._undo = ExitStack()
        self._evaluation = ExitStack()
        self._evaluates = False
        self._in_training_step = False
        self._terminated = False
        self._state: dict[str, Any] | None = None

    # --- beginning and end -----------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does; then, to fit, attach."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._check(trainer)
        super().setup(trainer)
        if fits:
            self._attach(trainer)

    def configure_ddp(self) -> None:
        """Wrap nothing."""

    def _check(self, trainer: Any) -> None:
        check_plugin(self.precision_plugin)
        if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm") != "norm":
            raise ValueError(
                "the mean gradient can be clipped by norm only: leave out "
                "gradient_clip_algorithm='value', or clip in LightningModule."
                "on_before_optimizer_step, each worker its own gradient"
            )
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm has all workers wait for each other in every forward pass: leave "
                "it out; running statistics are averaged at the end, and where models are"
            )

    def _attach(self, trainer: Any) -> None:
        module = self.lightning_module
        if len(self.optimizers) != 1:
            raise ValueError(
                f"OffbeatStrategy attaches one optimizer, and configure_optimizers() has returned "
                f"{len(self.optimizers)}: join them into one with several param groups, or write "
                "the loop yourself with one offbeat.attach() for each (docs/porting.md, a GAN)"
            )
        check_holds(module, self.optimizers[0])
        self._trainer, self._terminated = trainer, False
        clip_norm, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        self._undo.callback(setattr, trainer, "gradient_clip_val", clip_norm)
        self.dp = attach(
            module,
            self.optimizers[0],
            self.algorithm,
            scheduler=self._take_scheduler(),
            clip_norm=clip_norm or None,
            **self._settings,
        )

    def on_train_start(self) -> None:
        """Lightning's own signal handlers are set by now."""
        self._hear_sigterm()

    def _take_scheduler(self) -> Any:
        """The scheduler that goes by steps, which Lightning is to leave alone from now on.

        Where workers make different numbers of steps, it would run ahead on a fast one.
        """
        if is_overridden("lr_scheduler_step", self.lightning_module):
            return None
        for config in self.lr_scheduler_configs:
            if config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau:
                config.interval = "offbeat"  # nobody's name: Lightning saves it, and steps it not
                self._undo.callback(setattr, config, "interval", "step")
                return config.scheduler
        return None

    def on_train_end(self) -> None:
        """Leave the block: every replica is the same from here on."""
        self._leave()

    def on_exception(self, exception: BaseException) -> None:
        """Leave in order where all do; else tell the others that this worker cannot go on."""
        self._leave(None if isinstance(exception, SIGTERMException) else exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave, if nobody has yet."""
        self._leave()
        super().teardown()

    def _leave(self, error: BaseException | None = None) -> None:
        self._evaluation.close()
        self._evaluates = False
        dp, self.dp = self.dp, None
        self._undo.close()
        leave(dp, error)

    # --- one step --------------------------------------------------------------------------

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Only add up gradients: `accumulate_grad_batches`."""
        return nullcontext() if self.dp is None else self.dp.no_sync()

    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        """Make a step, in which values that are logged are not reduced one by one."""
        self._in_training_step = True
        try:
            return super().training_step(*arguments, **settings)
        finally:
            self._in_training_step = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all workers; of a step's value, only where these are in lockstep."""
        if self._in_training_step and self.dp is not None and not self.dp.lockstep:
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Hide the length of dealt data: it is a mean, and a fast worker is to take more."""
        deal = getattr(dataloader, "batch_sampler", None)
        if not isinstance(deal, Deal) or self.dp is None:
            return dataloader
        self._check_even()
        deal.set_epoch(self._trainer.current_epoch)
        return Dealt(dataloader, deal)

    def _check_even(self) -> None:
        """Raise if something must happen at a step that not all workers reach."""
        assert self.dp is not None
        saves = [
            each
            for each in self._trainer.callbacks
            if isinstance(each, ModelCheckpoint) and each._every_n_train_steps > 0
        ]
        validates = self._trainer.val_check_interval not in (None, 1.0)
        if not self.dp.lockstep and (saves or validates):
            what = "ModelCheckpoint(every_n_train_steps=...)" if saves else "val_check_interval"
            raise ValueError(
                f"with dealt data and {self.algorithm!r} workers make different numbers of steps, "
                f"and {what} has all of them meet at one: save and validate by epochs, which end "
                "for all together"
            )

    # --- evaluation and checkpoints --------------------------------------------------------

    def on_validation_start(self) -> None:
        """Evaluate what all agree on, and hold up nobody."""
        super().on_validation_start()
        if self.dp is not None:
            self._evaluates = True
            self._evaluation.enter_context(self.dp.agreed())

    def on_validation_end(self) -> None:
        """Go back to this worker's own model."""
        self._evaluation.close()
        self._evaluates = False
        super().on_validation_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model that all agree on."""
        if self.dp is None:
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        self._state = self._own_state(self.dp)
        with nullcontext() if self._evaluates else self.dp.agreed():
            state = super().lightning_module_state_dict()
            if self.dp.drifts:  # what was lent for the block is gone after it
                state = {name: copied(value) for name, value in state.items()}
            return state  # type: ignore[no-any-return]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **options: Any) -> None:
        """Save it from worker 0, with the states of all workers."""
        state, self._state = self._state, None
        if state is not None and "optimizer_states" in checkpoint:
            states: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            if dist.is_initialized():
                dist.gather_object(state, states)
            else:
                states = [state]
            if states is not None:
                checkpoint[_KEY] = states
        super().save_checkpoint(checkpoint, filepath, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, then this worker's own."""
        super().load_optimizer_state_dict(checkpoint)
        if self.dp is not None and _KEY in checkpoint:
            states = checkpoint[_KEY]
            if len(states) != self.world_size:
                raise ValueError(
                    f"this checkpoint holds the states of {len(states)} workers, and here are "
                    f"{self.world_size}: resume with as many, or load the model alone "
                    "(LightningModule.load_from_checkpoint)"
                )
            self.dp.load_state_dict(states[self.global_rank])

    def _own_state(self, dp: Attachment) -> dict[str, Any] | None:
        """This worker's state, for which all come to the same round."""
        if dp.drifts:
            return None
        evaluates = self._evaluates
        self._evaluation.close()
        try:
            return dp.state_dict()
        finally:
            if evaluates:
                self._evaluation.enter_context(dp.agreed())

    # --- SIGTERM ---------------------------------------------------------------------------

    def _hear_sigterm(self) -> None:
        """Ask all to end by what travels anyway, instead of a broadcast for every batch.

        Lightning has no setting for that: its epoch loop and its signal handler broadcast. Both
        are replaced for the length of the block, on these objects alone.
        """
        loop = self._trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self._look_for_end
        self._undo.callback(vars(loop).pop, "_broadcast_sigterm_tensor", None)
        try:
            before = signal.signal(signal.SIGTERM, self._note_sigterm)
        except ValueError:  # not in the main thread: Lightning hears no signals either
            return
        self._undo.callback(signal.signal, signal.SIGTERM, before)

    def _note_sigterm(self, number: int, frame: Any) -> None:
        """In the handler of a signal nothing may wait, or take a lock."""
        self._terminated = True
        if self.launcher is not None:
            self.launcher.kill(number)

    def _look_for_end(self) -> None:
        """Before every batch: all raise with the same round, once one of them was told to end."""
        assert self.dp is not None
        if self._terminated:
            self.dp.stop()
        if self.dp.ending or (self._terminated and self.world_size == 1):
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException


for _name, _algorithm in (
    ("offbeat", SyncSGD()),
    ("offbeat_eager", EagerSGD()),
    ("offbeat_waitfree", WaitFreeLocalSGD()),
):
    StrategyRegistry.register(
        _name, OffbeatStrategy, f"offbeat.{_algorithm!r}", override=True, algorithm=_algorithm
    )
