"""Runs of Accelerate and of the Trainer of transformers on real processes; for their workers."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

import offbeat
from offbeat.integrations.accelerate import check, prepare
from offbeat.integrations.transformers import OffbeatTrainer

logging.set_verbosity_error()
logging.disable_progress_bar()
SIZES = (5, 12, 7, 3, 9, 16)


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of unlike length, so that workers have unlike numbers of tokens."""

    def __init__(self, texts: int = 32) -> None:
        made = torch.Generator().manual_seed(1)
        self.texts = [
            torch.randint(3, 32, (SIZES[i % len(SIZES)],), generator=made) for i in range(texts)
        ]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.full((16,), 0)
        labels = torch.full((16,), -100)
        mine = self.texts[index]
        text[: len(mine)] = mine
        labels[: len(mine)] = mine
        return {"input_ids": text, "labels": labels}


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(5)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, loss_type="ForCausalLMLoss"))


def _anew() -> None:
    """Accelerate keeps its state for ever; each run begins without."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for each in (AcceleratorState, GradientState, PartialState):
        each._reset_state()


def accelerator_alone() -> Accelerator:
    _anew()
    return Accelerator(cpu=True)


def arguments(folder: str, **settings: Any) -> TrainingArguments:
    settings = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam divides small gradients by small ones: the last bit comes first
        "save_strategy": "no",
        "logging_steps": 1,
        **settings,
    }
    return TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )


class _Slow:
    """Worker 1 takes longer."""

    def training_step(self, *given: Any, **settings: Any) -> Any:
        if self.args.process_index == 1:  # type: ignore[attr-defined]
            time.sleep(self.slow_s)  # type: ignore[attr-defined]
        return super().training_step(*given, **settings)  # type: ignore[misc]


class SlowTrainer(_Slow, OffbeatTrainer):
    slow_s = 0.05


class SlowDDP(_Slow, Trainer):
    slow_s = 0.02


def slow_with_ddp(folder: str) -> None:
    _anew()
    SlowDDP(gpt(), arguments(folder, num_train_epochs=1), train_dataset=Texts()).train()


def _end(trainer: Any) -> dict[str, Any]:
    logs = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "parameters": [each.detach().clone() for each in trainer.model.parameters()],
        "names": [name for name, _ in trainer.model.named_parameters()],
        "losses": [row["loss"] for row in logs],
        "rates": [row["learning_rate"] for row in logs],
        "steps": trainer.state.global_step,
        "type": type(trainer.model_wrapped).__name__,
        "eval": trainer.evaluate()["eval_loss"],
    }


def trained(folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """With DDP, and with SyncSGD."""
    ends = []
    for kind in (Trainer, OffbeatTrainer):
        _anew()
        made = kind(
            gpt(), arguments(folder, **settings), train_dataset=Texts(), eval_dataset=Texts(8)
        )
        made.train()
        ends.append(_end(made))
    return ends


def resumed(folder: str, algorithm: offbeat.Algorithm) -> dict[str, Any]:
    """Two epochs at once; and the second one from a checkpoint."""
    ends = []
    for part in ("whole", "rest"):
        _anew()
        made = OffbeatTrainer(
            gpt(),
            arguments(folder, save_strategy="steps", save_steps=8),
            train_dataset=Texts(),
            eval_dataset=Texts(8),
            algorithm=algorithm,
        )
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-8" if part == "rest" else None)
        ends.append(_end(made))
    return {"whole": ends[0], "rest": ends[1]}


def does_not_wait(folder: str) -> dict[str, Any]:
    """Worker 1 is slow; no step of worker 0 may wait for it, though every one is logged."""
    _anew()
    made = SlowTrainer(
        gpt(),
        arguments(folder, num_train_epochs=1),
        train_dataset=Texts(),
        eval_dataset=Texts(8),
        algorithm=offbeat.EagerSGD("solo"),
        offbeat={"warn": True},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.train()
    words = [str(each.message) for each in caught if "collective" in str(each.message)]
    return {**_end(made), "warned": words}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def accelerated(precision: str) -> list[Any]:
    """A loop of Accelerate's, with accumulation and clipping; with DDP, and with SyncSGD."""
    ends = []
    for ours in (False, True):
        _anew()
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=4, mixed_precision=precision
        )
        made = torch.Generator().manual_seed(3)
        x = torch.randn(64, 6, generator=made)
        data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
        model: Any = _Net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
        if ours:
            model, optimizer, dp = prepare(accelerator, model, optimizer, clip_norm=0.3)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and not ours:
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    optimizer.zero_grad()
        if ours:
            dp.close()
        model = accelerator.unwrap_model(model)
        ends.append([each.detach().clone() for each in model.parameters()])
    return ends


def refusals(folder: str) -> dict[str, str]:
    """What is said to set-ups that cannot be meant."""
    told = {}

    def refused(name: str, build: Callable[[], Any], **environment: str) -> None:
        _anew()
        os.environ.update(environment)
        try:
            build()
        except (TypeError, ValueError) as error:
            told[name] = str(error)
        finally:
            for each in environment:
                del os.environ[each]

    def prepared(
        *handlers: Any, converted: bool = False, wrapped: bool = False, **settings: Any
    ) -> None:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[*handlers], **settings)
        model: Any = _Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if converted:  # into new parameters, as a move to an XLA device makes them
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            model = model.double()
            torch.__future__.set_overwrite_module_params_on_conversion(False)
        if wrapped:
            model, optimizer = accelerator.prepare(model, optimizer)
        prepare(accelerator, model, optimizer)

    def trainer(*, ours: dict[str, Any] | None = None, **settings: Any) -> None:
        OffbeatTrainer(gpt(), arguments(folder, **settings), **(ours or {}))

    dispatching = DataLoaderConfiguration(dispatch_batches=True)
    sharding = FullyShardedDataParallelPlugin()
    refused("launched", prepared, ACCELERATE_USE_FSDP="true")
    refused("parallel", prepared, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    accelerator = Accelerator(cpu=True)  # before: with the flag it looks for DeepSpeed itself
    refused("deepspeed", lambda: check(accelerator), ACCELERATE_USE_DEEPSPEED="true")
    refused("plugin", lambda: prepared(fsdp_plugin=sharding), ACCELERATE_USE_FSDP="false")
    refused("fsdp", lambda: trainer(fsdp="full_shard"), ACCELERATE_USE_FSDP="false")
    refused("kwargs", lambda: prepared(DistributedDataParallelKwargs()))
    refused("dispatch", lambda: prepared(dataloader_config=dispatching))
    refused("strange", lambda: prepared(converted=True))
    refused("wrapped", lambda: prepared(wrapped=True))
    refused("unused", lambda: trainer(ddp_find_unused_parameters=True))
    refused("algorithm", lambda: trainer(ours={"algorithm": "eager"}))
    refused("clip", lambda: trainer(ours={"offbeat": {"clip_norm": 1.0}}))
    return told
