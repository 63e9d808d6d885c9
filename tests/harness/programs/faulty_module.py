"""A module whose inspection raises: it stands for any fault inside the harness's own code.

With the word `stubborn`, inspecting the module works, but changing its memory format raises.
"""

import sys

import torch
from torch import nn


class Stubborn(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "to":
            raise LookupError("it stays as it is")
        return super().__torch_function__(func, types, args, kwargs or {})


model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "stubborn" in sys.argv:
    model.turn = nn.Parameter(torch.rand(1, 1, 2, 2).as_subclass(Stubborn))
else:
    model._parameters["odd"] = "no tensor"
for _ in range(50):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
