"""Two ranks under DDP. After some steps, rank 1 has the fault that FAULT names, and rank 0 waits for it."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def think():
    while True:
        time.sleep(0.01)


FAULTS = {
    "waits for a rank": think,
    "rank is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "rank runs out of memory": lambda: torch.empty(1 << 50),
    "rank leaves": sys.exit,
    "rank ends without a word": lambda: os._exit(3),
}

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1_000_000):
    if step == 5 and dist.get_rank() == 1 and os.environ.get("FAULT") in FAULTS:
        FAULTS[os.environ["FAULT"]]()
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
