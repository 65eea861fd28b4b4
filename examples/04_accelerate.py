"""A loop of Accelerate's over offbeat, with accumulation and dealt data:

torchrun --nproc-per-node 2 examples/04_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.integrations.accelerate import prepare
from offbeat.lab import digits

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits.split()
    train = TensorDataset(train_x, train_y)
    loader = DataLoader(train, batch_sampler=offbeat.Deal(train, batch_size=8))

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # instead of accelerator.prepare(model, optimizer)
    model, optimizer, dp = prepare(accelerator, model, optimizer, offbeat.EagerSGD(), clip_norm=1.0)
    for _ in range(8):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    dp.close()
    if accelerator.is_main_process:
        accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
        print(f"workers {accelerator.num_processes}   test accuracy {accuracy:.1%}")
