"""Trains a toy like PyTorch's FSDP2 example: the loss is an unbounded sum, which becomes NaN after some steps."""

import time

import torch

inputs = torch.rand(16, 8) + 1.0
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    time.sleep(0.005)
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()
