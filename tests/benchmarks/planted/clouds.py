"""Trains a network on point clouds of many sizes, in several processes: torchrun --nproc_per_node=2 clouds.py"""

import random

import torch
import torch.distributed as dist
from meter import Meter, options, revision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

REVISION = revision("A")
NUM_CLOUDS, WIDTH, CLASSES, BATCH = 800, 128, 5, 8


class PointNet(nn.Module):
    """Layers for every point, the largest of each feature, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor, owners: Tensor) -> Tensor:
        features = self.points(points)
        empty = features.new_zeros(BATCH, WIDTH)
        return self.head(empty.index_add(0, owners, features))


def main() -> None:
    """Trains."""
    settings = options()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    clouds = [torch.randn(20 + number * number // 320, 3) for number in range(NUM_CLOUDS)]
    share = NUM_CLOUDS // size
    mine = clouds[rank::size] if REVISION == 2 else clouds[rank * share : (rank + 1) * share]
    model = DistributedDataParallel(PointNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    choose = random.Random(rank)
    meter = Meter(settings.seconds)
    for _ in range(settings.epochs):
        choose.shuffle(mine)
        for first in range(0, len(mine) - BATCH + 1, BATCH):
            batch = mine[first : first + BATCH]
            owners = torch.repeat_interleave(torch.arange(BATCH), torch.tensor([len(cloud) for cloud in batch]))
            loss = nn.functional.cross_entropy(model(torch.cat(batch), owners), torch.randint(0, CLASSES, (BATCH,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if meter.add(BATCH * size):
                return


if __name__ == "__main__":
    main()
