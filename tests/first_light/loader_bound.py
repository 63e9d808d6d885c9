"""A training script that waits for its input. Each sample sleeps for 2 ms, so workers pay off on a busy machine, too."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((8,), float(index % 7)), index % 3


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Slow(), batch_size=16, shuffle=True)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
