"""Trains 40 steps in a process that it forks.

With the word `raises`, an exception ends that process. With the word `by_hand`, `os.fork` makes it, and `os._exit` ends it.
"""

import multiprocessing
import os
import sys

import torch


def train():
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    if "raises" in sys.argv:
        raise ValueError("no more data")


if "by_hand" in sys.argv:
    child = os.fork()
    if child == 0:
        train()
        os._exit(0)
    os.waitpid(child, 0)
else:
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
