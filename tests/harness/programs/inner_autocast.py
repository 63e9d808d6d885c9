"""Enters autocast inside forward, as Accelerate's prepared models do."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return self.layer(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(3, 4)).float().sum().backward()
    optimizer.step()
