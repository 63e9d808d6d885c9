"""Trains on a data set to which the program adds what it has just seen. The word `fixed` leaves the data set as it is."""

import sys
from collections import deque

import torch
from torch.utils.data import DataLoader, Dataset


class Replay(Dataset):
    def __init__(self):
        self.seen, self.num_fetched = deque([torch.randn(4)], maxlen=1000), 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_fetched += 1
        return self.seen[index % len(self.seen)]


replay = Replay()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for x in DataLoader(replay, batch_size=8):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if "fixed" not in sys.argv:
            replay.seen.append(torch.randn(4))
