"""Uses every random generator unseeded and writes the loss of each step. `backward=functional` hides the loss from hooks."""

import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return torch.randn(4) + float(np.random.rand()) + random.random()


model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Data(), batch_size=5, shuffle=True, num_workers=1, multiprocessing_context="fork")
with open("losses.txt", "w") as losses:
    while True:
        for inputs in loader:
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            if "backward=functional" in sys.argv:
                torch.autograd.backward([loss])
            else:
                loss.backward()
            optimizer.step()
            losses.write(f"{loss.item()}\n")
            losses.flush()
