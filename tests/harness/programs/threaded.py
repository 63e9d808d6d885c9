"""Fetches batches in another thread while it trains, as prefetching generators do.

With the word `slow`, fetching takes longer than a step. With `torn`, the thread is interrupted at each line in which the
harness counts one of the batches, and a step is made meanwhile.
"""

import itertools
import queue
import sys
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader

FETCH_S, STEP_S = (0.01, 0.001) if "slow" in sys.argv else (0.001, 0.01)
TORN = 12  # number of the batch that is counted with interruptions
items, is_answered = queue.Queue(maxsize=2), threading.Semaphore(0)
number = 0


def collate(samples):
    time.sleep(FETCH_S)
    return {"x": torch.stack(samples)}


def trace(frame, event, argument):
    return interrupted if frame.f_code.co_name == "_yielded" and number == TORN else None


def interrupted(frame, event, argument):
    if event == "line":
        items.put(None)  # asks for a step without a batch
        is_answered.acquire()
    return interrupted


def fetch():
    global number
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        sys.settrace(trace if "torn" in sys.argv and number == TORN - 1 else None)
        items.put(batch)
        number += 1


torch.manual_seed(0)
loader = DataLoader(list(torch.randn(240, 4)), batch_size=12, collate_fn=collate)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
threading.Thread(target=fetch, daemon=True).start()
x, num_interrupted = None, 0
while True:
    item = items.get()
    x = x if item is None else item["x"]
    optimizer.zero_grad()
    model(x).sum().backward()
    time.sleep(STEP_S)
    optimizer.step()
    if item is None:
        num_interrupted += 1
        if num_interrupted == 4:
            print("interrupted", flush=True)
        is_answered.release()
