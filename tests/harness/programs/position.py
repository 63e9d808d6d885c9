"""Saves the position of its sampler after each step, as does a loader that can resume in the middle of an epoch."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset


class Position:
    def __init__(self, sampler):
        self.batches, self.number = iter(sampler.batches), 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return next(self.batches)

    def state_dict(self):
        return {"number": self.number}


class Batches:
    def __init__(self):
        self.batches = torch.arange(64).split(8)

    def __iter__(self):
        return Position(self)

    def __len__(self):
        return len(self.batches)


model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = Batches()
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_sampler=batches)
saved = []
while len(saved) < 24:
    iterator = iter(loader)
    assert iterator._index_sampler is batches
    for (x,) in iterator:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        saved.append(iterator._sampler_iter.state_dict()["number"])
print(json.dumps(saved))
