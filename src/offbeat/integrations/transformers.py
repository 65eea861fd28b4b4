"""OffbeatTrainer: the Trainer of transformers over an algorithm of offbeat, instead of over DDP.

trainer = OffbeatTrainer(model, args, train_dataset=data, algorithm=offbeat.EagerSGD())
class MyTrainer(Offbeat, TheirTrainer): ...         # or mixed into a Trainer of your own

max_grad_norm                   clips the mean, as with DDP: attach(clip_norm=...)
gradient_accumulation_steps     dp.no_sync()
average_tokens_across_devices   dp.samples(tokens): exact, and nobody waits for a gather
the scheduler                   stepped by offbeat, so that it ends with the same data
logging_steps                   the loss of this worker, unless all are in lockstep: then the
                                mean over them, as with DDP, which is a collective
evaluation, save_steps          inside dp.agreed()
a checkpoint                    holds every worker's state, in a file of its own, and resumes to
                                the bit, where replicas are the same
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "offbeat.integrations.transformers needs transformers and Accelerate: "
        "pip install 'offbeat[transformers]'"
    ) from error

from offbeat.algorithm import Algorithm
from offbeat.attach import Attachment, attach
from offbeat.integrations.accelerate import accumulate_by, check, without_ddp
from offbeat.integrations.common import check_holds, check_version, chosen, leave, plain

_OVERRIDDEN = (
    "_prepare_for_training",
    "_finalize_training",
    "_inner_training_loop",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_evaluate",
    "training_step",
)
check_version("transformers", [(Trainer, name) for name in _OVERRIDDEN])


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class Offbeat(_Base):
    """A mixin before a Trainer: `class MyTrainer(Offbeat, Trainer)`."""

    model: Any
    lr_scheduler: Any
    _globalstep_last_logged: int
    dp: Attachment | None = None
    """What `offbeat.attach` has returned; None outside of `train()`."""

    def __init__(
        self,
        *arguments: Any,
        algorithm: Algorithm | None = None,
        offbeat: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`algorithm` is `SyncSGD()` if None; `offbeat` holds more settings of `offbeat.attach`."""
        self.algorithm = chosen(algorithm)
        for name in ("clip_norm", "scheduler"):
            if name in (offbeat or {}):
                raise TypeError(
                    f"{name} is the Trainer's to say: TrainingArguments(max_grad_norm=...), or "
                    "Trainer(optimizers=(optimizer, scheduler))"
                )
        super().__init__(*arguments, **settings)
        self._offbeat = offbeat or {}
        self._tokens = 0.0
        self._by_tokens = False
        self._check(self.args)

    def _check(self, args: Any) -> None:
        check(self.accelerator)
        if args.ddp_find_unused_parameters is not None or args.ddp_bucket_cap_mb is not None:
            raise ValueError(
                "ddp_find_unused_parameters and ddp_bucket_cap_mb are of DistributedDataParallel, "
                "which is not used beneath offbeat: leave them out of TrainingArguments"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"this process has {args.n_gpu} GPUs, for torch.nn.DataParallel: start one process "
                "for each, by torchrun or accelerate launch"
            )

    # --- beginning and end -----------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume: Any) -> Any:
        self.model = without_ddp(self.accelerator, self.model)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume)
        self._attach(prepared[0])
        if resume is not None and self.dp is not None:
            self._load_own(self.dp, Path(resume))
        return prepared

    def _attach(self, model: nn.Module) -> None:
        args, inner = self.args, plain(self.optimizer)
        check_holds(model, inner)
        scheduler = self.lr_scheduler
        steps = isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) and not isinstance(
            scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
        )
        self.dp = attach(
            model,
            inner,
            self.algorithm,
            scheduler=scheduler if steps else None,
            clip_norm=args.max_grad_norm or None,
            **self._offbeat,
        )
        if steps:
            self.lr_scheduler = _Stepped(scheduler)
            self.callback_handler.lr_scheduler = self.lr_scheduler
        accumulate_by(model, self.dp)
        self._by_tokens = args.average_tokens_across_devices
        args.average_tokens_across_devices = False  # dp.samples() does that

    def _inner_training_loop(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super()._inner_training_loop(*arguments, **settings)
        except BaseException as error:
            self._leave(error)
            raise

    def _finalize_training(self, *arguments: Any, **settings: Any) -> Any:
        self._leave()  # from here on, every replica is the same
        return super()._finalize_training(*arguments, **settings)

    def _leave(self, error: BaseException | None = None) -> None:
        dp, self.dp = self.dp, None
        if dp is None:
            return
        self.args.average_tokens_across_devices = self._by_tokens
        if isinstance(self.lr_scheduler, _Stepped):
            self.lr_scheduler = self.lr_scheduler.scheduler
        self.model_wrapped.__dict__.pop("no_sync", None)
        leave(dp, error)

    # --- one step --------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """This worker's own tokens: its gradient is a mean over them, and weighs as many."""
        items = super()._get_num_items_in_batch(batch_samples, device)
        self._tokens = 0.0
        if self.dp is not None and self._by_tokens and items is not None:
            self._tokens = float(items)
        return items

    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        """Make a pass; the first of a step says how many tokens all of them have."""
        if self.dp is not None and self._tokens > 0:
            self.dp.samples(self._tokens)
            self._tokens = 0.0
        return super().training_step(*arguments, **settings)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip nothing: the mean is clipped, when there is one."""
        return self._own_norm(model) if self.dp else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.dp is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return self._own_norm(model) if grad_norm is None else grad_norm

    def _own_norm(self, model: nn.Module) -> Any:
        """The norm of this worker's own gradient, to be logged."""
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    # --- logs, evaluation, checkpoints -----------------------------------------------------

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *rest: Any, **settings: Any
    ) -> Any:
        """Log this worker's own loss where a gather would have the fast one wait."""
        control, state = self.control, self.state
        waits = self.dp is None or self.dp.lockstep
        if control.should_log and not waits and state.global_step > self._globalstep_last_logged:
            control.should_log = False
            self._log_own(tr_loss, grad_norm, settings.get("learning_rate"), rest[-1])
        return super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **settings)

    def _log_own(self, tr_loss: Any, grad_norm: Any, rate: float | None, began: float) -> None:
        steps = self.state.global_step - self._globalstep_last_logged
        loss = tr_loss.item()
        tr_loss -= tr_loss
        logs = {"loss": loss / steps}
        if grad_norm is not None:
            logs["grad_norm"] = float(grad_norm)
        logs["learning_rate"] = self._get_learning_rate() if rate is None else rate
        self._total_loss_scalar += loss
        self._globalstep_last_logged = self.state.global_step
        self.log(logs, began)

    def _evaluate(self, *arguments: Any, **settings: Any) -> Any:
        with self._agreed():
            return super()._evaluate(*arguments, **settings)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        state = None if self.dp is None or self.dp.drifts else self.dp.state_dict()
        with self._agreed():
            super()._save_checkpoint(model, trial)
        if state is not None and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial))
            step = self.state.global_step
            path = folder / f"checkpoint-{step}" / _own_file(self.dp)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)

    def _load_own(self, dp: Attachment, folder: Path) -> None:
        """Go on from this worker's own state, if the checkpoint has one."""
        path = folder / _own_file(dp)
        if path.exists():
            dp.load_state_dict(torch.load(path, weights_only=True))

    def _agreed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.dp is None else self.dp.agreed()


class OffbeatTrainer(Offbeat, Trainer):
    """The Trainer of transformers, over an algorithm of offbeat."""


class _Stepped:
    """A scheduler that offbeat steps, in the hands of a loop that steps it, too."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._before = scheduler.get_last_lr()

    def step(self, *_: Any) -> None:
        """Do nothing: offbeat has, by now, if it was to."""
        self._before = self.scheduler.get_last_lr()

    def get_last_lr(self) -> Any:
        """The rates that the last step was made with: they are logged after it."""
        return self._before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


def _own_file(dp: Attachment | None) -> str:
    assert dp is not None
    return f"offbeat_{dp.rank}.pt"
