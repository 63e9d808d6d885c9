"""Trains on a GPU that this program simulates: queued work takes time there while the host continues.

Words: `host` makes the host work for more than half of a step; `copies` copies each batch on a separate stream, as
a prefetcher does; `accumulates` waits for each of four batches in a step.
"""

import contextlib
import gc
import sys
import time
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

gc.disable()  # a collection of all objects takes 20 ms, which a window of 0.7 s would show

FORWARD_S, BACKWARD_S, UPDATE_S, COPY_S, HOST_S, WAIT_S = 0.006, 0.012, 0.002, 0.004, 0.012, 0.04
EVERY = 4 if "accumulates" in sys.argv else 1
MEMORY = {"reserved_bytes": {"all": {"allocated": 1000, "peak": 1000}}, "num_alloc_retries": 0}


class Stream:
    def __init__(self):
        self.free_s = 0.0  # when all work that was queued so far is done

    def work(self, seconds):
        self.free_s = max(self.free_s, time.monotonic()) + seconds


class Event:
    def __init__(self, enable_timing=False):
        self.at_s = None

    def record(self, stream):
        self.at_s = max(stream.free_s, time.monotonic())

    def query(self):
        return time.monotonic() >= self.at_s

    def synchronize(self):
        time.sleep(max(0.0, self.at_s - time.monotonic()))

    def elapsed_time(self, later):
        assert self.query(), "device not ready"
        assert later.query(), "device not ready"
        return 1e3 * (later.at_s - self.at_s)


class Weight(nn.Parameter):
    device = property(lambda weight: torch.device("cuda", 0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(torch.randn(8, 2))

    def forward(self, x):
        main.work(FORWARD_S)
        y = x @ self.weight
        y.register_hook(lambda gradient: main.work(BACKWARD_S))
        return y


def synchronize(device=None):
    time.sleep(max(0.0, max(main.free_s, side.free_s) - time.monotonic()))


def copied(x):
    global current
    current = side
    side.work(COPY_S)
    x.to("meta", non_blocking=True)  # the harness sees a transfer, because the type of the device changes
    current = main
    return x


main, side = Stream(), Stream()
current = main
properties = SimpleNamespace(name="a simulated GPU", uuid="1", major=9, minor=0, total_memory=10**9)
for name, fake in {
    "Event": Event,
    "synchronize": synchronize,
    "current_stream": lambda device=None: current,
    "current_device": lambda: 0,
    "device": lambda device: contextlib.nullcontext(),
    "device_count": lambda: 1,
    "get_device_properties": lambda device=None: properties,
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "memory_stats_as_nested_dict": lambda device=None: MEMORY,
    "memory_stats": lambda device=None: MEMORY,
    "max_memory_allocated": lambda device=None: 800,
    "max_memory_reserved": lambda device=None: 1000,
}.items():
    setattr(torch.cuda, name, fake)


def collated(samples):
    if EVERY > 1:
        time.sleep(WAIT_S)
    return default_collate(samples)


data = TensorDataset(torch.randn(512, 8), torch.randn(512, 2))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
optimizer.register_step_pre_hook(lambda *_: main.work(UPDATE_S))
while True:
    for number, (x, y) in enumerate(DataLoader(data, batch_size=16, collate_fn=collated)):
        if "host" in sys.argv:
            time.sleep(HOST_S)
        if "copies" in sys.argv:
            x = copied(x)
        loss = nn.functional.mse_loss(model(x), y)
        if number % EVERY == 0:
            optimizer.zero_grad()
        loss.backward()
        if (number + 1) % EVERY == 0:
            optimizer.step()
