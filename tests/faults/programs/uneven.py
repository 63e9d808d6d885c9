"""Two ranks under DDP; every item of rank 1 takes a little longer to read."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if dist.get_rank() == 1:
            time.sleep(0.003)  # reading is slow on rank 1
        return torch.ones(64)


def main():
    dist.init_process_group("gloo")
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Shards(), batch_size=4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
