"""Trains two ranks under DDP on gloo, started by srun or torchrun. Each rank prints what it observes, on one line."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SEEN = {"batches": set(), "dtypes": set()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        y = self.layers(x)
        SEEN["batches"].add(len(x))
        SEEN["dtypes"].add(str(y.dtype))
        return y


def main():
    for name, of_slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        os.environ.setdefault(name, os.environ[of_slurm])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 2, (256,)))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    seen = {
        "host": os.uname().nodename, "ranks": dist.get_world_size(), **{name: sorted(values) for name, values in SEEN.items()},
        "workers": loader.num_workers, "threads": torch.get_num_threads(), "is_view": model.gradient_as_bucket_view,
        "is_fused": optimizer.param_groups[0]["fused"], "variable": os.environ.get("SEEN_BY_THE_PROGRAM"),
        "weights": sum(weight.sum().item() for weight in model.parameters()),
    }  # fmt: skip
    print(json.dumps(seen), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
