"""Trains a small network by replaying a CUDA graph of the whole step, as in torch's notes on CUDA graphs."""

import torch
from torch import nn

BATCH = 64

model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
inputs, targets = torch.randn(BATCH, 256, device="cuda"), torch.randint(0, 10, (BATCH,), device="cuda")


def step() -> torch.Tensor:
    """Runs a step, or captures it."""
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
while True:
    inputs.normal_()
    graph.replay()
