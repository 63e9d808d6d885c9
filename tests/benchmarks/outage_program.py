"""A training script whose speed is known: each step waits PAUSE_MS milliseconds, 4 by default."""

import os
import time

import torch
from torch import nn

if __name__ == "__main__":
    pause_s = float(os.environ.get("PAUSE_MS") or 4) / 1000
    model, x = nn.Linear(8, 3), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1_000_000):
        time.sleep(pause_s)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
