"""Trains a toy as PyTorch's FSDP2 example does: its loss is a sum with no lower end, and is no number from some step on."""

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
