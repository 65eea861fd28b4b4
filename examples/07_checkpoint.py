"""Evaluate and save while the others train on, keep the best model, resume after an interruption.

torchrun --nproc-per-node 2 examples/07_checkpoint.py
torchrun --nproc-per-node 2 examples/07_checkpoint.py --epochs 6 --resume
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.lab import digits

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
train_x, train_y, test_x, test_y = digits.split()
train = TensorDataset(train_x, train_y)
deal = offbeat.Deal(train, batch_size=8)
loader = DataLoader(train, batch_sampler=deal)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

mine = options.folder / f"worker-{offbeat.rank()}.pt"  # each worker has its own
options.folder.mkdir(parents=True, exist_ok=True)
saved = torch.load(mine, weights_only=False) if options.resume else None
if saved is not None:  # model and optimizer before attach, the rest after it
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
first, best = (saved["epochs"], saved["best"]) if saved is not None else (0, 0.0)


def accuracy() -> float:
    with torch.no_grad():
        return (model(test_x).argmax(dim=1) == test_y).float().mean().item()


with offbeat.attach(model, optimizer, offbeat.EagerSGD()) as dp:
    if saved is not None:
        dp.load_state_dict(saved["offbeat"])
        deal.load_state_dict(saved["deal"])
    for epoch in range(first, options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dp.rank == 0:
            with dp.agreed():  # the newest round; the others train on meanwhile
                if (found := accuracy()) > best:
                    best = found
                    torch.save(model.state_dict(), options.folder / "best.pt")
        state = {"offbeat": dp.state_dict(), "deal": deal.state_dict()}  # all come to one round
        state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epochs": epoch + 1, "best": best}, mine)

if offbeat.rank() == 0:
    print(f"workers {dp.world_size}   epochs {first} to {options.epochs}   best {best:.1%}")
