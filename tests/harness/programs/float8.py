"""Trains a small network in bf16; writes the types of its layers, whether the first weight was replaced, and its losses."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
first = model[0].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = torch.randn(30, 32), torch.randint(0, 10, (30,))  # float8 products need multiples of 16
losses = []
for _ in range(30):
    with torch.autocast("cpu", torch.bfloat16, enabled="plain" not in sys.argv):
        loss = nn.functional.cross_entropy(model(images).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    seen = {"layers": [type(each).__name__ for each in model], "losses": losses, "names": list(model.state_dict())}
    Path("seen.json").write_text(json.dumps({**seen, "is_same_weight": model[0].weight is first}))
