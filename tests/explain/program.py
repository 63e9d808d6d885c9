"""Trains a small model under torch.profiler and writes reference numbers, for test_real_traces.py; runs in its own process."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.flop_counter import FlopCounterMode


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(3, 20, 20), index % 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, dilation=2, padding=2),
            nn.ConvTranspose2d(8, 16, 2, stride=2), nn.MaxPool2d(4),
        )  # fmt: skip
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 10)

    def forward(self, x):
        x = self.convolutions(x).flatten(2).transpose(1, 2)
        query, key, value = self.heads(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2).mean(1))


def main(folder: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=8, num_workers=1))
    waits, slept = [], 0.004

    def step() -> None:
        started = time.perf_counter()
        with record_function("autotune::input"):
            x, y = next(batches)
        waits.append(time.perf_counter() - started)
        with record_function("autotune::forward"):
            loss = functional.cross_entropy(model(x), y)
        with record_function("autotune::backward"):
            loss.backward()
        with record_function("autotune::optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(slept)

    step()
    with FlopCounterMode(display=False) as counter:
        step()

    def write(profiler) -> None:
        profiler.export_chrome_trace(f"{folder}/trace.json.gz")
        events = profiler.key_averages(group_by_input_shape=False)
        self_s = {event.key: event.self_cpu_time_total * 1e-6 for event in events}
        counts = {event.key: event.count for event in events}
        found = {"self_s": self_s, "counts": counts, "flops": counter.get_total_flops(), "waits": waits[-4:], "slept_s": slept}
        with open(f"{folder}/truth.json", "w") as out:
            json.dump(found, out)

    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=4, repeat=1), on_trace_ready=write,
        record_shapes=True,
    ) as profiler:  # fmt: skip
        for _ in range(5):
            step()
            profiler.step()


if __name__ == "__main__":
    main(sys.argv[1])
