"""Train a small network on handwritten digits. One script, three ways to run it:

python examples/01_train.py
torchrun --nproc-per-node 2 examples/01_train.py
offbeat simulate examples/01_train.py --cluster uniform-8 --workers 64
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.lab import digits

torch.manual_seed(0)
torch.set_num_threads(1)  # so small a network gains nothing from more
train_x, train_y, test_x, test_y = digits.split()
train = TensorDataset(train_x, train_y)
deal = offbeat.Deal(train, batch_size=4)  # to whoever is free; every sample once an epoch
loader = DataLoader(train, batch_sampler=deal)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
lr = 0.02 * offbeat.world_size() ** 0.5  # more workers, larger global batch, larger steps
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

with offbeat.attach(model, optimizer, offbeat.SyncSGD()) as dp:
    for _ in range(8):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

if offbeat.rank() == 0:  # after the block, where the model has all rounds: evaluate, or save
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    stats = dp.stats()
    print(f"workers {dp.world_size}   rounds {stats.rounds}   test accuracy {accuracy:.1%}")
    print(f"worker 0 computed for {stats.utilization:.0%} of its time")
