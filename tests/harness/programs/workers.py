"""A training program whose workers write their command line, cores and sharing strategy; options choose the kind of program."""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

OPTIONS = dict(word.split("=", 1) for word in sys.argv[1:])


class Data(Dataset):
    def __init__(self):
        self.loaded_by = (lambda i: i) if "lambda" in OPTIONS else None  # cannot be pickled
        # This lock can be pickled only while a process is spawned.
        self.lock = multiprocessing.get_context("spawn").Lock() if "lock" in OPTIONS else None

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index == 0 and "slow" in OPTIONS:
            time.sleep(float(OPTIONS["slow"]))
        return torch.full((4,), float(index))


class ToldSampler(RandomSampler):
    """Prints, before each epoch, which batch of four will contain the slow sample."""

    def __iter__(self):
        order = list(super().__iter__())
        print("slow batch is number", order.index(0) // 4, flush=True)
        return iter(order)


def tell(worker_id):
    seen = {
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    with open(f"worker{worker_id}.json", "w") as file:
        json.dump(seen, file)


def main():
    torch.manual_seed(0)
    if "chosen" in OPTIONS:
        multiprocessing.set_start_method(OPTIONS["chosen"])
    if "default" in OPTIONS:  # as another version of Python has it
        multiprocessing.context._default_context._default_context = multiprocessing.get_context(OPTIONS["default"])
        multiprocessing.get_all_start_methods = lambda: [OPTIONS["default"]]
    if "locks" in OPTIONS:
        multiprocessing.RLock()
    if "sharing" in OPTIONS:
        torch.multiprocessing.set_sharing_strategy(OPTIONS["sharing"])
    if "path" in OPTIONS:
        os.environ["PYTHONPATH"] = OPTIONS["path"]
    data = Data()
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=None if "ordered" in OPTIONS else ToldSampler(data),
        num_workers=int(OPTIONS.get("workers", "2")),
        worker_init_fn=tell,
        multiprocessing_context=OPTIONS.get("context"),
        persistent_workers="persistent" in OPTIONS,
    )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        for number, x in enumerate(loader):
            if 0.0 in x[:, 0]:
                print("slow batch was number", number, flush=True)
            if number == 0:
                print("trained on cores", sorted(os.sched_getaffinity(0)), "by threads", torch.get_num_threads(), flush=True)
            if "bind" in OPTIONS:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
