"""A module that cannot be looked at: a stand-in for any fault inside the harness's own code."""

import torch
from torch import nn

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model._parameters["odd"] = "no tensor"
for _ in range(50):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
