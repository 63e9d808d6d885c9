"""Trains a small model and wastes time in each step. The smaller the environment variable PASSES, the less time it wastes."""

import os

import torch

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch, waste = torch.randn(64, 256), torch.randn(256, 256)
for _ in range(1_000_000):
    for _ in range(5 * int(os.environ.get("PASSES", "3"))):
        waste @ waste
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
