"""Iterates over a loader with a worker in ways that expect new workers in each epoch. Prints the batches that it got.

Words: `nested` begins another iteration in the middle of an epoch, `last` at its last batch. `changed` sets an attribute of the
data set between epochs, `array` writes to one of its arrays. `variable` keeps the iterator in a variable, `listed` keeps it
in a list and counts the batches. `first` looks at a batch before the first epoch and keeps that iterator. `shuffled` draws the
samples at random. `remade` makes a loader from another one, as libraries do.
"""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __init__(self):
        self.epoch, self.labels = 0, torch.zeros(4).numpy()

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(4), self.epoch, float(self.labels[0]), os.getpid(), index


torch.manual_seed(0)
data = Data()
loader = DataLoader(data, batch_size=2, num_workers=1, shuffle="shuffled" in sys.argv)
if "remade" in sys.argv:
    own = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "persistent_workers")}
    loader = DataLoader(data, batch_sampler=loader.batch_sampler, **own)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = {"batches": [], "epochs": [], "labels": [], "order": [], "workers": set()}
batches = []


def train(x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def counted():
    kept[:] = [iter(loader)]
    for _ in range(len(loader)):
        yield next(kept[0])


kept = []
if "first" in sys.argv:
    first = iter(loader)
    next(first)
for epoch in range(3):
    if "changed" in sys.argv:
        data.epoch = epoch
    if "array" in sys.argv:
        data.labels[0] = epoch
    found = []
    batches = iter(loader) if "variable" in sys.argv else counted() if "listed" in sys.argv else loader
    for x, number, label, worker, indices in batches:
        found.append((int(number[0]), int(label[0])))
        seen["order"] += indices.tolist()
        seen["workers"].add(int(worker[0]))
        train(x)
        if len(found) == (3 if "nested" in sys.argv else 8 if "last" in sys.argv else 0):
            next(iter(loader))
    seen["batches"].append(len(found))
    seen["epochs"].append(sorted({number for number, _ in found}))
    seen["labels"].append(sorted({label for _, label in found}))
print(json.dumps({**seen, "workers": len(seen["workers"])}))
