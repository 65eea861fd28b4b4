"""A GAN: two models, two optimizers, so two attachments, over a method that does not wait.

torchrun --nproc-per-node 2 examples/05_gan.py
offbeat simulate examples/05_gan.py --cluster half-speed-4
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat

torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(1024, 2) * 0.5 + 3.0)  # points around (3, 3)
loader = DataLoader(data, batch_sampler=offbeat.Deal(data, batch_size=32))

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
torch.manual_seed(1 + offbeat.rank())  # from here on: noise of this worker's own

# In the same order on every worker. While a worker steps one of them, it is away from the other.
with (
    offbeat.attach(critic, optimizer_c, offbeat.EagerSGD()),
    offbeat.attach(generator, optimizer_g, offbeat.EagerSGD()) as dp,
):
    for _ in range(8):
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), 4))
            optimizer_c.zero_grad()  # also what the generator's backward has left here
            judged = critic(torch.cat([real, fake.detach()]))
            bce(judged, torch.cat([ones, zeros])).backward()
            optimizer_c.step()

            optimizer_g.zero_grad()
            bce(critic(fake), ones).backward()
            optimizer_g.step()

if offbeat.rank() == 0:
    with torch.no_grad():
        centre = generator(torch.randn(2048, 4)).mean(dim=0)
    distance = (centre - 3.0).norm().item()
    print(f"workers {dp.world_size}   distance from the centre of the data {distance:.2f}")
