"""Several processes without torch.distributed; each writes when its steps ended and how many samples they held.

The first word is `shared` (all train one model in shared memory), `late` (shared; the second process begins seconds later),
`apart` (each process trains a separate model), `idle` (the second process never trains), `first` (the main process makes a step
before the others) or `ending` (the second process ends early).
"""

import os
import sys
import time

import torch
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, TensorDataset


def train(number, how, model, num_steps=10**9):
    torch.manual_seed(number)
    torch.set_num_threads(1)
    if how == "idle" and number:
        time.sleep(8)
        return
    if how == "late" and number:
        time.sleep(2.5)
    if how == "apart":
        model = nn.Linear(64, 64)
    loader = DataLoader(TensorDataset(torch.randn(480, 64)), batch_size=16 + 8 * number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done, both_since_s = 0, 0.0
    with open(f"steps{number}.txt", "w") as notes:
        while True:
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                notes.write(f"{time.monotonic()} {len(inputs)}\n")
                notes.flush()
                done += 1
                time.sleep(0.002)
                both_since_s = both_since_s or (time.monotonic() if os.path.exists("steps0.txt") else 0.0)
                is_early = how == "ending" and number and both_since_s and time.monotonic() - both_since_s > 2
                if done >= num_steps or is_early:
                    return


if __name__ == "__main__":
    how = sys.argv[1]
    multiprocessing.set_start_method("spawn")
    model = nn.Linear(64, 64)
    model.share_memory()
    if how == "first":
        train(9, how, model, 1)
    started = [multiprocessing.Process(target=train, args=(number, how, model)) for number in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
