"""Two ranks under DDP; where FAULT says so, after some steps one of them does something else, and the other waits for it."""

import os
import time

import torch
import torch.distributed as dist


def think():
    while True:
        time.sleep(0.01)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000):
    if step == 5 and dist.get_rank() == 1 and os.environ.get("FAULT") == "waits for a rank":
        think()
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
