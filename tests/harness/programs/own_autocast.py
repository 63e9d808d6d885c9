"""Enters autocast around its module or, as Accelerate does, inside forward; prints the format of each product.

With `teacher`, it also calls a module that does not train, and prints the format of its products.
"""

import sys

import torch
from torch import nn

own, none = torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    @(own if "inner" in sys.argv else lambda forward: forward)
    def forward(self, x):
        products = self.layer(x)
        print(products.dtype, flush=True)
        return products


model, teacher = Net(), nn.Linear(4, 2).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    with own if "outer" in sys.argv else none:
        if "teacher" in sys.argv:
            print("teacher:", teacher(torch.ones(3, 4)).dtype)
        outputs = model(torch.ones(3, 4))
    outputs.float().sum().backward()
    if "changes" in sys.argv:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
    optimizer.step()
