"""Trains on a data set to which the program adds a sample after each step. The word `fixed` leaves the data set as it is.

With the word `full`, each addition drops the oldest sample. With the word `whole`, the data set makes whole batches. With the
word `weighted`, the program changes the weights of its sampler instead.
"""

import sys
from collections import deque

import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class Replay(Dataset):
    def __init__(self):
        self.seen, self.num_fetched = deque(torch.randn(32, 4), maxlen=32 if "full" in sys.argv else 1000), 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_fetched += 1
        return self.seen[index % len(self.seen)]


class Whole(Replay):
    def __getitem__(self, index):
        return torch.stack([super(Whole, self).__getitem__(index + number) for number in range(8)])


class Weighted(Sampler):
    def __init__(self):
        self.weights = torch.ones(64)

    def __len__(self):
        return 64

    def __iter__(self):
        return (int(self.weights.argmax()) for _ in range(64))


sampler = Weighted() if "weighted" in sys.argv else None
replay, batch_size = (Whole(), None) if "whole" in sys.argv else (Replay(), 8)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for x in DataLoader(replay, batch_size=batch_size, sampler=sampler):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if sampler is not None:
            sampler.weights[3] += 1
        elif "fixed" not in sys.argv:
            replay.seen.append(torch.randn(4))
