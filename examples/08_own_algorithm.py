"""An algorithm of your own: synchronous SGD whose rounds grow while it trains.

After Smith et al., "Don't Decay the Learning Rate, Increase the Batch Size" (arXiv 1711.00489).

torchrun --nproc-per-node 2 examples/08_own_algorithm.py
offbeat simulate examples/08_own_algorithm.py --cluster half-speed-4
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.lab import digits
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class GrowingBatch(offbeat.Algorithm):
    """Everybody waits for everybody, in rounds that hold one micro-batch more now and then."""

    every_rounds: int = 40
    """Rounds between two growths."""
    most: int = 4
    """Micro-batches of each worker in the largest round."""

    def __post_init__(self) -> None:
        self.check_counts("every_rounds", "most")

    def start(self, replica: Replica) -> None:
        """By which rules rounds start: here, when all have arrived."""
        replica.open(Rules("all", lockstep=True))

    def step(self, replica: Replica) -> Iterator[Round]:
        """After every micro-batch: put it onto the pile, arrive or not, apply what there is."""
        share = min(1 + replica.round // self.every_rounds, self.most)
        replica.contribute(arrive=replica.piled + 1 >= share)
        yield from replica.results()


torch.manual_seed(0)
torch.set_num_threads(1)
train_x, train_y, test_x, test_y = digits.split()
train = TensorDataset(train_x, train_y)
loader = DataLoader(train, batch_sampler=offbeat.Deal(train, batch_size=8))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with offbeat.attach(model, optimizer, GrowingBatch()) as dp:
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert dp.replicas_identical()

if offbeat.rank() == 0:
    accuracy = (model(test_x).argmax(dim=1) == test_y).float().mean().item()
    stats = dp.stats()
    print(f"workers {dp.world_size}   rounds {stats.rounds}   accuracy {accuracy:.1%}")
