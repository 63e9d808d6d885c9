"""A module that cannot be looked at: a stand-in for any fault inside the harness's own code."""

import torch
from torch import nn


class Sealed(nn.Linear):
    def parameters(self, recurse=True):
        raise LookupError("sealed")


model = Sealed(2, 2)
optimizer = torch.optim.SGD(list(nn.Module.parameters(model)), lr=0.1)
for _ in range(50):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
