"""Trains a small network. Each word of its command line adds something that the passes of mode "explain" find or survive."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

WORDS = sys.argv[1:]


class Halve:
    def __call__(self, tensor):
        time.sleep(0.002 if "transform" in WORDS else 0)
        return tensor / 2


class Pictures(Dataset):
    def __init__(self):
        self.transform = None
        if "transform" in WORDS:
            from torchvision.transforms import Compose

            self.transform = Compose([Halve(), torch.nn.Identity()])

    def __len__(self):
        return 24 if "short" in WORDS else 32 if "epochs" in WORDS else 1_000_000

    def __getitem__(self, index):
        if "item" in WORDS:
            time.sleep(0.003)
        tensor = torch.ones(64)
        return self.transform(tensor) if self.transform else tensor


def loss_of(model, batch):
    return model(batch).square().mean()


def report(loss):
    return loss.item()  # the place of the synchronisation


def burn():
    until_s = time.perf_counter() + 0.004
    while time.perf_counter() < until_s:  # the slow line
        pass


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(Pictures(), batch_size=8, sampler=range(32)):
            report(loss_of(model, batch))
            time.sleep(0.01)
    model.train()


def killed_after(export):
    def killed(*args, **kwargs):
        export(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    return killed


def main():
    if "blocked" in WORDS:  # a folder takes the path to which the trace is written first
        os.mkdir(os.path.join(os.path.dirname(os.environ["AUTOTUNE_SPEC"]), "unfinished.trace.rank0.json.gz"))
    if "killed" in WORDS:
        torch.autograd.profiler.profile.export_chrome_trace = killed_after(torch.autograd.profiler.profile.export_chrome_trace)
    if "ranks" in WORDS:
        torch.distributed.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model = torch.nn.parallel.DistributedDataParallel(model) if "ranks" in WORDS else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def make():
        return DataLoader(Pictures(), batch_size=512 if "wide" in WORDS else 8, num_workers=2 if "workers" in WORDS else 0)

    loader = make()
    begun_s = time.perf_counter()
    epochs = (make() if "remade" in WORDS else loader for _ in range(1000))
    batches = (batch for epoch in epochs for batch in epoch) if "epochs" in WORDS else loader
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        if "sync" in WORDS:
            report(loss)
        if "blocks" in WORDS:
            b"x" * 2**26  # so large that the C library returns it to the kernel when it is freed
        if "burn" in WORDS or ("rank1" in WORDS and torch.distributed.get_rank() == 1):
            burn()
        if "evaluate" in WORDS and number % 4 == 3:
            trained_s = time.perf_counter()
            evaluate(model)
            print("seconds", trained_s - begun_s, time.perf_counter() - trained_s, flush=True)
            begun_s = time.perf_counter()
        if "crash" in WORDS and number == 150:
            raise ValueError("in the middle of a pass")
        if "segfault" in WORDS and number == 150:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "seen" in WORDS and number == 5:
            print([name for name in sys.modules if name.startswith("_autotune_harness.explain.") and "passes" in name])


if __name__ == "__main__":
    main()
