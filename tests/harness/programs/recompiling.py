"""A compiled program that meets a new shape during the measurement. Its compiler backend changes nothing."""

import time
from pathlib import Path

import torch
from torch import nn

PROGRESS = Path("progress.jsonl")


def main():
    model = nn.Linear(4, 2)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    width, until_s = 1, float("inf")
    while True:
        if width == 1 and '"steady"' in PROGRESS.read_text():
            until_s = min(until_s, time.monotonic() + 0.3)  # a little after the window begins
            if time.monotonic() >= until_s:
                width = 2
        compiled(torch.zeros(width, 6, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004 * width)


if __name__ == "__main__":
    main()
