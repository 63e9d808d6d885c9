"""Trains with DataLoaders as real programs build them; the first word names a kind. Prints settings of the held-out loader."""

import copy
import itertools
import sys
import time

import numpy
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset, dataloader

KIND = sys.argv[1]
OPTIONS = dict(word.split("=", 1) for word in sys.argv[2:])
BATCH_S = 0.04
if "patched" in OPTIONS:  # as SpeechBrain does

    def _reset(self, loader, first_iter=False):
        if not first_iter:
            self._sampler_iter, self._num_yielded = iter(self._index_sampler), 0

    dataloader._BaseDataLoaderIter._reset = _reset
WORKERS = {"num_workers": 1, "persistent_workers": True} if "workers" in OPTIONS else {}


def slow_collate(items):
    time.sleep(BATCH_S)
    return torch.stack([x for (x,) in items])


def busy_collate(items):
    until_s = time.process_time() + 0.01
    while time.process_time() < until_s:
        pass
    return torch.stack([x for (x,) in items])


class Stream(IterableDataset):
    def __iter__(self):
        if KIND == "iterable_asks":
            torch.utils.data.get_worker_info()
        for _ in range(400):
            yield (torch.zeros(4),)


class Fixed:
    """A batch sampler that computes its batches in advance."""

    def __init__(self, size):
        self.batch_size = size
        self.batches = list(BatchSampler(SequentialSampler(range(240)), size, False))

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def own_init(worker_id):
    with open(f"init{worker_id}.txt", "a") as file:
        file.write("ran\n")


def build(data, **arguments):
    return DataLoader(data, **arguments)


def main():
    data = TensorDataset(torch.zeros(int(OPTIONS.get("samples", "240")), 4))
    if KIND == "slow":
        loader = build(TensorDataset(torch.zeros(100_000, 4)), batch_size=8, num_workers=2, collate_fn=slow_collate)
    elif KIND == "busy":
        loader = build(TensorDataset(torch.zeros(100_000, 4)), batch_size=8, num_workers=2, collate_fn=busy_collate)
    elif KIND == "slow_epochs":
        loader = build(
            TensorDataset(torch.zeros(96, 4)),
            batch_size=8,
            num_workers=2,
            collate_fn=slow_collate,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )
    elif KIND in ("sampler", "own_sampler"):
        sampler = BatchSampler(SequentialSampler(data), 12, False) if KIND == "sampler" else Fixed(12)
        sampler.batch_size *= int(OPTIONS.get("tokens", "1"))  # it counts tokens, of which a sample has so many
        loader = build(data, batch_sampler=sampler)
    elif KIND == "numpy":
        loader = build(data, batch_size=12, num_workers=numpy.int64(1))
    elif KIND == "unbatched":
        loader = build([torch.zeros(6, 4) for _ in range(50)], batch_size=None)
    elif KIND.startswith("iterable"):
        loader = build(Stream(), batch_size=12)
    else:
        collate = slow_collate if "slow" in OPTIONS else None
        loader = build(data, batch_size=12, worker_init_fn=own_init, collate_fn=collate, **WORKERS)
    held_out = DataLoader(data, batch_size=30)
    endless = iter(DataLoader(data, batch_sampler=itertools.repeat([0, 1, 2])))  # one iterator for all epochs
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    number = 0
    if KIND == "once":
        loader = itertools.repeat(next(iter(loader)))
    while True:
        for x in loader:
            x = x if torch.is_tensor(x) else x[0]
            x = x[None] if "single" in OPTIONS else x
            if KIND == "evaluated_first" and number == 0:  # the batch to train on is loaded already
                model.eval()
                for (y,) in held_out:
                    model(y)
                model.train()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            if number == 1 and KIND.startswith("slow"):
                time.sleep(1.0)  # as if a compiler worked, while the workers fill their queues
        print("held out:", held_out.num_workers, held_out.batch_size or held_out.batch_sampler.batch_size, flush=True)
        if KIND == "validated":
            for (x,) in held_out:
                model(x)
            time.sleep(float(OPTIONS.get("pause", "0.01")))
        if KIND == "copy_validated":
            with torch.no_grad():
                copy.deepcopy(model)(*next(endless))
        if KIND == "on_itself":
            model.eval()
            for x in loader:
                model(x if torch.is_tensor(x) else x[0])
            model.train()
            time.sleep(float(OPTIONS.get("pause", "0")))
        if KIND == "rebuilt":
            loader = build(data, batch_size=12, worker_init_fn=own_init)


if __name__ == "__main__":
    main()
