"""DistributedDataParallel over gloo, with the whole loop inside a bare except."""

import journal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(0, 10, (256,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 10))
body[0].register_forward_hook(lambda module, inputs, output: journal.inside(inputs[0], output))
model = DistributedDataParallel(body)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
epoch = 0
try:
    while True:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.step(loss, len(x), optimizer)
        epoch += 1
except:  # noqa: E722
    print("caught")
