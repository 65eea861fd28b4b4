"""Runs of Lightning on real processes, for test_lightning.py; importable by its workers."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import FSDPPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.lightning import OffbeatStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SAMPLES = 48


class Net(pl.LightningModule):
    """A small net with a momentum and a scheduler by step; worker 1 may be slow."""

    def __init__(self, slow_s: float = 0.0, sync_dist: bool = False, by: str = "step") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.slow_s, self.sync_dist, self.by = slow_s, sync_dist, by
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.slow_s and self.global_rank == 1:
            time.sleep(self.slow_s)
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val", loss, sync_dist=True)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return [optimizer], [{"scheduler": scheduler, "interval": self.by}]


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, generator=made)
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def trainer(strategy: Any, folder: str, **settings: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # as torchrun does
    settings = {"max_epochs": 2, "enable_checkpointing": False, **settings}
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fit(strategy: Any, folder: str, settings: dict[str, Any], **net: Any) -> dict[str, Any]:
    """Fit; what the parameters and the learning rate are in the end."""
    made = trainer(strategy, folder, **settings)
    module = Net(**net)
    loader = DataLoader(data(), batch_size=4, shuffle=False)
    made.fit(module, loader, DataLoader(data(), batch_size=8))
    rate = made.optimizers[0].param_groups[0]["lr"]
    return {
        "parameters": [each.detach().clone() for each in module.body.parameters()],
        "rate": rate,
        "steps": made.global_step,
        "losses": module.losses,
        "train": float(made.callback_metrics["train_epoch"]),
        "tested": made.test(module, DataLoader(data(), batch_size=8), verbose=False),
    }


def equals_ddp(folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [fit("ddp", folder, settings), fit("offbeat", folder, settings)]


def resumed(folder: str, algorithm: offbeat.Algorithm) -> dict[str, Any]:
    """Four epochs at once, and two and two with a checkpoint between."""
    ends = []
    for part in ("whole", "first", "rest"):
        saving = ModelCheckpoint(f"{folder}/{part}", filename="c", save_top_k=1, monitor=None)
        epochs = {"whole": 4, "first": 2, "rest": 4}[part]
        strategy = OffbeatStrategy(algorithm)
        made = trainer(
            strategy, folder, max_epochs=epochs, enable_checkpointing=True, callbacks=[saving]
        )
        module = Net()
        loader = DataLoader(data(), batch_size=4, shuffle=False)
        path = f"{folder}/first/c.ckpt" if part == "rest" else None
        made.fit(module, loader, DataLoader(data(), batch_size=8), ckpt_path=path)
        ends.append([each.detach().clone() for each in module.body.parameters()])
    saved = torch.load(Path(folder) / "first/c.ckpt", weights_only=True)
    return {"whole": ends[0], "rest": ends[2], "keys": sorted(saved)}


def dealt(folder: str) -> dict[str, Any]:
    """Worker 1 is slow, and the data are dealt; stop early, by the loss."""
    deal = offbeat.Deal(data(), batch_size=2)
    strategy = OffbeatStrategy(offbeat.EagerSGD("solo"))
    stopping = EarlyStopping("val", patience=1, min_delta=10.0)
    made = trainer(
        strategy, folder, max_epochs=8, use_distributed_sampler=False, callbacks=[stopping]
    )
    module = Net(slow_s=0.02, sync_dist=True)
    made.fit(module, DataLoader(data(), batch_sampler=deal), DataLoader(data(), batch_size=8))
    return {
        "steps": made.global_step,
        "epochs": made.current_epoch,
        "parameters": [each.detach().clone() for each in module.body.parameters()],
    }


class _Kill(pl.Callback):
    """Worker 0 alone gets SIGTERM, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(folder: str) -> dict[str, Any]:
    made = trainer(OffbeatStrategy(), folder, max_epochs=50, callbacks=[_Kill()])
    module, ended = Net(), "in order"
    try:
        made.fit(module, DataLoader(data(), batch_size=4), DataLoader(data(), batch_size=8))
    except SystemExit as error:
        ended = type(error).__name__
    return {
        "ended": ended,
        "steps": made.global_step,
        "parameters": [each.detach().clone() for each in module.body.parameters()],
        "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


class _TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.body[0], self.body[2])
        ]


class _Strange(Net):
    """Its optimizer was made of parameters that are gone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def refusals(folder: str) -> dict[str, str]:
    """What is said to runs that cannot be meant."""
    eager, told = offbeat.EagerSGD(), {}
    by_steps = {"callbacks": [ModelCheckpoint(folder, every_n_train_steps=5)]}
    by_steps |= {"enable_checkpointing": True, "use_distributed_sampler": False}
    by_interval = {"val_check_interval": 4, "use_distributed_sampler": False}
    cases: dict[str, tuple[type[Net], dict[str, Any]]] = {
        "value": (Net, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
        "batchnorm": (Net, {"sync_batchnorm": True}),
        "plugin": (Net, {"plugins": [FSDPPrecision("bf16-true")]}),
        "two": (_TwoOptimizers, {}),
        "strange": (_Strange, {}),
        "saves": (Net, by_steps),
        "validates": (Net, by_interval),
    }
    for name, (kind, settings) in cases.items():
        made = trainer(OffbeatStrategy(eager), folder, **settings)
        loader = DataLoader(data(), batch_size=4)
        if not settings.get("use_distributed_sampler", True):
            loader = DataLoader(data(), batch_sampler=offbeat.Deal(data(), batch_size=2))
        try:
            made.fit(kind(), loader, DataLoader(data(), batch_size=8))
        except (ValueError, TypeError) as error:
            told[name] = str(error)
    return told
