"""Two ranks under DistributedDataParallel over gloo; each writes what it sees of its gradients.

Words: `hook` registers a communication hook, `slow` makes rank 1 work longer, `bare` leaves DistributedDataParallel out,
`uneven` gives rank 1 less data in each epoch, `compiled` compiles the model before it is wrapped.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

EPOCH, LESS = 8, 3

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
body = torch.nn.Sequential(*(torch.nn.Linear(512, 1024) if n % 2 == 0 else torch.nn.Linear(1024, 512) for n in range(4)))
inner = torch.compile(body, backend="eager") if "compiled" in sys.argv else body
model = body if "bare" in sys.argv else DistributedDataParallel(inner)
if "hook" in sys.argv:
    model.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


def steps():
    if "uneven" not in sys.argv:
        yield from range(1_000_000)
    for begin in range(0, 1_000_000, EPOCH):
        with model.join():
            yield from range(begin, begin + EPOCH - LESS * rank)


for step in steps():
    optimizer.zero_grad()
    output = model(torch.randn(4, 512))
    if "slow" in sys.argv and rank == 1:
        time.sleep(0.05)
    output.square().mean().backward()
    if step == 3 and "bare" not in sys.argv:
        gradient = body[0].weight.grad
        told = model._get_ddp_logging_data()
        seen = {
            "buckets": len(told["rebuilt_bucket_sizes"].split(",")) if told.get("rebuilt_bucket_sizes") else None,
            "is_view": gradient._base is not None,
            "is_static": bool(told.get("static_graph")),
            "is_rounded": bool((gradient == gradient.bfloat16().float()).all()),
            "environment": os.environ.get("NCCL_ALGO"),
            "threads": torch.get_num_threads(),
        }
        with open(f"seen{rank}.json", "w") as file:
            json.dump(seen, file)
    optimizer.step()
