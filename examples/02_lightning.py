"""Train on handwritten digits by Lightning, over a method that does not wait:

torchrun --nproc-per-node 2 examples/02_lightning.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.lightning import OffbeatStrategy
from offbeat.lab import digits


class Digits(pl.LightningModule):
    """An ordinary module: nothing in it knows of offbeat."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        right = (self.body(x).argmax(dim=1) == y).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 360)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits.split()
    train, test = TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)
    deal = offbeat.Deal(train, batch_size=16)  # to whoever is free
    trainer = pl.Trainer(
        strategy=OffbeatStrategy(offbeat.EagerSGD()),  # instead of "ddp"
        accelerator="cpu",
        devices=offbeat.world_size(),
        max_epochs=8,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,  # the data are dealt
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_sampler=deal), DataLoader(test, batch_size=180))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"workers {trainer.world_size}   test accuracy {accuracy:.1%}")
