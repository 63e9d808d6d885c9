"""Trains a small network and prints, after 40 steps, how many CUDA graphs torch.compile has recorded for it."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(64, 256, device="cuda")
for step in range(10**9):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 40:
        from torch._inductor import cudagraph_trees

        manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
        print("graphs", 0 if manager is None else manager.new_graph_id().id, flush=True)
