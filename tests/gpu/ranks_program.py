"""Trains a small network under DistributedDataParallel with a given backend. All ranks use the first GPU."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 256, device="cuda")
while True:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
