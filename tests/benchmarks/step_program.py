"""A training loop with steps of about a millisecond that times itself, to measure what autotune costs.

    python step_program.py --blocks 20 [--steps 200]

It prints one JSON line with the mean seconds of a step in each block of steps. It does not import autotune: overhead.py runs it
with and without the harness.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCK_STEPS = 200  # at a millisecond per step, a block lasts as long as the harness's interval between heartbeats
WARMUP_BLOCKS = 2
BATCH, WIDTH, DEPTH, NUM_BATCHES = 32, 256, 3, 64


class Loop:
    """A small network, its optimizer and a cheap loader."""

    def __init__(self, device: str, max_steps: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)  # with two threads on two shared cores, other programs would determine the result
        self.device = device
        data = TensorDataset(torch.randn(BATCH * NUM_BATCHES, WIDTH), torch.randn(BATCH * NUM_BATCHES, 1))
        rounds = max_steps // NUM_BATCHES + 1
        whole_batches = [range(start, start + BATCH) for start in range(0, len(data), BATCH)] * rounds
        self.batches = iter(DataLoader(data, sampler=whole_batches, batch_size=None))
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def run(self, num_steps: int) -> float:
        """Trains and returns the mean seconds of a step."""
        self._wait()
        started_s = time.perf_counter()
        for _ in range(num_steps):
            inputs, targets = next(self.batches)
            loss = nn.functional.mse_loss(self.model(inputs.to(self.device)), targets.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self._wait()
        return (time.perf_counter() - started_s) / num_steps

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def options() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=BLOCK_STEPS, help="steps of a block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Trains for all blocks and prints the mean step of each."""
    chosen = options()
    loop = Loop(chosen.device, (WARMUP_BLOCKS + chosen.blocks) * chosen.steps)
    loop.run(WARMUP_BLOCKS * chosen.steps)
    print(json.dumps({"step_s": [loop.run(chosen.steps) for _ in range(chosen.blocks)]}))


if __name__ == "__main__":
    main()
