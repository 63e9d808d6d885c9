"""A training loop of about a millisecond a step that times itself: the yardstick for what the harness costs.

    python step_program.py --blocks 20

It prints one JSON line with the mean seconds of a step in each block of steps. It knows nothing of autotune.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCK_STEPS = 400  # at a millisecond a step: long enough for two heartbeats, whose cost belongs to the step
WARMUP_STEPS = 400
BATCH, WIDTH, DEPTH = 32, 256, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads on two shared cores would measure the neighbours
    num_samples = BATCH * (WARMUP_STEPS + options.blocks * BLOCK_STEPS)
    data = TensorDataset(torch.randn(BATCH * 64, WIDTH), torch.randn(BATCH * 64, 1))
    sampler = [range(start, start + BATCH) for start in range(0, BATCH * 64, BATCH)] * (num_samples // (BATCH * 64) + 1)
    loader = DataLoader(data, sampler=sampler, batch_size=None)  # the data set is indexed by whole batches: a cheap loader
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = iter(loader)

    def run(num_steps: int) -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(num_steps):
            inputs, targets = next(batches)
            loss = nn.functional.mse_loss(model(inputs.to(options.device)), targets.to(options.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started_s) / num_steps

    run(WARMUP_STEPS)
    print(json.dumps({"step_s": [run(BLOCK_STEPS) for _ in range(options.blocks)]}))


if __name__ == "__main__":
    main()
