"""Trains on samples of a megabyte each, so that a large batch exceeds a memory limit."""

import time

import torch
from torch.utils.data import DataLoader

loader = DataLoader(range(1_000_000), batch_size=4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for numbers in loader:
    inputs = torch.ones(len(numbers), 1 << 18)
    optimizer.zero_grad()
    model(inputs[:, :8]).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
