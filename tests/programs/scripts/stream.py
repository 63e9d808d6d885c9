"""Reads a stream of samples. With the word `sharded`, the loader's workers share the stream; else each reads all of it."""

import sys

import journal
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

NUM, IS_SHARDED = 240, "sharded" in sys.argv


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info() if IS_SHARDED else None
        for number in range(NUM) if worker is None else range(worker.id, NUM, worker.num_workers):
            yield torch.full((4,), number / NUM), number


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        journal.inside(inputs, hidden)
        return self.head(hidden.relu())


torch.manual_seed(0)
loader = DataLoader(Stream(), batch_size=12)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    numbers = []
    for inputs, which in loader:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        numbers += which.tolist()
        journal.step(loss, len(inputs), optimizer)
    journal.note(each_sample_once=sorted(numbers) == list(range(NUM)))
