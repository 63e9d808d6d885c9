"""Trains in one endless iteration over a data set that it changes after some steps, except with the word `fixed`."""

import itertools
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __init__(self):
        self.value = 0.0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), self.value)


class Endless:
    def __iter__(self):
        return itertools.cycle(range(8))


data = Data()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, x in enumerate(DataLoader(data, batch_size=2, sampler=Endless())):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    time.sleep(0.01)
    if number == 8 and "fixed" not in sys.argv:
        data.value = 1.0
