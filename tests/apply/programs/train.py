"""A plain training program that prints what it observes. It does not use autotune."""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = dict(word.split("=", 1) for word in sys.argv[1:])
SAMPLES, EPOCHS = 48, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        hidden = self.features(x)
        if self.training:
            SEEN["dtypes"].append(str(hidden.dtype))
            SEEN["batches"].append(len(x))
        else:
            SEEN["held_out"].append(len(x))
        return self.head(hidden.flatten(1))


SEEN = {"dtypes": [], "batches": [], "held_out": [], "workers": []}


def make_loader(data, batch_size):
    return DataLoader(data, batch_size, shuffle=data is not HELD_OUT)


def make_data():
    return TensorDataset(torch.randn(SAMPLES, 3, 8, 8), torch.randint(0, 10, (SAMPLES,)))


HELD_OUT = make_data()


def main():
    if "load" in OPTIONS:
        Net().load_state_dict(torch.load("weights.pt"))
        model = torch.load("model.pt", weights_only=False)
        print(type(model).__name__, model(torch.randn(2, 3, 8, 8)).dtype)
        return
    torch.manual_seed(0)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held_out = make_loader(HELD_OUT, 24)
    loader = make_loader(make_data(), int(OPTIONS.get("batch", 16)))
    for _ in range(int(OPTIONS.get("epochs", EPOCHS))):
        if "rebuild" in OPTIONS:
            loader = make_loader(make_data(), int(OPTIONS.get("batch", 16)))
        SEEN["workers"].append(loader.num_workers)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        for x, _ in held_out:
            model(x)
        model.train()
    weights = next(model.parameters())
    SEEN["is_channels_last"] = weights.is_contiguous(memory_format=torch.channels_last)
    SEEN["threads"] = torch.get_num_threads()
    SEEN["fused"] = optimizer.param_groups[0]["fused"]
    SEEN["env"] = os.environ.get("SEEN_BY_THE_PROGRAM")
    SEEN["omp"] = os.environ.get("OMP_NUM_THREADS")
    if "save" in OPTIONS:
        torch.save(model.state_dict(), "weights.pt")
        torch.save(model, "model.pt")
    print(json.dumps(SEEN), flush=True)
    time.sleep(float(OPTIONS.get("sleep", 0)))
    sys.exit(int(OPTIONS.get("exit", 0)))


if __name__ == "__main__":
    main()
