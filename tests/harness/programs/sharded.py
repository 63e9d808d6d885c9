"""Two ranks over gloo that train a model sharded by FSDP2; writes how its parameters are sharded and gathered.

Words: `--strategy ddp` uses DistributedDataParallel instead, `own=false` builds blocks that do not reshard after forward, `one`
shards the model as one unit, `loose` shards only its blocks, `again` turns resharding on again after the harness has set it.
`half` computes in bf16 by a policy, `tensor` splits each block's layers over the ranks, which then get the same batches.
`context` splits each sequence over the ranks.
`moved` moves the model after each step, as programs do that share the device with another model.
"""

import contextlib
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch before 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS, WATCHED = 3, 4
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # what FSDP2 calls

dist.init_process_group("gloo")
rank, gathered = dist.get_rank(), 0
gather = getattr(dist, GATHER)


def counted(*args, **kwargs):
    global gathered
    gathered += 1
    return gather(*args, **kwargs)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


setattr(dist, GATHER, counted)
torch.manual_seed(0)
model = nn.Sequential(nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(32, 10))
if "tensor" in sys.argv:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[0]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
elif "ddp" in sys.argv:
    model = DistributedDataParallel(model)
else:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "half" in sys.argv else None)
    for block in model[0] if "one" not in sys.argv else ():
        fully_shard(block, reshard_after_forward="own=false" not in sys.argv, mp_policy=policy)
    if "loose" not in sys.argv:
        fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
if "context" in sys.argv:
    from torch.distributed.tensor.experimental import context_parallel

    sequences = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0 if {"tensor", "context"} & set(sys.argv) else rank)
losses = []
for step in range(1_000_000):
    before = gathered
    x, splitting = torch.randn(8, 4, 32) if "context" in sys.argv else torch.randn(8, 32), contextlib.nullcontext()
    if "context" in sys.argv:
        splitting = context_parallel(sequences, buffers=[x], buffer_seq_dims=[1])
    with splitting:
        output = model(x)
        if step == 0 and "again" in sys.argv:
            model.set_reshard_after_forward(True)
        loss = output.square().mean()
        loss.backward()
    losses.append(loss.item())
    if step == WATCHED:
        weight = next(model.parameters())
        share = weight.to_local() if hasattr(weight, "to_local") else weight
        seen = {"gathers": gathered - before, "share": share.numel() / weight.numel(), "losses": losses}
        with open(f"seen{rank}.json", "w") as file:
            json.dump(seen, file)
    optimizer.step()
    optimizer.zero_grad()
    if "moved" in sys.argv:
        model.cpu()
