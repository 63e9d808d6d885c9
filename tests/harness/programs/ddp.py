"""DistributedDataParallel over gloo, whole loop inside a bare except."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(0, 10, (256,)))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
model = DistributedDataParallel(body)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
except:  # noqa: E722
    print("caught")
