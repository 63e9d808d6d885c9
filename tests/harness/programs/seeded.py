"""Trains with dropout on shuffled data under a fixed seed, and writes every loss bit-exactly; ends after 2,000 steps."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"} if "workers" in sys.argv else {}

torch.manual_seed(0)
data = TensorDataset(torch.randn(3200, 16), torch.randint(0, 4, (3200,)))
layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    for x, y in DataLoader(data, batch_size=16, shuffle=True, **WORKERS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
