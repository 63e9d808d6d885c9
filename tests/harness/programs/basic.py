"""A plain training program with switches for what real programs do. It does not use autotune."""

import os
import resource
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = dict(word.split("=", 1) for word in sys.argv[1:])


def option(name, default):
    return type(default)(OPTIONS.get(name, default))


def make_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))


def blocks():
    """Prints how many page faults it takes to write a block that has been written and freed before."""
    for _ in range(20):  # several times, because small blocks may be put where the first large ones were
        torch.ones(10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


def main():
    torch.manual_seed(0)
    if "precision" in OPTIONS:
        torch.backends.mkldnn.matmul.fp32_precision = OPTIONS["precision"]
    if "threads" in OPTIONS:
        torch.set_num_threads(option("threads", 2))
    data = TensorDataset(torch.randn(256, 3, 8, 8), torch.randint(0, 10, (256,)))
    workers = option("workers", 0)
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    model = make_model()
    if "half" in OPTIONS:
        model = model.bfloat16()
    if "compile" in OPTIONS:
        model = torch.compile(model, backend=OPTIONS["compile"])
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[option("optimizer", "sgd")]
    optimizer = kind(model.parameters(), lr=0.01)
    stop, steps = option("steps", 10**9), 0
    if "blocks" in OPTIONS:
        blocks()
    with open("losses.txt", "w") as losses:
        while True:
            for x, y in loader:
                if steps == option("raise", -1):
                    raise ArithmeticError("the program's own trouble")
                if steps == stop:
                    if "exit" in OPTIONS:
                        os._exit(option("exit", 0))
                    return
                if "half" in OPTIONS:
                    x = x.bfloat16()
                if "nan" in OPTIONS:
                    x = x * float("nan")
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in OPTIONS):
                    loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                steps += 1
                print(float(loss).hex(), file=losses, flush=True)
                if "late" in OPTIONS:
                    torch.backends.mkldnn.matmul.fp32_precision = OPTIONS["late"]
                if "sleep" in OPTIONS:
                    time.sleep(option("sleep", 0.0))


if __name__ == "__main__":
    if "catch" in OPTIONS:
        try:
            main()
        except:  # noqa: E722
            print("caught")
    else:
        main()
