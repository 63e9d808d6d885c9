"""Trains a linear model. After three steps, it captures a step as a CUDA graph and replays it; the graph is a fake.

During the capture, reading a number from the device fails, as it does under CUDA.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RATE = 0.01


class Graph:
    is_open = False

    def capture_begin(self):
        Graph.is_open = True

    def capture_end(self):
        Graph.is_open = False

    def replay(self):
        # Does what a step's kernels do, without a Python call to the model or the optimizer.
        with torch.no_grad():
            error = inputs @ model.weight.t() - targets
            loss.copy_(error.square().mean())
            model.weight.sub_(RATE * 2 * error.t() @ inputs / len(inputs))


def unless_captured(function):
    def called(*args):
        assert not Graph.is_open, "operation not permitted when stream is capturing"
        return function(*args)

    return called


def step():
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


torch.cuda.CUDAGraph = Graph
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: Graph.is_open
for name in ("item", "tolist", "__float__", "__bool__"):
    setattr(torch.Tensor, name, unless_captured(getattr(torch.Tensor, name)))

torch.manual_seed(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = nn.Linear(8, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
inputs, targets = x[:16].clone(), x[:16].sum(1, keepdim=True)
for _ in range(3):
    step()
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad()
graph.capture_begin()
loss = step()
graph.capture_end()
with open("losses.txt", "w") as losses:
    while True:
        for images, labels in loader if "loader" in sys.argv else [(inputs, targets)]:
            inputs.copy_(images)
            targets.copy_(labels)
            graph.replay()
            print(float(loss), file=losses, flush=True)
