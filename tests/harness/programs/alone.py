"""Trains on a data set that must stay in one process; the first word names the reason.

With `numpy`, `legacy`, `python` or `torch`, the data set draws from its own random generator of this kind; with `global`, from
the generators of the process; with `module`, from a global variable of the module; with `collate`, the collate function draws
from a generator that it holds; with `made`, the data set makes its generator at the first access. With `file`, it holds an open
file, with `files` 20 of them; with `late`, it opens the file at the first access. With `buffer`, the collate function writes
all batches into one tensor. With the second word `seeded`, the loader has a `worker_init_fn`.
"""

import random
import sys
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

CHANCE = numpy.random.default_rng(0)


class Data(Dataset):
    def __init__(self):
        Path("data.bin").write_bytes(bytes(64))
        self.file = Path("data.bin").open("rb") if "file" in sys.argv else None  # noqa: SIM115
        self.files = [Path("data.bin").open("rb") for _ in range(20)] if "files" in sys.argv else []  # noqa: SIM115
        self.chance = {
            "numpy": numpy.random.default_rng(0),
            "legacy": numpy.random.RandomState(0),
            "python": random.Random(0),
            "torch": torch.Generator().manual_seed(0),
            "global": (numpy.random.mtrand._rand, random._inst, torch.default_generator),
        }.get(sys.argv[1])

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if "late" in sys.argv and self.file is None:
            self.file = Path("data.bin").open("rb")  # noqa: SIM115
        if self.file is not None:
            self.file.seek(index)
        if "torch" in sys.argv:
            return torch.rand(4, generator=self.chance)
        if "module" in sys.argv:
            CHANCE.random()
        if "made" in sys.argv:
            self.chance = self.chance or numpy.random.default_rng(torch.initial_seed())
        for each in self.chance if "global" in sys.argv else (self.chance,):
            if each is not None and not isinstance(each, torch.Generator):
                each.random()
        return torch.rand(4)


class Masking:
    def __init__(self):
        self.chance = random.Random(0)

    def __call__(self, items):
        self.chance.random()
        return default_collate(items)


class Writing:
    def __init__(self):
        self.batch = torch.empty(8, 4)

    def __call__(self, items):
        return torch.stack(items, out=self.batch)


def seed(worker_id):
    pass


if __name__ == "__main__":
    collate = {"collate": Masking(), "buffer": Writing()}.get(sys.argv[1])
    loader = DataLoader(Data(), batch_size=8, worker_init_fn=seed if "seeded" in sys.argv else None, collate_fn=collate)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
