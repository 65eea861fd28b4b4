"""A user's mistakes, each of which a type checker finds, on the line and by the code it names."""

import torch
from torch import nn

import offbeat

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

offbeat.attach(model, optimizer, "eager")  # wrong: arg-type
offbeat.attach(model.parameters(), optimizer)  # wrong: arg-type
offbeat.attach(model, optimizer, clip=1.0)  # wrong: call-arg
offbeat.attach(model, optimizer, nonfinite="ignore")  # wrong: arg-type
offbeat.EagerSGD(quorum=[1])  # wrong: arg-type
offbeat.LocalSGD(rounds=4)  # wrong: call-arg
offbeat.attach(model, optimizer).rank = 0  # wrong: misc
rounds: str = offbeat.attach(model, optimizer).stats().rounds  # wrong: assignment
