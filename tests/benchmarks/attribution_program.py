"""A small training loop whose speed is known: the variables PLANT_A to PLANT_E set the length of its steps.

It is 30 % faster with PLANT_A=1, 10 % with PLANT_B=1 and 3 % with PLANT_C=1. PLANT_D and PLANT_E have no effect.
"""

import os
import time

import torch
from torch import nn

STEP_S = 0.03
GAINS = {"A": 1.30, "B": 1.10, "C": 1.03, "D": 1.0, "E": 1.0}


def main() -> None:
    """Trains until it is killed. Each step sleeps until its set length is over."""
    torch.set_num_threads(1)
    step_s = STEP_S
    for name, gain in GAINS.items():
        step_s /= gain if os.environ.get(f"PLANT_{name}") == "1" else 1.0
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
    due_s = time.perf_counter()
    for _ in range(100_000):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        due_s = max(due_s + step_s, time.perf_counter())
        time.sleep(max(0.0, due_s - time.perf_counter()))
        optimizer.step()


if __name__ == "__main__":
    main()
