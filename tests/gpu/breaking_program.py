"""Trains a small network. In a large batch, step 30 indexes beyond the end of a tensor, which poisons the CUDA context."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--break-from", type=int, default=128, help="batches of at least this size poison the context")
options = parser.parse_args()
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, table = torch.randn(options.batch, 256, device="cuda"), torch.zeros(8, device="cuda")
for step in range(10**9):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 30 and options.batch >= options.break_from:
        table[torch.tensor([10**6], device="cuda")].sum().item()
