"""Calls modules in processes that do not train; prints whether calls of modules are slowed down there.

Words: the start method of the loader's workers, whose data set transforms its samples by modules as torchvision does;
`actor` for a process that only acts with the model, `trains` for one that acts and then trains in the place
of this process; `persistent` keeps workers, `ends` ends after two epochs.
"""

import itertools
import multiprocessing
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def is_watched():
    return hasattr(nn.Module.__call__, "__wrapped__")


class Scale(nn.Module):
    def forward(self, x):
        return x * 2


class Data(Dataset):
    def __init__(self):
        self.transform = Scale()

    def __len__(self):
        return 48

    def __getitem__(self, index):
        sample = self.transform(torch.ones(4))
        return sample, is_watched()


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def act(model, optimizer, told):
    torch.set_num_threads(1)
    for _ in range(100):
        model(torch.ones(3, 4)).sum()
    told.put(is_watched())
    if "trains" in sys.argv:
        train(model, optimizer, itertools.repeat(torch.ones(3, 4)))


def epochs():
    method = "fork" if "actor" in sys.argv else sys.argv[1]
    is_kept = "persistent" in sys.argv
    workers = 2 if method == "fork" else 1  # others import torch, which takes seconds
    loader = DataLoader(Data(), batch_size=4, num_workers=workers, multiprocessing_context=method, persistent_workers=is_kept)
    seen = set()
    for epoch in itertools.count():
        for x, watched in loader:
            seen.update(watched.tolist())
            yield x
        if epoch == 1:
            print("watched in workers:", sorted(seen), flush=True)
            if "ends" in sys.argv:
                return


def main():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "actor" in sys.argv or "trains" in sys.argv:
        forking = multiprocessing.get_context("fork")
        told = forking.Queue()
        actor = forking.Process(target=act, args=(model, optimizer, told))
        actor.start()
        print("watched in actor:", told.get(), flush=True)
        actor.join()
    if "trains" not in sys.argv:
        train(model, optimizer, epochs())


if __name__ == "__main__":
    main()
